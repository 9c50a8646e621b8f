"""The file of a recorded run: each epoch in its place."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from elche.config import RunConfig
from elche.config_parts import DebugConfig
from elche.errors import ConfigError
from elche.runtime.plan_file import PlanFile


def recorded(path: Path, *plans: str) -> PlanFile:
    """A run that records these epochs, and one that replays them."""
    first = PlanFile.for_rank(RunConfig(debug=DebugConfig(record=str(path))), 0)
    for plan in plans:
        first.keep(plan)
    return PlanFile.for_rank(RunConfig(debug=DebugConfig(replay=str(path))), 0)


def test_epochs_come_back_in_their_places(tmp_path: Path) -> None:
    again = recorded(tmp_path / "plan.json", '{"a": 1}', '{"b": 2}')
    assert [json.loads(again.epoch(number)) for number in range(2)] == [
        {"a": 1},
        {"b": 2},
    ]
    with pytest.raises(ConfigError, match="holds 2 epochs, this run begins epoch 2"):
        again.epoch(2)


def test_an_epoch_that_was_left_is_not_replayed_as_the_next_one(tmp_path: Path) -> None:
    again = recorded(tmp_path / "plan.json", "", '{"b": 2}')
    with pytest.raises(ConfigError, match="epoch 0 of the record was left before its"):
        again.epoch(0)
    assert json.loads(again.epoch(1)) == {"b": 2}


def test_only_rank_0_holds_anything(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    other = PlanFile.for_rank(RunConfig(debug=DebugConfig(record=str(path))), 1)
    other.keep('{"a": 1}')
    assert other.epoch(0) == ""
    assert not path.exists()


@pytest.mark.parametrize("text", ["{}", "[3]", "no json"])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot replay"):
        PlanFile.for_rank(RunConfig(debug=DebugConfig(replay=str(path))), 0)


def test_a_record_needs_its_folder(tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "plan.json")
    with pytest.raises(ConfigError, match="there is no folder"):
        PlanFile.for_rank(RunConfig(debug=DebugConfig(record=path)), 0)


def test_a_full_disk_is_a_warning_and_keeps_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Once: the run ended, with a torn file.
    path = tmp_path / "plan.json"
    plans = PlanFile.for_rank(RunConfig(debug=DebugConfig(record=str(path))), 0)
    plans.keep('{"a": 1}')

    def fill(self: Path, text: str, encoding: str) -> None:
        self.write_bytes(text.encode()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fill)
        plans.keep('{"b": 2}')
    assert "No space left on device" in caplog.text
    assert json.loads(path.read_text()) == [{"a": 1}]
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    plans.keep('{"c": 3}')
    assert json.loads(path.read_text()) == [{"a": 1}, {"b": 2}, {"c": 3}]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_a_device_is_written_to_and_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    plans = PlanFile.for_rank(RunConfig(debug=DebugConfig(record="/dev/full")), 0)
    plans.keep('{"a": 1}')
    assert "cannot record to /dev/full" in caplog.text
    assert Path("/dev/full").is_char_device()
