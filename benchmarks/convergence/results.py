"""Results of runs: a file of JSON lines, one per run, which makes a study resumable."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.convergence.method import Method


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained with which method and learning rate.

    Attributes:
        task: the task's name.
        batches: of all ranks together.
        method: the method.
    """

    task: str
    batches: int
    method: Method

    def key(self) -> str:
        """The same text for the same setting."""
        return json.dumps([self.task, self.batches, self.method.as_dict()])


@dataclass(slots=True)
class Results:
    """What is known, by setting, learning rate and seed.

    Attributes:
        path: the file; it need not exist.
    """

    path: Path
    _values: dict[str, dict[float, dict[int, float]]] = field(default_factory=dict)

    def load(self) -> None:
        """Reads the file, if there is one; skips methods with settings of the past."""
        self._values.clear()
        if not self.path.exists():
            return
        for line in self.path.read_text().splitlines():
            row = json.loads(line)
            if row["method"].keys() - asdict(Method()).keys():
                continue
            setting = Setting(row["task"], row["batches"], Method(**row["method"]))
            self._note(setting, row["lr"], row["seed"], row["value"])

    def add(self, setting: Setting, lr: float, seed: int, value: float) -> None:
        """Adds one run to what is known and to the file."""
        row: dict[str, Any] = {
            "task": setting.task,
            "batches": setting.batches,
            "method": setting.method.as_dict(),
            "lr": lr,
            "seed": seed,
            "value": round(value, 6),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._note(setting, lr, seed, value)

    def of(self, setting: Setting) -> dict[float, dict[int, float]]:
        """Values by learning rate and seed; empty if nothing is known."""
        return self._values.get(setting.key(), {})

    def best(
        self,
        setting: Setting,
        seeds: tuple[int, ...],
        rates: Sequence[float] | None = None,
    ) -> float | None:
        """The learning rate of the lowest mean over some seeds that all must have.

        Args:
            setting: which.
            seeds: which.
            rates: among which learning rates; None for all.
        """
        means = {
            lr: sum(by_seed[s] for s in seeds) / len(seeds)
            for lr, by_seed in self.of(setting).items()
            if all(s in by_seed for s in seeds) and (rates is None or lr in rates)
        }
        finite = {lr: m for lr, m in means.items() if math.isfinite(m)}
        return min(finite or means, key=means.__getitem__) if means else None

    def _note(self, setting: Setting, lr: float, seed: int, value: float) -> None:
        by_lr = self._values.setdefault(setting.key(), {})
        by_lr.setdefault(lr, {})[seed] = value
