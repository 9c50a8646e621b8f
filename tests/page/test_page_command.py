"""`elche page`: what it refuses, and whom its server answers."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from elche.errors import ConfigError
from elche.monitor.page.charts import RunCharts
from elche.monitor.page.rows import ChartRows
from elche.monitor.page.server import EventTail, parse_address
from elche.monitor.run_history import RunHistory
from tests.harness.event_lines import event, lines, records

Serve = Callable[[Path], str]


def status_of(address: str, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", path, headers=named)
    status = connection.getresponse().status
    connection.close()
    return status


def test_all_lies_under_the_random_path(tmp_path: Path, served: Serve) -> None:
    address = served(tmp_path)
    path = urlsplit(address).path
    assert len(path) > 20
    script = "static/js/bokeh.min.js"
    assert status_of(address, path) == status_of(address, path + script) == 200
    assert status_of(address, path + "metadata") == 200
    for wrong in ("/", "/ws", f"/{script}", "/metadata", "/autoload.js", "/x" + path):
        assert status_of(address, wrong) == 404, wrong
    assert urlsplit(address).hostname == "127.0.0.1"


def test_a_foreign_websocket_is_refused(tmp_path: Path, served: Serve) -> None:
    address = served(tmp_path)
    port, path = urlsplit(address).port, urlsplit(address).path
    with urlopen(address, timeout=60) as page:
        found = re.search(r'"token":"([^"]+)"', page.read().decode())
    assert found is not None
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
        "Sec_WebSocket_Protocol": f"bokeh, {found[1]}",
    }
    for origin, status in {
        f"http://localhost:{port}": 101,
        f"http://127.0.0.1:{port}": 101,
        "http://localhost:1": 403,
        "http://evil.example": 403,
        f"http://evil.example:{port}": 403,
    }.items():
        assert status_of(address, path + "ws", Origin=origin, **upgrade) == status


@pytest.mark.parametrize(
    ("folder", "text", "error"),
    [
        ("none", None, "which is no folder"),
        (".", "hello\n", "expected elche events, got 'hello'"),
        (".", '{"kind":"file","format":"elche events","version":99}\n', "newer elche"),
    ],
)
def test_it_refuses(tmp_path: Path, folder: str, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    command = [sys.executable, "-m", "elche", "page", str(tmp_path / folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert error in " ".join(ended.stderr.split())


def test_a_busy_port_or_all_addresses_are_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for at, error in (
            (f":{other.getsockname()[1]}", "Address already in use; name another"),
            ("0:0", "got 0, which means all"),
            ("localhost:http", "expected HOST:PORT"),
        ):
            command = [sys.executable, "-m", "elche", "page", str(tmp_path), "--at", at]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert ended.returncode == 2
            assert error in " ".join(ended.stderr.split())


def test_addresses() -> None:
    assert parse_address("") == ("127.0.0.1", 0)
    assert parse_address("8000") == parse_address(":8000") == ("127.0.0.1", 8000)
    assert parse_address("10.0.0.7:80") == ("10.0.0.7", 80)
    for wrong in ("10.0.0.7", "localhost:http", "[::1:80", "127.0.0.1:70000"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            parse_address(wrong)
    assert parse_address("[::1]:80") == ("::1", 80)


def test_a_run_does_not_begin_without_its_page(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        run = ["run", "--page-at", at, "--events", str(tmp_path / "run"), __file__]
        command = [sys.executable, "-m", "elche", *run]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    assert "Address already in use" in " ".join(ended.stderr.split())
    assert "could not be started" in ended.stderr


def test_the_tail_reads_whole_lines_once(tmp_path: Path) -> None:
    path, found = tmp_path / "events.jsonl", [*records(4)]
    tail = EventTail(tmp_path)
    tail.read()
    assert tail.rows.history.records == []
    text = lines(*found)
    path.write_text(text[:-10])
    tail.read()
    tail.read()
    assert len(tail.rows.history.windows) == 3
    with path.open("a") as file:
        file.write(text[-10:])
    tail.read()
    assert [len(tail.rows.rows), len(tail.rows.history.windows)] == [4, 4]
    path.write_text(lines(*found[:6]))
    tail.read()
    assert len(tail.rows.history.windows) == len(tail.rows.rows) == 1


def test_charts_append_rows_and_redraw_for_a_new_rank() -> None:
    history = RunHistory()
    charts = RunCharts(ChartRows(history), 0.0)
    *head, last = records(5)
    for record in (*head, event("died", 1.0)):
        history.take(record)
    charts.update(ChartRows(history), 0.0)
    source = charts.layout.select_one({"name": "rows"})
    assert source.data["samples"] == [120, 240, 360, 480]
    history.take(last)
    charts.update(ChartRows(history), 0.0)
    assert source.data["samples"] == [120, 240, 360, 480, 600]
    history.take({"t": 0.0, "kind": "rank", "rank": 2, "device": "new"})
    charts.update(ChartRows(history), 0.0)
    source = charts.layout.select_one({"name": "rows"})
    assert len(source.data["share_2"]) == 5
