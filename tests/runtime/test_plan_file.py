"""The file of a recorded run: each epoch in its place."""

from __future__ import annotations

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
