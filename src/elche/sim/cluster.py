"""Description of a simulation: devices, link, faults and the run. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.schedule.planning.profile import LINK_EFFICIENCY, check_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """From ``at_s`` on, every batch takes ``factor`` times its usual time."""

    at_s: float
    factor: float

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("at_s",), positive=("factor",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device; a rank each.

    Attributes:
        seconds_per_sample: compute time per sample; or ``curve``.
        count: so many of them.
        seconds_per_batch: fixed time of a batch beside that.
        curve: instead of both, measured (samples, seconds) of batches: straight
            between two points, and beyond the last as between the last two.
        jitter: coefficient of variation of a batch's time (log-normal).
        drift: changes of speed, by time.
        spike_probability: share of batches that take ...
        spike_factor: ... so many times as long.
        load_seconds_per_sample: loading time; overlaps with compute if prefetched.
        prefetch: batches that the loader loads ahead.
        first_batch_s: added to the first batch of all (compilation).
        copy_bytes_per_s: how fast it copies its parameters (overlapped averaging).
        name: for the report.
    """

    seconds_per_sample: float | None = None
    count: int = 1
    seconds_per_batch: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    jitter: float = 0.0
    drift: tuple[Drift, ...] = ()
    spike_probability: float = 0.0
    spike_factor: float = 10.0
    load_seconds_per_sample: float = 0.0
    prefetch: int = 2
    first_batch_s: float = 0.0
    copy_bytes_per_s: float = 100e9
    name: str = ""

    def __post_init__(self) -> None:
        if (self.seconds_per_sample is None) == (not self.curve):
            raise ConfigError("say one of seconds_per_sample and curve")
        if self.curve:
            self._check_curve()
        _check(
            self,
            at_least_zero=(
                "seconds_per_batch",
                "jitter",
                "spike_probability",
                "load_seconds_per_sample",
                "first_batch_s",
                "prefetch",
            ),
            positive=("seconds_per_sample", "spike_factor", "copy_bytes_per_s"),
            at_least_one=("count",),
        )
        if self.spike_probability > 1.0:
            raise ConfigError(
                f"spike_probability must be at most 1, got {self.spike_probability}"
            )

    def _check_curve(self) -> None:
        curve = self.curve
        if self.seconds_per_batch:
            raise ConfigError("a curve has the fixed time in it: no seconds_per_batch")
        if len(curve) < 2:
            raise ConfigError(f"curve needs at least two points, got {len(curve)}")
        for samples, seconds in curve:
            if not (0 < samples < math.inf and 0 < seconds < math.inf):
                raise ConfigError(
                    "points of curve must be [samples, seconds], finite and positive, "
                    f"got {[samples, seconds]}"
                )
        for (fewer, _), (more, _) in pairwise(curve):
            if fewer >= more:
                raise ConfigError(
                    f"curve must be sorted by samples, got {more} after {fewer}"
                )
        if curve[-1][1] < curve[-2][1]:
            raise ConfigError(
                "curve must not fall at its end, where it goes on as it ends: got "
                f"{curve[-1][1]} s after {curve[-2][1]} s"
            )

    @property
    def drifts(self) -> tuple[Drift, ...]:
        """All changes of speed, in their order."""
        return tuple(sorted(self.drift, key=lambda one: one.at_s))

    @property
    def horizon_batches(self) -> int:
        """Batches that the loader draws ahead, as a rank says it when it joins."""
        return self.prefetch + 1

    def compute_s(self, samples: int) -> float:
        """Seconds that a batch computes, before drifts, jitter and spikes.

        Before a curve's first point its first line goes on, and is never less than
        proportional.
        """
        if self.seconds_per_sample is not None:
            return self.seconds_per_batch + self.seconds_per_sample * samples
        at = bisect.bisect_left(self.curve, (samples, 0.0), 1, len(self.curve) - 1)
        (few, few_s), (many, many_s) = self.curve[at - 1], self.curve[at]
        line_s = few_s + (samples - few) * (many_s - few_s) / (many - few)
        return max(line_s, samples * few_s / few) if samples < few else line_s

    def mean_batch_s(self, samples: int) -> float:
        """Mean delivered seconds of a batch on this device alone, before drifts."""
        compute_s = self.compute_s(samples)
        compute_s *= 1.0 + self.spike_probability * (self.spike_factor - 1.0)
        load_s = self.load_seconds_per_sample * samples
        return max(compute_s, load_s) if self.prefetch else compute_s + load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between the ranks, and from each of them to the coordinator.

    Attributes:
        latency_s: of any message.
        bytes_per_s: of each rank's connection, as it is sold.
        efficiency: part of that which payload reaches; 1.0 where ``bytes_per_s`` was
            measured with payload.
        spread_s: a control message takes up to so much longer, drawn for each one;
            messages of one channel keep their order.
    """

    latency_s: float = 0.0005
    bytes_per_s: float = 1.25e9
    spread_s: float = 0.0
    efficiency: float = LINK_EFFICIENCY

    def __post_init__(self) -> None:
        at_least_zero = "latency_s", "spread_s"
        _check(self, at_least_zero=at_least_zero, positive=("bytes_per_s",))
        check_efficiency(self.efficiency)

    def _send_s(self, num_bytes: float) -> float:
        return num_bytes / (self.efficiency * self.bytes_per_s)

    def reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds of one all-reduce: a ring's bytes, a tree's latencies.

        ``2 * latency * ceil(log2 W) + 2 * (W - 1) / W * bytes / (efficiency *
        bandwidth)``: what bandwidth-optimal algorithms send, with the latency of
        halving and doubling (R. Thakur et al., "Optimization of Collective
        Communication Operations in MPICH", 2005).
        """
        if ranks < 2:
            return 0.0
        rounds = 2.0 * math.ceil(math.log2(ranks))
        sent = 2.0 * (ranks - 1) / ranks * num_bytes
        return rounds * self.latency_s + self._send_s(sent)

    def broadcast_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds to bring one rank's model to all others, as a pipelined tree."""
        if ranks < 2:
            return 0.0
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency_s + self._send_s(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """From ``at_s`` on the link is another one."""

    at_s: float
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        at_least_zero = "at_s", "latency_s"
        _check(self, at_least_zero=at_least_zero, positive=("bytes_per_s",))
        if self.bytes_per_s is None and self.latency_s is None:
            raise ConfigError("say bytes_per_s or latency_s of the changed link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to the membership; exactly one kind.

    Attributes:
        at_s: when; 0 where it happens at random.
        kill_rank: this rank's process dies.
        fail_rank: this rank's loop raises, and says so.
        hang_rank: this rank stops, with its connection open.
        join: a rank joins: the index of a ``[[device]]`` table, or a device.
        kills_per_hour: ranks die at random, so many in an hour.
    """

    at_s: float = 0.0
    kill_rank: int | None = None
    fail_rank: int | None = None
    hang_rank: int | None = None
    join: int | Device | None = None
    kills_per_hour: float | None = None

    def __post_init__(self) -> None:
        _check(self, at_least_zero=("at_s", "kills_per_hour"))
        kinds = ("kill_rank", "fail_rank", "hang_rank", "join", "kills_per_hour")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"say exactly one of {', '.join(kinds)}, got {given or 'none'}"
            )

    @property
    def rank(self) -> int | None:
        """Whom it happens to; None where that is not a given rank."""
        ranks = self.kill_rank, self.fail_rank, self.hang_rank
        return next((rank for rank in ranks if rank is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A rank's loop leaves an epoch after so many batches of it."""

    rank: int
    epoch: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Training of a simulated run: model, data and policy.

    Attributes:
        samples: of an epoch.
        batch_size: of a global batch.
        model_bytes: what a reduction sends.
        epochs: so many.
        seed: of all that is drawn.
        policy: of the run.
        options: other fields of `RunConfig`.
        regroup_s: what forming a new process group costs.
        start_spread_s: ranks start within so long.
        pause_s: ranks do something else between epochs for up to so long.
        until_s: the simulation stops here, whatever is left to do.
        min_share_samples: least share of a rank that has any, under ``sync``.
        runs: so many runs by the same processes, one after the other.
        batch_sizes: of an epoch, as runs of (samples, batches), instead of
            ``samples`` and ``batch_size``.
        bad_batches: global ones of each epoch, whose gradients are not finite (under
            windows).
    """

    samples: int = 0
    batch_size: int = 32
    model_bytes: float = 8e6
    epochs: int = 1
    seed: int = 0
    policy: str = "async"
    options: Mapping[str, Any] = field(default_factory=dict)
    regroup_s: float = 0.05
    start_spread_s: float = 0.0
    pause_s: float = 0.0
    until_s: float | None = None
    min_share_samples: int = 1
    runs: int = 1
    batch_sizes: tuple[tuple[int, int], ...] | None = None
    bad_batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        counts = ["batch_size", "epochs", "runs", "min_share_samples"]
        if self.batch_sizes is None:
            counts.append("samples")
        _check(
            self,
            at_least_zero=("model_bytes", "regroup_s", "start_spread_s", "pause_s"),
            positive=("until_s",),
            at_least_one=counts,
        )
        self.config  # noqa: B018 - checks them

    @property
    def config(self) -> RunConfig:
        """The settings that ranks agree on."""
        return RunConfig(**{"policy": self.policy, **self.options})

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Batch sizes of an epoch: the last batch may be smaller."""
        if self.batch_sizes is not None:
            return self.batch_sizes
        whole, rest = divmod(self.samples, self.batch_size)
        runs = [(self.batch_size, whole), (rest, 1)]
        return tuple((size, count) for size, count in runs if size and count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that is simulated.

    Attributes:
        run: what is trained.
        devices: as the tables name them, with their counts.
        link: what connects the ranks.
        link_changes: of it, by time.
        faults: deaths, joins and the like.
        breaks: loops that leave an epoch early.
    """

    run: SimulatedRun
    devices: tuple[Device, ...]
    link: Link = field(default_factory=Link)
    link_changes: tuple[LinkChange, ...] = ()
    faults: tuple[Fault, ...] = ()
    breaks: tuple[Break, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("a cluster needs at least one [[device]]")
        joins = sum(fault.join is not None for fault in self.faults)
        for at, fault in enumerate(self.faults):
            where = f"[[fault]] {at}"
            if fault.rank is not None and not (
                0 <= fault.rank < self.world_size + joins
            ):
                raise ConfigError(
                    f"{where}: there is no rank {fault.rank}; ranks are 0 to "
                    f"{self.world_size + joins - 1}"
                )
            if isinstance(fault.join, int) and not (
                0 <= fault.join < len(self.devices)
            ):
                raise ConfigError(
                    f"{where}: join = {fault.join} names no [[device]]; there are "
                    f"{len(self.devices)}, counted from 0"
                )

    @property
    def ranks(self) -> list[Device]:
        """The device of each rank at the start."""
        return [device for device in self.devices for _ in range(device.count)]

    @property
    def world_size(self) -> int:
        """Ranks at the start."""
        return sum(device.count for device in self.devices)

    def link_at(self, now_s: float) -> Link:
        """The link at a time."""
        link = self.link
        for change in self.link_changes:
            if change.at_s <= now_s:
                changed = {"latency_s": change.latency_s}
                changed["bytes_per_s"] = change.bytes_per_s
                given = {k: v for k, v in changed.items() if v is not None}
                link = replace(link, **given)
        return link


def _check(
    table: object,
    *,
    at_least_zero: Sequence[str] = (),
    positive: Sequence[str] = (),
    at_least_one: Sequence[str] = (),
) -> None:
    """Refuses values of these fields that are out of range; None is in any."""
    ranges: list[tuple[Sequence[str], Callable[[float], bool], str]] = [
        (at_least_zero, lambda value: value >= 0, "finite and not negative"),
        (positive, lambda value: value > 0, "finite and positive"),
        (at_least_one, lambda value: value >= 1, "at least 1"),
    ]
    for names, is_inside, expected in ranges:
        for name in names:
            value = getattr(table, name)
            if value is not None and not (math.isfinite(value) and is_inside(value)):
                raise ConfigError(f"{name} must be {expected}, got {value!r}")
