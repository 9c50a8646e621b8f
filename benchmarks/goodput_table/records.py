"""Measured cells, kept as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

CONTROL = "indep"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run showed.

    Attributes:
        setting: its name; of devices alone and the control what `devices_key` says.
        contender: who ran.
        repeat: which of the repetitions, from 0.
        samples_per_s: of the run; of the control all ranks together.
        seconds: of training.
        windows: synchronisations.
        overrun: by which part real computing exceeded the emulated time.
        loss: on the held-out set at the end.
        window_batches: local batches of all ranks in a window, second half of the run.
        late_batches: of the fastest rank until an average came.
        policy: what it trained by in the end, where ``auto`` chose.
        error: why there is no figure.
    """

    setting: str
    contender: str
    repeat: int
    samples_per_s: float = 0.0
    seconds: float = 0.0
    windows: float = 0.0
    overrun: float = 0.0
    loss: float | None = None
    window_batches: float = 1.0
    late_batches: float = 0.0
    policy: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Which cell it is of."""
        return self.setting, self.contender, self.repeat


@dataclass
class Records:
    """Cells that were measured; of several of one cell the last counts.

    Attributes:
        path: the file, one record a line; None: not kept.
        by_cell: those with a figure.
        errors: of cells that failed and have none.
    """

    path: Path | None
    by_cell: dict[tuple[str, str, int], Record] = field(default_factory=dict)
    errors: dict[tuple[str, str, int], Record] = field(default_factory=dict)

    @staticmethod
    def read(path: Path | None) -> Records:
        """The file's; none if it is not there."""
        records = Records(path)
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                records._put(Record(**json.loads(line)))
        return records

    def add(self, record: Record) -> None:
        """Keeps a record, in the file too."""
        self._put(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")

    def _put(self, record: Record) -> None:
        if record.error:
            self.errors[record.key] = record
        else:
            self.errors.pop(record.key, None)
            self.by_cell[record.key] = record

    def alone(self, devices_key: str, speeds: Iterable[float]) -> list[float] | None:
        """Samples per second of each device alone; None if one was not measured."""
        cells = [(devices_key, f"solo {speed:g}", 0) for speed in speeds]
        if not all(cell in self.by_cell for cell in cells):
            return None
        return [self.by_cell[cell].samples_per_s for cell in cells]

    def repeats(self, setting: str, contender: str) -> list[Record]:
        """A cell's records, in order of their repetitions."""
        cells = sorted(
            cell for cell in self.by_cell if cell[:2] == (setting, contender)
        )
        return [self.by_cell[cell] for cell in cells]
