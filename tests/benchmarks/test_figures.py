"""Figures of the documents: each is found with its date, and ages by its code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import Figure

SCRIPT = "import sys; print('control 0.991', 'table', sep='\\n'); sys.exit({})"


def _figure(text: str) -> Figure:
    return Figure(f'-c "{text}"', folders=("ddp",), bound="1.0")


def test_every_figure_is_shown_with_a_date_and_has_code() -> None:
    for name, figure in figures.figures().items():
        assert figures.DATE.fullmatch(figure.date()), name
        assert all(Path("src/elche", each).is_dir() for each in figure.folders), name


@pytest.mark.parametrize(("commit", "is_old"), [("HEAD", False), ("HEAD~300", True)])
def test_a_figure_is_old_once_its_code_has_a_later_commit(
    monkeypatch: pytest.MonkeyPatch, commit: str, is_old: bool
) -> None:
    ages = {"HEAD..": "", "HEAD~300..": "abc"}

    def git(*words: str) -> str:
        return ages.get(words[3], "2026-11-29 abc")

    monkeypatch.setattr(figures, "git", git)
    record = {"date": "2026-11-30", "commit": f"{commit}-dirty"}
    assert ("  old  " in figures.age(_figure("pass"), record)) == is_old
    shown = Figure("nothing shows this")
    assert "  old  " in figures.age(shown, {})


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (SCRIPT.format(0), 0, "bound: 1.0"),
        (SCRIPT.format(3), 1, "one refused: exit code 3"),
        ("print('control 0.91: busy machine')", 1, "one refused: its control was"),
    ],
)
def test_a_disturbed_run_is_refused_and_changes_no_record(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str,
    code: int,
    said: str,
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(figures, "figures", lambda: {"one": _figure(text)})
    monkeypatch.setattr(sys, "argv", ["figures", "--only", "one", "--json", str(path)])
    assert figures.main() == code
    assert said in capsys.readouterr().out
    assert path.exists() == (code == 0)
    if code == 0:
        record = json.loads(path.read_text())["one"]
        assert record["control"] == ["control 0.991"]
        assert record["output"] == ["control 0.991", "table"]
