"""Reader of a run's event file: facts, epochs, events, and columns for charts. Pure."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

from elche.errors import ConfigError
from elche.monitor.event_records import FORMAT, VERSION, Record, coarser, merged

MOST_WINDOWS: Final = 40_000
KINDS: Final = "file", "run", "rank", "epoch", "epoch_end", "window", "event", "end"


@final
class RunHistory:
    """Records of a run, as far as they have been fed.

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
        self._most_windows, self._partial, self.revision = most_windows, "", 0
        self._clear()

    def _clear(self) -> None:
        self.records: list[Record] = []
        self.ranks: dict[int, Record] = {}
        self._of: dict[str, list[Record]] = {kind: [] for kind in KINDS}
        self.runs, self.epochs = self._of["run"], self._of["epoch"]
        self.windows, self.events = self._of["window"], self._of["event"]
        self.settings: dict[str, Any] = {}
        self.end: Record | None = None
        self.is_training, self.epoch_samples = False, 0

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
            record = None
            with contextlib.suppress(ValueError):
                record = json.loads(line)
            if isinstance(record, dict) and "kind" in record:
                self.take(record)
                count += 1
            elif not self.records and line.strip():
                raise ConfigError(f"expected {FORMAT}, got {line[:60]!r}")
        return count

    def take(self, record: Record) -> None:
        """Takes a record; unknown kinds are ignored."""
        kind = record["kind"]
        if kind not in KINDS:
            return
        if kind == "file":
            _check_version(record)
        if kind == "rank":
            self.ranks[record["rank"]] = record
        if kind in ("run", "end"):
            self.end = record if kind == "end" else None
        if kind in ("run", "epoch", "epoch_end", "end"):
            self.is_training = kind == "epoch"
        if kind in ("epoch", "window"):
            self.epoch_samples = record.get("epoch_samples") or record.get("done") or 0
        self.settings |= record.get("settings", {})
        self.records.append(record)
        self._of[kind].append(record)
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
        """The run's samples at the begin of each epoch so far, and of the next."""
        starts: dict[int, int] = {}
        for each in self.windows:
            starts.setdefault(each["epoch"], each["samples"] - each["epoch_samples"])
            starts[each["epoch"] + 1] = each["samples"]
        return starts

    @property
    def epoch_sizes(self) -> dict[int, int]:
        """Samples of each whole epoch so far."""
        return {each["epoch"]: each["samples"] for each in self.epochs}

    def recent(self, span_s: float = 5.0) -> Record | None:
        """Merges the windows of the last ``span_s``, or the last one if it is longer.

        None before the first window.
        """
        covered_s, first = 0.0, len(self.windows)
        while first and covered_s < span_s:
            first -= 1
            covered_s += self.windows[first]["duration_s"]
        return merged(self.windows[first:]) if self.windows else None


def _check_version(record: Record) -> None:
    if record.get("format") != FORMAT or not isinstance(record.get("version"), int):
        raise ConfigError(f"expected {FORMAT}, got {record}")
    if (version := record["version"]) > VERSION:
        raise ConfigError(
            f"expected {FORMAT} of version {VERSION}, got {version}: read the file "
            "with the newer elche that wrote it"
        )


def run_row(window: Record) -> dict[str, float]:
    """Figures of the whole run in a window.

    ``device_samples_per_s`` is the sum of what the devices deliver while they do not
    synchronise; ``efficiency`` is the rate over that sum, 0 if it is unknown.
    """
    row = {name: window[name] for name in ("t", "samples", "epoch", "duration_s")}
    samples, duration_s = sum(window["rank_samples"]), window["duration_s"]
    rate = samples / duration_s if duration_s > 0 else 0.0
    most = math.fsum(window.get("device_samples_per_s", ()))
    row |= {"samples_per_s": rate, "device_samples_per_s": most}
    return row | {"efficiency": rate / most if most > 0 else 0.0}


def rank_row(window: Record, rank: int) -> dict[str, float]:
    """Figures of a rank in a window; zeros where it did nothing.

    ``samples_per_s`` is its speed in its own work; without work the smoothed one.
    ``share`` is of the samples. ``compute``, ``data_wait``, ``transfer`` and
    ``sync_wait`` (waiting for other ranks, and reducing) are fractions of its time,
    which add up to 1; ``busy`` is the sum of the first three. ``reduction_s`` is the
    time of a synchronisation, with its wait for others: the least of the ranks' is that
    of the links, since that rank waits least.
    """

    def of(name: str) -> float:
        row = window.get(name, ())
        return float(row[rank]) if rank < len(row) else 0.0

    time_s, total = of("busy_s") + of("sync_wait_s"), sum(window["rank_samples"])
    parts = {
        name[:-2]: of(name) / time_s if time_s > 0 else 0.0
        for name in ("busy_s", "data_wait_s", "transfer_s", "sync_wait_s")
    }
    parts["compute"] = max(0.0, parts["busy"] - parts["data_wait"] - parts["transfer"])
    speed, work = of("device_samples_per_s"), of("rank_samples")
    share = work / total if total else 0.0
    row = {"t": window["t"], "samples": window["samples"], "share": share}
    if (busy_s := of("busy_s")) > 0:
        speed = (work + of("discarded_samples")) / busy_s
    reduction_s = of("sync_wait_s") / (window.get("synchronisations") or 1)
    return row | {"samples_per_s": speed, "reduction_s": reduction_s} | parts


def columns(rows: Iterable[dict[str, float]]) -> dict[str, list[float]]:
    """Turns rows with equal keys into columns; {} without rows."""
    found = list(rows)
    return {name: [row[name] for row in found] for name in (found[0] if found else ())}


def thinned(windows: Sequence[Record], most: int) -> list[Record]:
    """Merges neighbouring windows so that at most ``most`` are left, for a chart."""
    size = max(1, math.ceil(len(windows) / most))
    return [merged(windows[at : at + size]) for at in range(0, len(windows), size)]
