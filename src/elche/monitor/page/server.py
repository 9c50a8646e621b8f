"""Server of the page: one process that reads the event file and serves browsers.

Everything lies under a random path. A browser can change nothing: a session holds
copies of the charts, and no code of the server reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final
from urllib.parse import urlsplit

from bokeh.application import Application
from bokeh.application.handlers import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets

from elche.errors import ConfigError
from elche.monitor.page.charts import THEME, RunCharts
from elche.monitor.page.rows import ChartRows
from elche.monitor.run_history import RunHistory
from elche.runtime.report.event_file import NAME

READ_S: Final = 0.5
"""Time (s) between two reads of the file, and between two updates of a browser."""
MOST_WINDOWS: Final = 4000
"""Most windows in memory; beyond it older ones are merged."""
LOOPBACK: Final = "127.0.0.1", "localhost"
_TEMPLATE: Final = """{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">
{% endblock %}"""


@final
class EventTail:
    """Rows of a run's event file as it appears, grows, or is replaced."""

    def __init__(self, folder: Path) -> None:
        self._path, self._inode, self._read_bytes = folder / NAME, 0, 0
        self.rows = ChartRows(RunHistory(MOST_WINDOWS))

    def read(self) -> None:
        """Reads what is new, or all of a new file; ConfigError if that is another's."""
        history = self.rows.history
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                self._inode, self._read_bytes = status.st_ino, 0
                history = RunHistory(MOST_WINDOWS)
            file.seek(self._read_bytes)
            if new := file.read():
                self._read_bytes += len(new)
                history.feed(new.decode(errors="replace"))
                self.rows = ChartRows(history)


def serve_page(folder: Path, at: str, say: Callable[[str], None]) -> None:
    """Serves a folder's page at low priority until a signal; ``say`` gets its address.

    Raises:
        ConfigError: the address cannot be used, or the file is no event file.
    """
    if not folder.is_dir():
        text = f"expected the folder of `elche run --events FOLDER`, got {folder}"
        raise ConfigError(f"{text}, which is no folder")
    os.nice(10)
    logging.getLogger("bokeh").setLevel(logging.ERROR)
    logging.getLogger("tornado").setLevel(logging.CRITICAL)
    asyncio.run(_serve(folder, *parse_address(at), say))


async def _serve(
    folder: Path, host: str, port: int, say: Callable[[str], None]
) -> None:
    tail = EventTail(folder)
    tail.read()

    def fill(document: Document) -> None:
        """Fills the document of a browser that connects."""
        charts = RunCharts(tail.rows, time.time())
        document.title = f"elche {folder.resolve().name}"
        document.theme, document.template = THEME, _TEMPLATE
        document.add_root(charts.layout)
        update = lambda: charts.update(tail.rows, time.time())  # noqa: E731
        document.add_periodic_callback(update, round(1000 * READ_S))

    try:
        sockets = bind_sockets(port, host)
    except OSError as error:
        raise ConfigError(
            f"the page cannot listen on {host}, port {port}: {error.strerror}; "
            "name another port, or none for a free one"
        ) from error
    own, port = sockets[0].getsockname()[:2]
    if own in ("0.0.0.0", "::"):
        text = f"expected the address that browsers open, got {host}, which means all"
        raise ConfigError(text)
    name = f"[{host}]" if ":" in host else host
    path = f"/{secrets.token_urlsafe(16)}"
    application = BokehTornado(
        {"/": Application(FunctionHandler(fill))},
        prefix=path,
        extra_websocket_origins=[f"{each}:{port}" for each in (*LOOPBACK, name)],
        websocket_ping_interval=20,  # tornado's, which drops stopped browsers
        websocket_max_message_size_bytes=1 << 16,
    )
    http_server = HTTPServer(application)
    http_server.add_sockets(sockets)
    BaseServer(IOLoop.current(), application, http_server).start()
    say(f"http://{name}:{port}{path}/")
    while True:
        await asyncio.sleep(READ_S)
        tail.read()


def parse_address(at: str) -> tuple[str, int]:
    """Returns host and port; by default of loopback, and 0 for a free port."""
    try:
        parts = urlsplit(f"//{at}" if ":" in at else f"//:{at}")
        return parts.hostname or LOOPBACK[0], parts.port or 0
    except ValueError:
        text = f"expected HOST:PORT such as 127.0.0.1:8000, got {at!r}"
        raise ConfigError(text) from None
