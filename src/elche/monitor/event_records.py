"""Event records of a run, made of its messages and of the launcher's facts. Pure.

A record is one JSON object: its time ``t`` (Unix seconds), its ``kind``, and the fields
that docs/watching.md lists. `EventRecorder` makes records; `RunHistory` reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, TypeAlias, final

from elche.coordination.protocol.events import (
    EpochCut,
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
"""Fields of a window with one number per rank; windows are merged by their sums."""
SMOOTHING_S: Final = 2.0
"""Time constant of a device's speed, in seconds of its own work."""

_RECORDED: Final = (
    *(Join, BeginEpoch, EndEpoch, MetricsReported, PolicyChosen, LeaveOut),
    *(EpochCut, RankLost, Failed, Left, Abort, Tick),
)


def is_recorded(message: object) -> bool:
    """Returns True for messages that `EventRecorder.see` uses, and for a `Tick`."""
    return isinstance(message, _RECORDED)


@final
class EventRecorder:
    """Makes the records of one start of a run.

    Args:
        samples: samples trained before, by an earlier start of the run.
        epoch_starts: the run's samples at the begin of each epoch of earlier starts.
    """

    def __init__(
        self, samples: int = 0, epoch_starts: Mapping[int, int] | None = None
    ) -> None:
        self._samples = samples
        self._starts = dict(epoch_starts or {})
        self._epoch, self._epoch_samples = -1, 0
        self._is_training = self._is_over = False
        self._live: set[int] = set()
        self._excluded: frozenset[int] = frozenset()
        self._speeds: dict[int, float] = {}
        self._settings: Record = {}

    def see(self, message: Event | Instruction, now_s: float) -> list[Record]:
        """Returns the records of a message; call in the order of the journal."""
        return [{"t": now_s, **record} for record in self._records(message)]

    def _records(self, message: Event | Instruction) -> list[Record]:
        match message:
            case MetricsReported() if message.window >= 0:
                return [self._window(message)]
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
            case EpochCut() if self._is_training and not message.is_end:
                text = f"epoch {message.epoch} was paused for a checkpoint"
                return [event_record("checkpoint", text)]
            case Failed():
                return self._lose(message.rank, f"failed: {message.error}")
            case RankLost():
                silent = f"silent for {message.silent_s:g} s"
                return self._lose(
                    message.rank, silent if message.silent_s else "its process is gone"
                )
            case Left() if message.rank in self._live:
                self._remove(message.rank)
                return [event_record("left", "the rank has finished", message.rank)]
            case Abort() if not self._is_over:
                self._is_over = True
                return [event_record("error", message.reason, message.failed_rank)]
        return []

    def _join(self, join: Join) -> list[Record]:
        self._live.add(join.rank)
        record: Record = {
            "kind": "rank",
            "rank": join.rank,
            "device": join.device,
            "memory_bytes": join.memory_bytes,
        }
        settings = {name: json.loads(value) for name, value in join.settings}
        if settings != self._settings:
            record["settings"] = self._settings = settings
        if self._epoch < 0:
            return [record]
        text = f"{join.device} joined the run"
        return [record, event_record("joined", text, join.rank)]

    def _begin(self, begin: BeginEpoch) -> list[Record]:
        if self._is_training:
            return []  # the same instruction to another rank
        self._is_training, self._excluded = True, frozenset()
        total = sum(size * count for size, count in begin.sizes)
        if begin.epoch == self._epoch:  # the rest of an epoch that was cut
            total += self._epoch_samples
        else:
            self._samples = self._starts.setdefault(begin.epoch, self._samples)
            self._epoch, self._epoch_samples = begin.epoch, 0
        return [
            {
                "kind": "epoch",
                "epoch": begin.epoch,
                "policy": begin.policy,
                "samples": total,
                "done": self._epoch_samples,
                "epochs": self._settings.get("epochs"),
            }
        ]

    def _window(self, message: MetricsReported) -> Record:
        values = json.loads(message.values)
        samples, discarded, busy_s, *_ = (values[name] for name in RANK_FIELDS)
        self._samples += sum(samples)
        self._epoch_samples += sum(samples)
        for rank, (done, lost, time_s) in enumerate(
            zip(samples, discarded, busy_s, strict=True)
        ):
            if done + lost > 0 and time_s > 0:
                speed = (done + lost) / time_s
                before = self._speeds.get(rank, speed)
                weight = -math.expm1(-time_s / SMOOTHING_S)
                self._speeds[rank] = before + weight * (speed - before)
        rates = [round(self._speeds.get(rank, 0.0), 3) for rank in range(len(samples))]
        times = {n: [round(each, 6) for each in values[n]] for n in RANK_FIELDS[2:]}
        return {
            "kind": "window",
            "epoch": message.epoch,
            "samples": self._samples,
            "epoch_samples": self._epoch_samples,
            "duration_s": round(values["duration_s"], 6),
            "synchronisations": values["synchronisations"],
            "rank_samples": samples,
            "discarded_samples": discarded,
            **times,
            "device_samples_per_s": rates,
            "values": dict(values["means"]),
        }

    def _exclude(self, change: LeaveOut) -> list[Record]:
        before, self._excluded = self._excluded, frozenset(change.left_out)
        text = change.reason or "by the policy"
        gone, back = self._excluded - before, before - self._excluded
        return [
            *(event_record("excluded", text, rank) for rank in sorted(gone)),
            *(event_record("returned", text, rank) for rank in sorted(back)),
        ]

    def _lose(self, rank: int, text: str) -> list[Record]:
        if rank not in self._live or self._is_over:
            return []
        self._remove(rank)
        return [event_record("died", text, rank)]

    def _remove(self, rank: int) -> None:
        self._live.discard(rank)
        self._speeds.pop(rank, None)
        if not self._live:  # the process may begin another run
            self._epoch, self._is_training = -1, False


def event_record(name: str, text: str, rank: int | None = None) -> Record:
    """Returns a record of kind ``event``, without its time.

    Args:
        name: kind of event, such as ``died``.
        text: one line for the reader; later lines are dropped.
        rank: rank that it happened to, None for the run.
    """
    line = text.partition("\n")[0]
    return {"kind": "event", "name": name, "rank": rank, "text": line}


def merged(windows: Sequence[Record]) -> Record:
    """Merges consecutive windows: sums of times and samples, weighted means of values.

    Args:
        windows: at least one; time, epoch and running totals are those of the last.
    """
    record = dict(windows[-1])
    if len(windows) == 1:
        return record
    for name in RANK_FIELDS:
        rows = zip_longest(*(window[name] for window in windows), fillvalue=0)
        record[name] = list(map(sum, rows))
    for name in ("duration_s", "synchronisations"):
        record[name] = sum(window[name] for window in windows)
    sums: dict[str, tuple[float, float]] = {}
    for window in windows:
        weight = sum(window["rank_samples"]) or 1e-9
        for name, value in window["values"].items():
            total, weights = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, weights + weight
    record["values"] = {name: total / over for name, (total, over) in sums.items()}
    return record


def coarser(records: Sequence[Record], others: int = 4000) -> list[Record]:
    """Merges the older windows pairwise; the newest quarter is kept.

    Applied again and again, resolution falls with age.

    Args:
        records: records of a run in their order.
        others: most events and epoch records kept, the newest.
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
