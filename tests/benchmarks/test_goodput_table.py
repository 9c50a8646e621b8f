"""The table of goodput: its star, what is measured again, and its figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.goodput_table.__main__ import OutOfTimeError, Table
from benchmarks.goodput_table.design import FOUR, SETTINGS, Setting
from benchmarks.goodput_table.records import Record, Records
from benchmarks.goodput_table.report import control_lines, lines_of, table
from benchmarks.paired import mean_interval
from elche.cadence.convergence import sample_efficiency
from elche.errors import RemoteRankError

PAIR = Setting(name="pair", contenders=("sync", "async"), speeds=(1.0, 0.25))
KEY = PAIR.devices_key
RATES = {"solo-0": 100.0, "solo-1": 25.0, "indep": 125.0, "sync": 110.0, "async": 120.0}
Run = Callable[..., Record]


def asked(**settings: Any) -> argparse.Namespace:
    known = {
        "repeats": 1,
        "seconds": 8.0,
        "solo_seconds": 3.0,
        "budget_s": 1e9,
        "min_control": 0.98,
    }
    return argparse.Namespace(**{**known, **settings})


class Measured(Table):
    """A table whose runs cost nothing; a list of rates is used up, run by run."""

    def __init__(
        self, records: Records, rates: dict[str, Any], **settings: Any
    ) -> None:
        super().__init__(records, asked(**settings))
        self.rates = rates
        self.ran: list[tuple[str, int]] = []

    def _run(
        self, setting: Setting, contender: str, repeat: int, *args: Any, **more: Any
    ) -> Record:
        with self._timed():
            self.ran.append((contender, repeat))
        rate = self.rates[contender]
        if isinstance(rate, list):
            rate = rate.pop(0)
        if isinstance(rate, Exception):
            raise rate
        return Record(
            setting=setting.name,
            contender=contender,
            repeat=repeat,
            samples_per_s=rate,
            windows=300.0,
            policy=contender,
            window_batches=10.0,
        )


def test_the_star_has_at_most_forty_cells_that_can_be_measured() -> None:
    cells = [(setting, name) for setting in SETTINGS for name in setting.contenders]
    assert len(cells) <= 40
    for setting, name in cells:
        config = setting.config(name, seconds=8.0, alone_s=3.0)
        assert config.spec(config.names[0], 0).optimizer == setting.optimizer
        assert config.bound(config.names[0], [100.0] * len(setting.speeds)) is not None
    varied = [
        sum(
            getattr(setting, factor) != getattr(SETTINGS[0], factor)
            for factor in ("speeds", "model", "optimizer", "batch_size", "link_mbit")
        )
        for setting in SETTINGS
    ]
    assert SETTINGS[0].speeds == FOUR
    assert sorted(varied) == [0, *[1] * 9, 2]  # 250 Mbit/s has the goal of two ranks


def test_all_cells_once_and_then_again_and_none_twice(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    first = Measured(Records.read(path), RATES, repeats=2)
    first.measure([PAIR])
    assert first.ran == [
        *[("solo-0", 0), ("solo-1", 0), ("indep", 0), ("sync", 0), ("async", 0)],
        *[("indep", 1), ("sync", 1), ("async", 1)],
    ]
    again = Measured(Records.read(path), RATES, repeats=3)
    again.measure([PAIR])
    assert again.ran == [("indep", 2), ("sync", 2), ("async", 2)]


def test_a_busy_machine_is_tried_once_more_and_then_left(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    busy = Measured(Records.read(path), {**RATES, "indep": [100.0, 125.0, 90.0, 91.0]})
    busy.measure([PAIR, replace(PAIR, name="other", batch_size=64)])
    alone = ["solo-0", "solo-1", "indep"]
    assert [name for name, _ in busy.ran] == [*alone * 2, "sync", "async", *alone * 2]
    records = Records.read(path)
    assert records.repeats("other", "sync") == []
    (line,) = [each for each in control_lines([PAIR], records) if "not meas" in each]
    assert line.endswith("control 0.728, at least 0.98 is needed: busy machine")


def test_a_cell_that_fails_is_reported_and_measured_another_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cells.jsonl"
    failed = RemoteRankError("rank 1 fell\nits traceback", 1)
    Measured(Records.read(path), {**RATES, "sync": failed}).measure([PAIR])
    records = Records.read(path)
    assert "not measured: pair, sync, repeat 0: rank 1 fell" in control_lines(
        [PAIR], records
    )
    again = Measured(records, RATES)
    again.measure([PAIR])
    assert again.ran == [("sync", 0)]
    assert Records.read(path).errors == {}


def test_the_budget_ends_it_before_a_cell(tmp_path: Path) -> None:
    records = Records.read(tmp_path / "cells.jsonl")
    with pytest.raises(OutOfTimeError):
        Measured(records, RATES, budget_s=19.0).measure([PAIR])
    assert records.by_cell == {}


def test_the_figures_of_a_row() -> None:
    records = Records(None)
    table_of_two = Measured(
        records, {**RATES, "sync": [110.0, 114.0], "async": [120.0, 124.0]}, repeats=2
    )
    table_of_two.measure([PAIR])
    sync, windows = table([PAIR], records, seconds=8.0)
    assert sync.efficiency.mean == pytest.approx(112.0 / 125.0)
    assert sync.efficiency.high - sync.efficiency.mean == pytest.approx(
        12.7062 * 2.0 / 125.0, rel=1e-4
    )
    assert sync.goodput.mean == sync.throughput.mean == pytest.approx(1.12)
    worth = sample_efficiency("async", 2, 10.0)
    assert windows.sample_efficiency == pytest.approx(worth)
    assert windows.goodput.mean == pytest.approx(1.22 * worth)
    text = lines_of([sync, windows])
    assert text.splitlines()[0].split()[:3] == ["setting", "contender", "n"]
    assert len(text.splitlines()) == 3
    assert control_lines([PAIR], records) == [
        f"control, {KEY}: 1.000, 1.000 of the devices alone"
    ]


def test_one_run_has_no_interval() -> None:
    assert mean_interval([0.9]).mean == 0.9
    assert mean_interval([0.9]).high == float("inf")
