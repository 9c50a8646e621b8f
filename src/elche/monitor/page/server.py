"""Server of the page: one process that reads the event file and serves browsers.

Everything lies under a random path. A browser can change nothing: a session holds
copies of the charts, and no code of the server reads them.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import urlsplit

from bokeh.application import Application
from bokeh.application.handlers import FunctionHandler
from bokeh.document import Document
from bokeh.models import Div
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.settings import settings
from jinja2 import Template
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.netutil import bind_sockets

from elche.errors import ConfigError
from elche.monitor.page.charts import THEMES, RunCharts, style_sheet
from elche.monitor.page.rows import ChartRows
from elche.monitor.run_history import RunHistory
from elche.runtime.report.event_file import NAME

READ_MS: Final = 500
"""Time (ms) between two reads of the file, and between two updates of a browser."""
MOST_SESSIONS: Final = 32
"""Most browsers at a time; one that has left counts for some seconds more."""
PING_S: Final = 20
"""Time (s) between two pings of a browser, and for their answer."""
MESSAGE_BYTES: Final = 1 << 16
"""Largest message of a browser."""

_TEMPLATE: Final = Template("""{% extends base %}
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<script>
  if (!/theme=/.test(location) && matchMedia("(prefers-color-scheme: dark)").matches)
    location.replace("?theme=dark")
</script>
{% endblock %}
{% block postamble %}<style>{{ style }}
body { padding: 12px 16px; box-sizing: border-box; height: auto; }
a { color: inherit; margin-right: 1em; }
a[aria-current] { font-weight: bold; text-decoration: none; }
</style>{% endblock %}
{% block contents %}<nav>
{% for name, href, is_current in links %}
<a href="{{ href }}" {{ 'aria-current="true"' if is_current }}>{{ name }}</a>
{% endfor %}</nav>
{{ super() }}{% endblock %}""")


@final
class EventTail:
    """Reader of a run's event file as it grows, or is replaced.

    Args:
        folder: the run's folder; the file may not exist yet.

    Attributes:
        rows: rows of the charts; their history is the run so far.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._inode, self._read_bytes = 0, 0
        self.rows = ChartRows(RunHistory())

    def read(self) -> None:
        """Reads new lines, or all of a new file.

        Raises:
            ConfigError: it is no event file, or one of a newer elche.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                self._inode, self._read_bytes = status.st_ino, 0
                self.rows.history = RunHistory()
            file.seek(self._read_bytes)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(lines + newline)
        self.rows.history.feed((lines + newline).decode(errors="replace"))
        self.rows.follow()


@final
class PageServer:
    """The page of one run.

    Args:
        folder: the run's folder.
        host: address to listen on.
        port: port to listen on; 0 for a free one.

    Attributes:
        address: what a browser opens.

    Raises:
        ConfigError: nothing can listen there, or the file is no event file.
    """

    def __init__(self, folder: Path, host: str, port: int) -> None:
        settings.resources = "server"
        self._title = f"elche {folder.resolve().name}"
        self._tail = EventTail(folder)
        self._tail.read()
        try:
            sockets = bind_sockets(port, host)[:1]
        except OSError as error:
            raise ConfigError(
                f"the page cannot listen on {host}, port {port}: {error.strerror}; "
                "name another port, or none for a free one"
            ) from error
        port, path = sockets[0].getsockname()[1], f"/{secrets.token_urlsafe(16)}"
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{port}{path}/"
        origins = {f"{each}:{port}" for each in ("127.0.0.1", "localhost", name)}
        application = BokehTornado(
            {"/": Application(FunctionHandler(self._open))},
            prefix=path,
            extra_websocket_origins=sorted(origins),
            keep_alive_milliseconds=0,  # a ping that drops browsers is tornado's
            websocket_ping_interval=PING_S,
            websocket_max_message_size_bytes=MESSAGE_BYTES,
        )
        http_server = HTTPServer(application)
        http_server.add_sockets(sockets)
        self._server = BaseServer(IOLoop.current(), application, http_server)
        self._error: ConfigError | None = None

    def serve(self) -> None:
        """Serves until a signal.

        Raises:
            ConfigError: the file was replaced by one that is no event file.
        """
        PeriodicCallback(self._read, READ_MS).start()
        self._server.start()
        self._server.io_loop.start()
        if self._error is not None:
            raise self._error

    def _read(self) -> None:
        try:
            self._tail.read()
        except ConfigError as error:
            self._error = error
            self._server.io_loop.stop()

    def _open(self, document: Document) -> None:
        """Fills the document of a browser that connects."""
        document.title = self._title
        if len(self._server.get_sessions("/")) >= MOST_SESSIONS:
            text = f"This page has {MOST_SESSIONS} readers already; try again later."
            document.add_root(Div(text=text))
            return
        context: Any = document.session_context
        asked = context.request.arguments
        theme = "dark" if asked.get("theme") == [b"dark"] else "light"
        over = "samples" if asked.get("over") == [b"samples"] else "time"
        charts = RunCharts(self._tail.rows, time.time(), over, theme)
        document.add_root(charts.layout)
        document.theme = THEMES[theme]
        document.template = _TEMPLATE
        document.template_variables["style"] = style_sheet(theme)
        document.template_variables["links"] = [
            ("over time", f"?over=time&theme={theme}", over == "time"),
            ("over samples", f"?over=samples&theme={theme}", over == "samples"),
            ("light", f"?over={over}&theme=light", theme == "light"),
            ("dark", f"?over={over}&theme=dark", theme == "dark"),
        ]
        document.add_periodic_callback(lambda: charts.update(time.time()), READ_MS)


def serve_page(folder: Path, at: str, say: Callable[[str], None]) -> None:
    """Serves a run's page at low priority until a signal.

    Args:
        folder: the run's folder, which must exist; its event file may not yet.
        at: ``HOST:PORT``, ``HOST`` or ``:PORT``; "" for a free port of loopback.
        say: receives the page's address.

    Raises:
        ConfigError: the folder does not exist, or the address cannot be used.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"expected the folder of a run's events, got {folder}, which is no folder; "
            "`elche run --events FOLDER` writes one"
        )
    os.nice(10)
    logging.getLogger("bokeh").setLevel(logging.ERROR)
    logging.getLogger("tornado").setLevel(logging.CRITICAL)
    server = PageServer(folder, *parse_address(at))
    say(server.address)
    server.serve()


def parse_address(at: str) -> tuple[str, int]:
    """Returns host and port; by default of loopback, and 0 for a free port.

    Raises:
        ConfigError: the port is no number, or the host means all addresses.
    """
    try:
        parts = urlsplit(f"//:{at}" if at.isdecimal() else f"//{at}")
        host, port = parts.hostname or "127.0.0.1", parts.port or 0
    except ValueError as error:
        text = f"expected HOST:PORT such as 127.0.0.1:8000, got {at!r}"
        raise ConfigError(text) from error
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = False
    if is_any:
        text = f"expected the address that browsers open, got {host}, which means all"
        raise ConfigError(text)
    return host, port
