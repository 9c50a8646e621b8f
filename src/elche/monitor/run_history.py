"""Reader of a run's event file: facts, epochs, events, and columns for charts. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from elche.errors import ConfigError
from elche.monitor.event_records import FORMAT, VERSION, Record, coarser, merged

MOST_WINDOWS: Final = 40_000


@final
class RunHistory:
    """Records of a run, complete as far as they have been fed.

    Args:
        most_windows: bound on windows in memory; beyond it older ones are merged.

    Attributes:
        records: known records in their order.
        revision: number of times that windows were merged; charts that append new
            windows must then be drawn anew.
        runs: ``run`` records, one per start.
        ranks: newest ``rank`` record of each rank.
        epochs: ``epoch`` records.
        windows: ``window`` records.
        events: ``event`` records.
        end: the ``end`` record of the latest start; None while it runs.
        settings: settings of the launcher and of the ranks.
        is_training: an epoch has begun and not ended.
        epoch_samples: samples of the latest epoch so far.
    """

    def __init__(self, most_windows: int = MOST_WINDOWS) -> None:
        self._most_windows = most_windows
        self._partial = ""
        self.revision = 0
        self._clear()

    def _clear(self) -> None:
        self.records: list[Record] = []
        self.runs: list[Record] = []
        self.ranks: dict[int, Record] = {}
        self.epochs: list[Record] = []
        self.windows: list[Record] = []
        self.events: list[Record] = []
        self.end: Record | None = None
        self.settings: dict[str, Any] = {}
        self.is_training = False
        self.epoch_samples = 0

    def feed(self, text: str) -> int:
        """Takes the next piece of the file; a partial last line is kept for later.

        Returns:
            Number of records that were complete. Lines that are not JSON, as a crash
            may leave, are skipped.

        Raises:
            ConfigError: this is no event file, or one of a newer elche.
        """
        *lines, self._partial = (self._partial + text).split("\n")
        count = 0
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and "kind" in record:
                self.take(record)
                count += 1
            elif not self.records and line.strip():
                raise ConfigError(f"expected {FORMAT}, got {line[:60]!r}")
        return count

    def take(self, record: Record) -> None:
        """Takes a record; unknown kinds are ignored."""
        kind = record["kind"]
        if kind == "file":
            version = record.get("version")
            if record.get("format") != FORMAT or not isinstance(version, int):
                raise ConfigError(f"expected {FORMAT}, got {record}")
            if version > VERSION:
                raise ConfigError(
                    f"expected {FORMAT} of version {VERSION}, got {version}: read the "
                    "file with the newer elche that wrote it"
                )
        elif kind == "run":
            self.runs.append(record)
            self.settings |= record.get("settings", {})
            self.end, self.is_training = None, False
        elif kind == "rank":
            self.ranks[record["rank"]] = record
            self.settings |= record.get("settings", {})
        elif kind == "epoch":
            self.epochs.append(record)
            self.is_training, self.epoch_samples = True, record.get("done", 0)
        elif kind == "epoch_end":
            self.is_training = False
        elif kind == "window":
            self.windows.append(record)
            self.epoch_samples = record["epoch_samples"]
        elif kind == "event":
            self.events.append(record)
        elif kind == "end":
            self.end, self.is_training = record, False
        else:
            return
        self.records.append(record)
        if len(self.windows) > self._most_windows:
            records, self.revision = coarser(self.records), self.revision + 1
            self._clear()
            for each in records:
                self.take(each)

    @property
    def scalar_names(self) -> list[str]:
        """Names of logged values, in the order of their first appearance."""
        return list(dict.fromkeys(n for each in self.windows for n in each["values"]))

    @property
    def epoch_starts(self) -> dict[int, int]:
        """The run's samples at the begin of each epoch that has windows."""
        starts: dict[int, int] = {}
        for each in self.windows:
            starts.setdefault(each["epoch"], each["samples"] - each["epoch_samples"])
        return starts

    def recent(self, span_s: float = 5.0) -> Record | None:
        """Merges the windows of the last seconds, at least one; None if there is none.

        Args:
            span_s: least duration that the windows cover, if the run has so many.
        """
        covered_s, first = 0.0, len(self.windows)
        while first and covered_s < span_s:
            first -= 1
            covered_s += self.windows[first]["duration_s"]
        return merged(self.windows[first:]) if self.windows else None

    def scalar(self, name: str, start: int = 0) -> dict[str, list[float]]:
        """Columns ``t``, ``samples`` and ``value`` of a logged value."""
        return columns(
            {"t": w["t"], "samples": w["samples"], "value": w["values"][name]}
            for w in self.windows[start:]
            if name in w["values"]
        )


def run_row(window: Record) -> dict[str, float]:
    """Figures of the whole run in a window.

    ``device_samples_per_s`` is the sum of what the devices deliver while they do not
    synchronise; ``efficiency`` is the rate over that sum, 0 if it is unknown.
    """
    duration_s, samples = window["duration_s"], sum(window["rank_samples"])
    rate = samples / duration_s if duration_s > 0 else 0.0
    most = math.fsum(window.get("device_samples_per_s", ()))
    return {
        "t": window["t"],
        "samples": window["samples"],
        "epoch": window["epoch"],
        "duration_s": duration_s,
        "samples_per_s": rate,
        "device_samples_per_s": most,
        "efficiency": rate / most if most > 0 else 0.0,
    }


def rank_row(window: Record, rank: int) -> dict[str, float]:
    """Figures of a rank in a window; zeros where it did nothing.

    ``share`` is of the samples. ``compute``, ``data_wait``, ``transfer`` and
    ``sync_wait`` (waiting for other ranks, and reducing) are fractions of its time,
    which add up to 1; ``busy`` is the sum of the first three.
    """

    def of(name: str) -> float:
        row = window.get(name, ())
        return float(row[rank]) if rank < len(row) else 0.0

    time_s, total = of("busy_s") + of("sync_wait_s"), sum(window["rank_samples"])
    parts = {
        name: of(f"{name}_s") / time_s if time_s > 0 else 0.0
        for name in ("busy", "data_wait", "transfer", "sync_wait")
    }
    return {
        "t": window["t"],
        "samples": window["samples"],
        "samples_per_s": of("device_samples_per_s"),
        "share": of("rank_samples") / total if total else 0.0,
        "compute": max(0.0, parts["busy"] - parts["data_wait"] - parts["transfer"]),
        **parts,
    }


def columns(rows: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """Turns rows with equal keys into columns; {} without rows."""
    found = list(rows)
    return {name: [row[name] for row in found] for name in (found[0] if found else ())}


def thinned(windows: Sequence[Record], most: int) -> list[Record]:
    """Merges neighbouring windows so that at most ``most`` are left, for a chart."""
    size = max(1, math.ceil(len(windows) / most))
    return [merged(windows[at : at + size]) for at in range(0, len(windows), size)]
