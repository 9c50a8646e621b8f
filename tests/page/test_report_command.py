"""`elche report`: files that open without network, and errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elche.cli.main import main
from tests.harness.event_lines import event, lines, records
from tests.page.conftest import Browser


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run whose rank 1 died."""
    found = [*records(50), event("died", 20.5, rank=1)]
    (tmp_path / "events.jsonl").write_text(lines(*found))
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
    result = report(folder, "-o", folder / "r.html")
    assert result.exit_code == 0, result.output
    html = (folder / "r.html").read_text(encoding="utf-8")
    page = Loads(html)
    assert page.loaded == []
    assert "It trained 120 samples/s" in result.output
    assert len(html.encode()) < 2_500_000
    assert f"{len(html.encode()) / 1e6:.1f} MB" in result.output
    (data,) = (each for each in page.scripts if each.lstrip().startswith("{"))
    shown = json.dumps(json.loads(unescape(data)), ensure_ascii=False)
    for text in ("It trained 120 samples/s", "value_0", "share_1", "Events: 1"):
        assert text in shown
    assert shown.count("died &lt;script&gt;") == 2  # words and list of events


def test_a_browser_shows_it_from_disk(folder: Path, browser: Browser) -> None:
    """Without a request for anything but the file itself, or a complaint."""
    assert report(folder, "-o", folder / "r.html").exit_code == 0
    for width in (1280, 390):
        browser.resize(width)
        browser.open((folder / "r.html").as_uri())
        assert "It trained 120 samples/s" in browser.text("head")
        assert browser.column("rows", "samples")[-1] == 6000
        assert browser.column("events", "text") == ["rank 1 died: died <script>"]
        loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
        assert browser.driver.execute_script(loaded) == []
        overhang = "return document.documentElement.scrollWidth - innerWidth"
        assert browser.driver.execute_script(overhang) <= 0
        assert browser.save(f"report-{width}").stat().st_size > 20_000


def test_a_picture(folder: Path) -> None:
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


SCRIPT = """
import elche, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(256, 4), batch_size=8)
model, optimizer, loader = elche.setup(model, optimizer, loader, epochs=1)
for epoch in range(1):
    for x in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["run", "--speeds", "1,0.5", "--report", "r.html", "script.py"]
    run = subprocess.run(
        [sys.executable, "-m", "elche", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (tmp_path / "elche_runs").iterdir()
    assert f"`elche report elche_runs/{folder.name}` writes it again" in run.stderr
    assert "It trained 256 samples in" in (tmp_path / "r.html").read_text()


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    words = ["run", "--report", str(tmp_path / "r.pdf"), str(script)]
    result = CliRunner().invoke(main, words)
    assert "*.html or *.png" in result.output
    assert list(tmp_path.iterdir()) == [script]
