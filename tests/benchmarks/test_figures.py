"""Figures of the documents: each is found with its date, and ages by its code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import Figure


def test_every_figure_is_shown_with_a_date_and_has_code() -> None:
    for name, figure in figures.figures().items():
        assert figures.DATE.fullmatch(figure.date()), name
        assert all(Path("src/elche", each).is_dir() for each in figure.folders), name


def test_a_figure_is_old_once_its_code_has_a_later_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, code = {"ab12..": "", "cd34..": "abc"}, "2026-11-29 abc"
    monkeypatch.setattr(figures, "git", lambda *words: known.get(words[3], code))
    for commit, word in (("ab12-dirty", "new"), ("cd34", "old")):
        record = {"date": "2026-11-29", "commit": commit}
        assert f"  {word}  " in figures.age(Figure("nowhere"), record)
    assert "  old  " in figures.age(Figure("nowhere"), {})


def test_a_disturbed_run_is_refused_and_changes_no_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["figures", "--only", "one", "--json", str(path)])
    for text, said in (
        ("raise SystemExit(3)", "one refused: exit code 3"),
        ("print('control 0.91: busy machine')", "one refused: its control was"),
        ("print('control 0.991'); print('table')", "bound: 1.0"),
    ):
        figure = Figure(f'-c "{text}"', bound="1.0")
        monkeypatch.setattr(figures, "figures", lambda figure=figure: {"one": figure})
        is_refused = "refused" in said
        assert (figures.main(), path.exists()) == (is_refused, not is_refused)
        assert said in capsys.readouterr().out
    assert json.loads(path.read_text())["one"]["control"] == ["control 0.991"]
