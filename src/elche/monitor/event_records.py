"""Event records of a run, made of its messages and of the launcher's facts. Pure.

A record is one JSON object: its time ``t`` (Unix seconds), its ``kind``, and the fields
that docs/watching.md lists. `EventRecorder` makes records; `RunHistory` reads them.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence, Set
from itertools import zip_longest
from statistics import median
from typing import Any, Final, TypeAlias, final

from elche.coordination.protocol.events import (
    CheckpointSaved,
    Event,
    Failed,
    Join,
    Left,
    RankLost,
    Tick,
)
from elche.coordination.protocol.instructions import (
    Abort,
    BeginEpoch,
    EndEpoch,
    Instruction,
    LeaveOut,
    MetricsReported,
    PolicyChosen,
)

Record: TypeAlias = dict[str, Any]

FORMAT: Final = "elche events"
VERSION: Final = 1
RANK_FIELDS: Final = (
    *("rank_samples", "discarded_samples"),
    *("busy_s", "data_wait_s", "transfer_s", "sync_wait_s"),
)
"""Fields of a window with one number per rank."""
SMOOTHING_S: Final = 2.0
"""Time constant of a device's speed, in seconds of its own work."""
FACTOR: Final = 1.5
INTERVAL_S: Final = 1.0
KNOWN: Final = 5
"""Intervals whose median is the usual speed; shares settle in these first seconds."""
LASTING: Final = 3
"""Intervals that a change must last."""

_RECORDED: Final = (
    *(Join, BeginEpoch, EndEpoch, MetricsReported, PolicyChosen, LeaveOut),
    *(CheckpointSaved, RankLost, Failed, Left, Abort, Tick),
)


def is_recorded(message: object) -> bool:
    """Returns True for messages that `EventRecorder.see` uses, and for a `Tick`."""
    return isinstance(message, _RECORDED)


@final
class SpeedWatch:
    """Watches ranks that share the work of a run under one policy.

    Speed is samples over time of own work, in intervals of a second. It has changed
    when the latest intervals all differ from the usual speed by `FACTOR`; they then
    define the usual speed. So noise below the root of `FACTOR` (22%) is no change.

    Shares follow a rank that changes. As batches have fixed costs, the other ranks'
    speeds follow as well: less, in the other direction. These changes are not returned.
    """

    def __init__(self) -> None:
        self._duration_s, self._work = 0.0, dict[int, tuple[int, float]]()
        self._recent, self._usual = dict[int, list[float]](), dict[int, float]()

    def observe(
        self, window: dict[str, Any], ranks: Set[int]
    ) -> list[tuple[str, str, int]]:
        """Returns name, text and rank of each change in the next ``window`` record."""
        names = "rank_samples", "discarded_samples", "busy_s"
        for rank, row in enumerate(zip(*map(window.get, names), strict=True)):
            samples, time_s = self._work.get(rank, (0, 0.0))
            self._work[rank] = samples + row[0] + row[1], time_s + row[2]
        self._duration_s += window["duration_s"]
        if self._duration_s < INTERVAL_S:
            return []
        for rank, (samples, time_s) in self._work.items():
            if rank in ranks and samples > 0 and time_s > 0:
                recent = [*self._recent.get(rank, ()), samples / time_s][-KNOWN:]
                self._recent[rank] = recent
                if len(recent) == KNOWN:
                    self._usual.setdefault(rank, median(recent))
        self._duration_s, self._work = 0.0, {}
        return self._changes()

    def _changes(self) -> list[tuple[str, str, int]]:
        lasting, moves, found = set[int](), dict[int, float](), []
        for rank, usual in self._usual.items():
            latest = self._recent[rank][-LASTING:]
            moves[rank] = math.log(median(latest) / usual)
            if max(latest) * FACTOR < usual or min(latest) > usual * FACTOR:
                lasting.add(rank)
        most = max((moves[rank] for rank in lasting), key=abs, default=0.0)
        for rank, move in moves.items():
            before, now = (
                self._usual[rank],
                median(self._recent[rank][-LASTING:]),
            )
            if rank in lasting and move * most > 0:
                text = f"{math.exp(abs(move)):.1f} times: {now:,.1f} samples/s of its "
                text += f"own work, {before:,.1f} before"
                found.append(("slower" if move < 0 else "faster", text, rank))
            if rank in lasting or move * most < 0:
                self._usual[rank] = now
        return found


@final
class EventRecorder:
    """Makes the records of one start of a run.

    Args:
        epoch_starts: the run's samples at the begin of each epoch so far, and of the
            next one, where an earlier start of the run has trained.
        epoch_sizes: samples of each epoch so far; a start may continue inside one.
    """

    def __init__(
        self, epoch_starts: Mapping[int, int] = {}, epoch_sizes: Mapping[int, int] = {}
    ) -> None:
        self._starts, self._sizes = dict(epoch_starts), dict(epoch_sizes)
        self._samples = max(self._starts.values(), default=0)
        self._epoch, self._epoch_samples, self._policy = -1, 0, ""
        self._is_training = self._is_over = False
        self._live, self._gone = set[int](), set[int]()
        self._excluded: set[int] = set()
        self._out, self._tried = frozenset[int](), set[int]()
        self._speeds: dict[int, float] = {}
        self._settings: Record = {}
        self._watches: dict[tuple[str, frozenset[int]], SpeedWatch] = {}

    def see(self, message: Event | Instruction, now_s: float) -> list[Record]:
        """Returns the records of a message; call in the order of the journal."""
        return [{"t": now_s, **record} for record in self._records(message)]

    def _records(self, message: Event | Instruction) -> list[Record]:
        match message:
            case MetricsReported() if message.window >= 0:
                window, ranks = self._window(message), self._live - self._excluded
                sharing = self._policy, frozenset(ranks)
                watch = self._watches.setdefault(sharing, SpeedWatch())
                events = (event_record(*each) for each in watch.observe(window, ranks))
                return [window, *self._return(window["rank_samples"]), *events]
            case BeginEpoch():
                return self._begin(message)
            case EndEpoch() if self._is_training:
                self._is_training = False
                if message.left and not message.is_early:
                    return []  # the rest follows
                return [{"kind": "epoch_end", "epoch": message.epoch}]
            case Join():
                return self._join(message)
            case LeaveOut():
                return self._exclude(message)
            case PolicyChosen():
                return [event_record("policy", message.reason, message.rank)]
            case CheckpointSaved():
                return [event_record("checkpoint", message.text)]
            case Failed():
                return self._lose(message.rank, f"failed: {message.error}")
            case RankLost():
                silent = f"silent for {message.silent_s:g} s"
                why = silent if message.silent_s else "its process is gone"
                return self._lose(message.rank, why)
            case Left() if message.rank in self._live:
                self._remove(message.rank)
                return [event_record("left", "the rank has finished", message.rank)]
            case Abort() if not self._is_over:
                self._is_over = True
                return [event_record("error", message.reason, message.failed_rank)]
        return []

    def _join(self, join: Join) -> list[Record]:
        self._live.add(join.rank)
        self._gone.discard(join.rank)
        record: Record = {"kind": "rank", "rank": join.rank, "device": join.device}
        record["memory_bytes"] = join.memory_bytes
        settings = {name: json.loads(value) for name, value in join.settings}
        if settings != self._settings:
            record["settings"] = self._settings = settings
        if self._epoch < 0:
            return [record]
        return [record, event_record("joined", f"{join.device} joined", join.rank)]

    def _begin(self, begin: BeginEpoch) -> list[Record]:
        if self._is_training:
            return []  # the same instruction to another rank
        self._is_training, self._policy = True, begin.policy
        rest = sum(size * count for size, count in begin.sizes)
        if begin.epoch != self._epoch:  # else the rest of an epoch that was cut
            done = max(0, self._sizes.get(begin.epoch, rest) - rest)  # before a restart
            self._samples = self._starts.get(begin.epoch, self._samples) + done
            self._epoch, self._epoch_samples = begin.epoch, done
            self._starts, self._sizes = {}, {}
        total = self._epoch_samples + rest
        record = {"kind": "epoch", "epoch": begin.epoch, "policy": begin.policy}
        record |= {"samples": total, "done": self._epoch_samples}
        return [record | {"epochs": self._settings.get("epochs")}]

    def _window(self, message: MetricsReported) -> Record:
        values = json.loads(message.values)
        self._samples += sum(values["rank_samples"])
        self._epoch_samples += sum(values["rank_samples"])
        work = zip(*(values[name] for name in RANK_FIELDS[:3]), strict=True)
        for rank, (samples, discarded, busy_s) in enumerate(work):
            if samples + discarded > 0 and busy_s > 0:
                speed = (samples + discarded) / busy_s
                before = self._speeds.get(rank, speed)
                weight = -math.expm1(-busy_s / SMOOTHING_S)
                self._speeds[rank] = before + weight * (speed - before)
        ranks = range(len(values["busy_s"]))
        record = {"kind": "window", "epoch": message.epoch, "samples": self._samples}
        record["epoch_samples"] = self._epoch_samples
        for name in ("duration_s", "synchronisations", *RANK_FIELDS):
            record[name] = _rounded(values[name])
        record["device_samples_per_s"] = _rounded(
            [self._speeds.get(r, 0) for r in ranks]
        )
        for rank in self._gone:  # its last samples may come after its end
            self._speeds.pop(rank, None)
        return record | {"values": dict(values["means"])}

    def _exclude(self, change: LeaveOut) -> list[Record]:
        """Records real changes: excluded ranks take part in each epoch's first step."""
        self._out, self._tried = frozenset(change.left_out), set()
        gone = self._out - self._excluded
        back = self._excluded - self._out if change.reason else set[int]()
        self._excluded = self._excluded - back | gone
        named = [("excluded", rank) for rank in sorted(gone)]
        named += [("returned", rank) for rank in sorted(back)]
        text = change.reason or "by the policy"
        return [event_record(name, text, rank) for name, rank in named]

    def _return(self, samples: Sequence[int]) -> list[Record]:
        """Ranks that train in a second window after their exclusion has ended."""
        there = {r for r, n in enumerate(samples) if n} & (self._excluded - self._out)
        back, self._tried = there & self._tried, self._tried | there
        self._excluded -= back
        text = "takes part in the steps again"
        return [event_record("returned", text, rank) for rank in sorted(back)]

    def _lose(self, rank: int, text: str) -> list[Record]:
        if rank not in self._live or self._is_over:
            return []
        self._remove(rank)
        return [event_record("died", text, rank)]

    def _remove(self, rank: int) -> None:
        self._live.discard(rank)
        self._gone.add(rank)
        self._speeds.pop(rank, None)
        self._excluded -= {rank}
        if not self._live:  # the process may begin another run
            self._epoch, self._is_training = -1, False


def _rounded(value: Any) -> Any:
    """Rounds a number, or each of a list, to six places."""
    if isinstance(value, list):
        return [round(each, 6) for each in value]
    return round(value, 6)


def event_record(name: str, text: str, rank: int | None = None) -> Record:
    """Returns a record of kind ``event``, of a rank or (None) of the run."""
    line = text.partition("\n")[0]
    return {"kind": "event", "name": name, "rank": rank, "text": line}


def merged(windows: Sequence[Record]) -> Record:
    """Merges windows: sums of times and samples, weighted means of logged values.

    Device speeds are means over the wall time in which the rank was present. Other
    fields are those of the last window.
    """
    record = dict(windows[-1])
    for name in ("duration_s", "synchronisations"):
        record[name] = _rounded(sum(window[name] for window in windows))
    whole_s = record["duration_s"] or 1.0
    parts = [window["duration_s"] / whole_s for window in windows]
    for name in (*RANK_FIELDS, "device_samples_per_s"):
        rows = zip_longest(*(window[name] for window in windows), fillvalue=0)
        weights = [1] * len(windows) if name in RANK_FIELDS else parts
        record[name] = _rounded([sum(map(operator.mul, weights, row)) for row in rows])
    rows_of: dict[str, list[tuple[float, float]]] = {}
    for window in windows:
        weight = sum(window["rank_samples"]) or 1e-9
        for name, value in window["values"].items():
            rows_of.setdefault(name, []).append((weight, value))
    record["values"] = {
        name: sum(w * value for w, value in rows) / sum(w for w, _ in rows)
        for name, rows in rows_of.items()
    }
    return record


def coarser(records: Sequence[Record], others: int = 4000) -> list[Record]:
    """Merges the older windows pairwise; the newest quarter is kept.

    Repeated, it makes resolution fall with age. Of events and epochs the newest
    ``others`` are kept.
    """
    kinds = [record["kind"] for record in records]
    windows = [at for at, kind in enumerate(kinds) if kind == "window"]
    older = windows[: len(windows) * 3 // 4]
    rest = [at for at, k in enumerate(kinds) if k in ("event", "epoch", "epoch_end")]
    dropped = {*older[0::2][: len(older) // 2], *rest[:-others]}
    result = list(records)
    for first, second in zip(older[0::2], older[1::2], strict=False):
        result[second] = merged([records[first], records[second]])
    return [record for at, record in enumerate(result) if at not in dropped]
