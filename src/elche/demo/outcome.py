"""The demo's results: table, sentences, and files."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elche.demo.compare import ContenderRun, Devices, devices_in_words, machine
from elche.demo.words import sentences, what_was_emulated
from elche.errors import ConfigError
from elche.monitor.plots import Curve, plot_loss_curves
from elche.monitor.results import (
    ContenderResult,
    contenders_to_json,
    time_to_loss,
    to_json_text,
)
from elche.monitor.trace import to_chrome_trace
from elche.runtime.report.files import replace_file

logger = logging.getLogger(__name__)

SOLO = "solo"
TRACED = "elche-cadence"
_SECONDS, _SAMPLES = 0, 1


class DemoOutcome:
    """Results of the contenders, compared.

    Args:
        devices: what they ran on.
        runs: by name; `SOLO` holds a device alone on every rank.

    Attributes:
        title: heads table and picture.
        target_loss: the worst final loss, which all reach that did not diverge.
        table: a row per contender.
        sentences: what the figures mean.
        emulated: what was emulated.
    """

    def __init__(self, devices: Devices, runs: Mapping[str, ContenderRun]) -> None:
        self._devices = devices
        self._runs = dict(runs)
        self._curves = _curves(runs)
        kind = "emulated devices" if devices.emulated else "devices"
        self.title = f"a small GPT on two unequal {kind}"
        self.target_loss = _target_loss(self._curves)
        self.table = _table(runs, self._curves, self.target_loss)
        self.sentences = sentences(self.table, self.target_loss)
        self.emulated = what_was_emulated(devices, list(runs.values()))

    def write(self, folder: Path, facts: Mapping[str, Any]) -> list[Path]:
        """Writes table, picture and trace; returns what was written.

        Args:
            folder: exists.
            facts: about the run, for the table's JSON.
        """
        table = folder / "table.json"
        table.write_text(to_json_text(self._values(facts)))
        picture = folder / "loss.png"
        files = [table, picture] if self._draw(picture) else [table]
        return [*files, self._write_trace(folder / "trace.json")]

    def _values(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        solo = self._runs[SOLO]
        return {
            "contenders": contenders_to_json(self.table),
            "speeds": list(self._devices.speeds),
            "devices": list(solo.devices),
            "emulated": self._devices.emulated,
            "target_loss": self.target_loss,
            "parameters": solo.ranks[0]["parameters"],
            "overrun_share": {n: run.overrun_share for n, run in self._runs.items()},
            "windows": self._runs[TRACED].ranks[0]["windows"],
            "sentences": [*self.sentences, self.emulated],
            **facts,
            "machine": machine(),
        }

    def _draw(self, path: Path) -> bool:
        names = devices_in_words(self._runs[SOLO].devices)
        try:
            plot_loss_curves(
                self._curves, path, f"{self.title}\n{names}", self.target_loss
            )
        except ConfigError as error:
            logger.warning("no picture: %s", error)
            return False
        return True

    def _write_trace(self, path: Path) -> Path:
        run = self._runs[TRACED]
        names = {rank: f"rank {rank}: {name}" for rank, name in enumerate(run.devices)}
        facts = {"contender": run.name, "emulated": self._devices.emulated}
        replace_file(path, json.dumps(to_chrome_trace(run.spans, names, facts)))
        return path


def _curves(runs: Mapping[str, ContenderRun]) -> list[tuple[str, Curve]]:
    """The contenders' names and evaluations; each device alone is one."""
    solo = runs[SOLO]
    curves: list[tuple[str, Curve]] = [
        (f"{SOLO}-{rank}", solo.curve(rank)) for rank in range(len(solo.ranks))
    ]
    return curves + [(name, run.curve()) for name, run in runs.items() if name != SOLO]


def _target_loss(curves: Sequence[tuple[str, Curve]]) -> float | None:
    losses = [curve[-1][2] for _, curve in curves]
    return max((loss for loss in losses if math.isfinite(loss)), default=None)


def _table(
    runs: Mapping[str, ContenderRun],
    curves: Sequence[tuple[str, Curve]],
    target_loss: float | None,
) -> tuple[ContenderResult, ...]:
    solo = runs[SOLO]
    rates = [solo.rate(rank) for rank in range(len(solo.ranks))]
    fastest = curves[rates.index(max(rates))][1]
    best_s = _reached(fastest, target_loss, _SECONDS)
    best_samples = _reached(fastest, target_loss, _SAMPLES)
    rows = []
    for index, (name, curve) in enumerate(curves):
        alone = index < len(rates)
        rate = rates[index] if alone else runs[name].rate()
        time_s = _reached(curve, target_loss, _SECONDS)
        rows.append(
            ContenderResult(
                name=name,
                samples_per_s=rate,
                efficiency=rate / sum(rates),
                sample_efficiency=_ratio(
                    best_samples, _reached(curve, target_loss, _SAMPLES)
                ),
                eval_loss=curve[-1][2],
                time_to_loss_s=time_s,
                gain=_ratio(best_s, time_s),
                note=solo.devices[index] if alone else _note(runs[name]),
            )
        )
    return tuple(rows)


def _note(run: ContenderRun) -> str:
    """On what it ran, and what ``auto`` went on with."""
    choices = run.ranks[0]["choices"]
    return f"both devices, chose {choices[-1][0]}" if choices else "both devices"


def _reached(curve: Curve, target_loss: float | None, axis: int) -> float | None:
    """Seconds or samples until the loss, interpolated; None if never."""
    if target_loss is None:
        return None
    return time_to_loss([(point[axis], point[2]) for point in curve], target_loss)


def _ratio(reference: float | None, value: float | None) -> float | None:
    return reference / value if reference is not None and value else None
