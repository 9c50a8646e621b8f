"""The user's guard is found as Python would find it in the user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elche.cli import main
from elche.errors import ConfigError
from elche.runtime import launch as launch_module
from elche.runtime.coordinator import CoordinatorServer
from elche.runtime.guard_import import find_guard
from elche.trainer_config import trainer_config
from tests.harness import guards


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_what_a_name_stands_for_is_found() -> None:
    assert find_guard("tests.harness.guards:Halving") is guards.Halving
    assert find_guard("tests.harness.guards:Outer.Inner") is guards.Outer.Inner


def test_the_scripts_folder_comes_first(tmp_path: Path) -> None:
    (tmp_path / "guard_beside.py").write_text("from guard_helper import Mine\n")
    (tmp_path / "guard_helper.py").write_text("class Mine: ...\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(ModuleNotFoundError"):
        find_guard("guard_beside:Mine")
    found = find_guard("guard_beside:Mine", (str(tmp_path),))
    assert getattr(found, "__module__", "") == "guard_helper"
    assert sys.path[0] == str(tmp_path)
    find_guard("guard_beside:Mine", (str(tmp_path),))
    assert sys.path.count(str(tmp_path)) == 1


def test_a_trainer_takes_a_guard_as_setup_does() -> None:
    data = [(0.0, 0.0)]
    options = {"dataset": data, "batch_size": 1, "epochs": 1, "guard": guards.Halving}
    assert trainer_config(options).run.guard == "tests.harness.guards:Halving"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"\(AttributeError: .*beside the script"),
        ("Mine = ", r"\(SyntaxError: "),
        ("raise ZeroDivisionError('no')", r"\(ZeroDivisionError: no\)"),
        ("import sys; sys.exit(3)", r"\(SystemExit: 3\)"),
        ("import no_such_module", r"No module named 'no_such_module'"),
    ],
)
def test_a_module_that_cannot_be_used_is_named(
    tmp_path: Path, text: str, says: str
) -> None:
    name = f"guard_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(ConfigError, match=says):
        find_guard(f"{name}:Mine", (str(tmp_path),))


def _launched(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Any]:
    """The configurations that ``elche run`` would launch."""
    seen: list[Any] = []

    def launch(config: launch_module.LaunchConfig) -> launch_module.LaunchResult:
        seen.append(config)
        return launch_module.LaunchResult((0,), "", (), None)

    monkeypatch.setattr(launch_module, "launch", launch)
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 0, result.output
    return seen


def test_elche_run_looks_beside_the_script_behind_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (tmp_path / "link.py").symlink_to(folder / "train.py")
    story = tmp_path / "story.txt"
    script = str(tmp_path / "link.py")
    (config,) = _launched(monkeypatch, "--nproc", "1", "--story", str(story), script)
    assert config.import_path == (str(folder.resolve()),)
    assert config.story_path == story
    assert not story.exists()
    (config,) = _launched(monkeypatch, "--nproc", "1", script)
    assert config.story_path is None


def test_a_story_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('ran')")
    story = tmp_path / "missing" / "story.txt"
    arguments = ["run", "--story", str(story), str(tmp_path / "train.py")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "cannot write" in result.output


@pytest.mark.parametrize("code", [0, 3])
def test_the_story_is_written_however_the_run_ends(tmp_path: Path, code: int) -> None:
    """The rank says nothing and ends: the core hears it from the launcher."""
    story = tmp_path / "story.txt"
    result = launch_module.launch(
        launch_module.LaunchConfig(
            command=(sys.executable, "-c", f"raise SystemExit({code})"),
            num_ranks=1,
            story_path=story,
        )
    )
    assert result.exit_codes == (code,)
    heard = "Failed(rank=0" if code else "Disconnected(rank=0)"
    lines = story.read_text().splitlines()
    assert any(f"<- {heard}" in line for line in lines)
    assert all(" " in line for line in lines)


def test_a_coordinator_beside_rank_0_writes_the_story_when_that_is_gone(
    tmp_path: Path,
) -> None:
    story = tmp_path / "story.txt"
    with subprocess.Popen(
        [sys.executable, "-m", "elche.runtime.coordinator", "2", "127.0.0.1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "ELCHE_KEY": "00" * 32, "ELCHE_STORY": str(story)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"127.0.0.1:")
        process.communicate(timeout=60.0)  # ends its input
    assert process.returncode == 0
    assert story.exists()


def test_a_story_that_cannot_be_written_at_the_end_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    CoordinatorServer(2, b"key").write_story(tmp_path / "missing" / "story.txt")
    assert "cannot write the story of the run to" in caplog.text
