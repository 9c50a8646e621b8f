"""Goodput of DDP and elche over a star of settings on emulated devices.

    python -m benchmarks.goodput_table --results cells.jsonl --repeats 2 --budget-s 1800
    python -m benchmarks.goodput_table --results cells.jsonl --only base,1:0.25

All cells once, then all again. Cells that the file of results has are not measured
again, so an interrupted table goes on. Before a setting's cells comes its control (all
devices at once, without communication): where it is below 0.98 of the devices alone,
these and the control are measured once more, and then the setting is left for another
time. Links need root (network namespaces). ``--slower 2``
doubles all emulated times, for machines on which the real ones do not fit into them
(overrun).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.goodput_table.design import SETTINGS, Setting, bench_name
from benchmarks.goodput_table.records import CONTROL, Record, Records
from benchmarks.goodput_table.report import control_lines, lines_of, table
from benchmarks.hetero.contender import MODULE
from benchmarks.hetero.verdict import MIN_CONTROL, overrun_share, rate_of
from benchmarks.links.namespaces import slow_link
from elche.demo.compare import ContenderRun, run_contender
from elche.errors import ElcheError
from elche.runtime.process.launch_config import Network

MIN_CELL_S = 20.0
"""What a cell is taken to cost before one has been measured."""


class OutOfTimeError(Exception):
    """The next cell would not end within the budget."""


class Table:
    """Measures cells that are not there.

    Args:
        records: where they go.
        asked: the command line.
    """

    def __init__(self, records: Records, asked: argparse.Namespace) -> None:
        self._records = records
        self._asked = asked
        self._began_s = time.monotonic()
        self._longest_s = MIN_CELL_S

    def measure(self, settings: Sequence[Setting]) -> None:
        """All cells once, then all again.

        Raises:
            OutOfTimeError: cells are left.
        """
        for repeat in range(self._asked.repeats):
            for setting in settings:
                cells = self._missing(setting, repeat)
                if not cells or not self._is_quiet(setting, repeat):
                    continue
                with _network(setting) as network:
                    for contender in cells:
                        self._cell(setting, contender, repeat, network)

    def _missing(self, setting: Setting, repeat: int) -> list[str]:
        known = self._records.by_cell
        names = setting.contenders
        return [name for name in names if (setting.name, name, repeat) not in known]

    def _is_quiet(self, setting: Setting, repeat: int) -> bool:
        """Whether the control delivers what the devices alone do; measures both."""
        key = setting.devices_key
        if (key, CONTROL, repeat) in self._records.by_cell:
            return True
        reached = 0.0
        for attempt in range(2):
            alone = self._records.alone(key, setting.speeds)
            if alone is None or attempt:
                alone = self._alone(setting)
            control = self._run(setting, CONTROL, repeat)
            reached = control.samples_per_s / sum(alone)
            if reached >= self._asked.min_control:
                self._records.add(replace(control, setting=key))
                return True
            _say(f"control of {setting.name}: {reached:.3f} of the devices alone")
        least = self._asked.min_control
        failed = f"control {reached:.3f}, at least {least} is needed: busy machine"
        self._records.add(
            Record(setting=key, contender=CONTROL, repeat=repeat, error=failed)
        )
        return False

    def _alone(self, setting: Setting) -> list[float]:
        """Samples per second of each device alone, measured now."""
        found: dict[float, float] = {}
        for rank, speed in enumerate(setting.speeds):
            if speed not in found:
                run = self._run(setting, f"solo-{rank}", 0)
                name = f"solo {speed:g}"
                self._records.add(
                    replace(run, setting=setting.devices_key, contender=name)
                )
                found[speed] = run.samples_per_s
        return [found[speed] for speed in setting.speeds]

    def _cell(
        self, setting: Setting, contender: str, repeat: int, network: Network | None
    ) -> None:
        try:
            record = self._run(setting, contender, repeat, network)
        except ElcheError as error:
            said = str(error).splitlines()[0]
            record = Record(
                setting=setting.name, contender=contender, repeat=repeat, error=said
            )
        self._records.add(record)
        _say(
            f"{setting.name}, {contender}, {repeat}: "
            + (record.error or f"{record.samples_per_s:.1f} samples/s")
        )

    def _run(
        self,
        setting: Setting,
        contender: str,
        repeat: int,
        network: Network | None = None,
    ) -> Record:
        """Trains one contender."""
        seconds, alone_s = self._asked.seconds, self._asked.solo_seconds
        config = setting.config(contender, seconds=seconds, alone_s=alone_s)
        name = bench_name(contender)
        with self._timed():
            spec, devices = config.spec(name, repeat), config.run_on(name, network)
            run = run_contender(name, spec, devices, module=MODULE)
        return _record(setting, contender, repeat, run)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Refuses what would not end in time, by the longest cell so far."""
        began_s = time.monotonic()
        if began_s - self._began_s + self._longest_s > self._asked.budget_s:
            raise OutOfTimeError
        yield
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)


def _record(setting: Setting, contender: str, repeat: int, run: ContenderRun) -> Record:
    result = run.ranks[0]
    steps = result["samples"] / setting.batch_size
    policy = contender.partition(" ")[0]
    if policy == "auto":
        choices = result["choices"]
        policy = choices[-1][0] if choices else "sync"
    batches, late = 1.0, 0.0
    if policy in ("cadence", "async") and result["window_samples"]:
        local = setting.batch_size / len(setting.speeds)
        batches = max(1.0, result["window_samples"] / local)
        late = result["late_batches"][0]
    return Record(
        setting=setting.name,
        contender=contender,
        repeat=repeat,
        samples_per_s=rate_of(contender, run),
        seconds=result["train_s"],
        windows=result["windows"] or steps,
        overrun=overrun_share(run),
        loss=run.curve()[-1][2],
        policy=policy,
        window_batches=batches,
        late_batches=late,
    )


def _network(setting: Setting) -> contextlib.AbstractContextManager[Network | None]:
    if setting.link_mbit is None:
        return contextlib.nullcontext()
    return slow_link(len(setting.speeds), setting.link_mbit)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, help="JSON lines, one a cell")
    parser.add_argument("--only", help="names of settings, with commas between")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="per cell")
    parser.add_argument("--solo-seconds", type=float, default=3.0, help="and control")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--min-control", type=float, default=MIN_CONTROL)
    parser.add_argument("--slower", type=float, default=1.0, help="emulated devices")
    asked = parser.parse_args()
    wanted = asked.only.split(",") if asked.only else [s.name for s in SETTINGS]
    settings = [
        setting.slower(asked.slower) for setting in SETTINGS if setting.name in wanted
    ]
    if len(settings) < len(wanted):
        known = "; ".join(setting.name for setting in SETTINGS)
        parser.error(f"unknown setting in --only {asked.only}; there are: {known}")
    records = Records.read(asked.results)
    try:
        Table(records, asked).measure(settings)
    except (OutOfTimeError, KeyboardInterrupt):
        _say("stopped: cells are left; the same command with --results goes on")
    rows = table(settings, records, seconds=asked.seconds)
    if rows:
        print(lines_of(rows))
    print("\n".join(control_lines(settings, records)))


if __name__ == "__main__":
    main()
