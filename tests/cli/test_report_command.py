"""`elche report`: files that open without network, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elche.cli.main import main
from tests.monitor.test_report import EPOCH, RANKS, RUN, START_S, window

HEADER = {"kind": "file", "format": "elche events", "version": 1}
DIED = {"kind": "event", "name": "died", "rank": 1, "text": "its </script> is gone"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run whose rank 1 died."""
    windows = [window([300, 100], values={"loss": 2.0 / n}) for n in range(1, 9)]
    records = [HEADER, RUN, *RANKS, EPOCH, *windows, DIED]
    lines = [json.dumps({"t": START_S + n, **one}) for n, one in enumerate(records)]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def without(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a package look as if it were not installed."""
    real = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == module else real(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)


class Loads(HTMLParser):
    """Finds what a page loads, and its scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"script": "src", "link": "href", "img": "src", "iframe": "src"}
        values = dict(attrs)
        self.loaded += [value for value in [values.get(names.get(tag, ""))] if value]

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts.append(data)


def test_a_page_has_words_charts_and_events_and_loads_nothing(folder: Path) -> None:
    pytest.importorskip("bokeh")
    result = report(folder, "-o", folder / "r.html")
    assert result.exit_code == 0, result.output
    html = (folder / "r.html").read_text(encoding="utf-8")
    page = Loads(html)
    assert page.loaded == []
    assert "It trained 400 samples/s" in result.output
    assert len(html.encode()) < 2_500_000
    assert f"{len(html.encode()) / 1e6:.1f} MB" in result.output
    (data,) = (each for each in page.scripts if each.lstrip().startswith("{"))
    shown = json.dumps(json.loads(unescape(data)), ensure_ascii=False)
    for text in ("It trained 400 samples/s", "value_0", "share_1", "Events: 1"):
        assert text in shown
    assert shown.count("its &lt;/script&gt; is gone") == 2  # words and list of events


def test_a_picture(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    result = report(folder, "-o", folder / "r.png")
    assert result.exit_code == 0, result.output
    picture = (folder / "r.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 200_000


@pytest.mark.parametrize(("kind", "extra"), [("html", "page"), ("png", "demo")])
def test_a_missing_package_is_named(
    folder: Path, kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without({"html": "bokeh", "png": "matplotlib"}[kind], monkeypatch)
    result = report(folder, "-o", folder / f"r.{kind}")
    assert result.exit_code == 2
    assert f"pip install 'elche[{extra}]'" in result.output
    assert not (folder / f"r.{kind}").exists()


def test_errors_say_what_to_do(folder: Path) -> None:
    pytest.importorskip("bokeh")
    events = folder / "events.jsonl"
    output = folder / "r.html"
    assert "*.html or *.png" in report(folder, "-o", "report.pdf").output
    assert "--events FOLDER" in report(folder / "none", "-o", output).output
    assert "cannot write" in report(folder, "-o", folder / "no" / "r.html").output
    events.write_text("")
    assert "has not begun" in report(folder, "-o", output).output
    events.write_text(
        '{"t": 0, "kind": "file", "format": "elche events", "version": 9}\n'
    )
    assert "newer elche" in report(folder, "-o", output).output
    assert not output.exists()
