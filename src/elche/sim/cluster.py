"""Description of a simulation: devices, link, faults and the run. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from elche.config import RunConfig
from elche.config_checks import check_fields
from elche.errors import ConfigError
from elche.schedule.planning.profile import LinkProfile, check_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Speed change: from ``at_s``, batches take ``factor`` times their usual time."""

    at_s: float
    factor: float

    def __post_init__(self) -> None:
        check_fields(self, not_negative=("at_s",), positive=("factor",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A kind of device, with one rank per device.

    Attributes:
        seconds_per_sample: compute time per sample, unless ``curve`` is given.
        count: number of devices.
        seconds_per_batch: fixed time of a batch.
        curve: measured (samples, seconds) of batches, in place of a time per sample and
            per batch. Linear between points; the last segment is extrapolated.
        jitter: coefficient of variation of a batch's time (log-normal).
        drift: changes of speed.
        spike_probability: fraction of batches that take longer.
        spike_factor: factor on the time of these batches.
        load_seconds_per_sample: loading time; overlaps with compute if prefetched.
        prefetch: number of batches that the loader loads ahead.
        first_batch_s: extra time of a rank's first batch (compilation).
        copy_bytes_per_s: speed of copying parameters (overlapped averaging).
        name: name in the report.
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
            raise ConfigError("give one of seconds_per_sample and curve")
        if self.curve:
            self._check_curve()
        check_fields(
            self,
            not_negative=(
                *("seconds_per_batch", "load_seconds_per_sample", "first_batch_s"),
                *("jitter", "spike_probability"),
            ),
            positive=("seconds_per_sample", "spike_factor", "copy_bytes_per_s"),
            whole={"count": 1, "prefetch": 0},
        )
        if self.spike_probability > 1.0:
            raise ConfigError(
                f"spike_probability must be at most 1, got {self.spike_probability}"
            )

    def _check_curve(self) -> None:
        curve = self.curve
        if self.seconds_per_batch:
            raise ConfigError("a curve includes the fixed time; omit seconds_per_batch")
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
                "curve must not fall at its end, from which it is extrapolated: got "
                f"{curve[-1][1]} s after {curve[-2][1]} s"
            )

    def compute_s(self, samples: int) -> float:
        """Returns the compute time (s) of a batch, before drifts, jitter and spikes.

        Below a curve's first point its first segment is extrapolated, but not below the
        time proportional to that point.
        """
        if self.seconds_per_sample is not None:
            return self.seconds_per_batch + self.seconds_per_sample * samples
        at = bisect.bisect_left(self.curve, (samples, 0.0), 1, len(self.curve) - 1)
        (few, few_s), (many, many_s) = self.curve[at - 1], self.curve[at]
        line_s = few_s + (samples - few) * (many_s - few_s) / (many - few)
        return max(line_s, samples * few_s / few) if samples < few else line_s

    def mean_batch_s(self, samples: int) -> float:
        """Returns the mean delivered time (s) of a batch on this device alone."""
        compute_s = self.compute_s(samples)
        compute_s *= 1.0 + self.spike_probability * (self.spike_factor - 1.0)
        load_s = self.load_seconds_per_sample * samples
        return max(compute_s, load_s) if self.prefetch else compute_s + load_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(LinkProfile):
    """Link between the ranks, and from each rank to the coordinator.

    Attributes:
        latency_s: latency of any message.
        bytes_per_s: nominal bandwidth of each rank's connection.
        efficiency: fraction of the bandwidth that payload reaches; 1.0 if
            ``bytes_per_s`` was measured with payload.
        spread_s: largest extra time of a control message, drawn for each message.
            Messages of one channel keep their order.
    """

    latency_s: float = 0.0005
    bytes_per_s: float = 1.25e9
    spread_s: float = 0.0

    def __post_init__(self) -> None:
        not_negative = "latency_s", "spread_s"
        check_fields(self, not_negative=not_negative, positive=("bytes_per_s",))
        check_efficiency(self.efficiency)

    def reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Returns the time (s) of an all-reduce, with a ring's bytes, a tree's latency.

        ``2 * latency * ceil(log2 W) + 2 * (W - 1) / W * bytes / (efficiency *
        bandwidth)``: the bytes of bandwidth-optimal algorithms, with the latency of
        halving and doubling (R. Thakur et al., "Optimization of Collective
        Communication Operations in MPICH", 2005).
        """
        if ranks < 2:
            return 0.0
        rounds = 2.0 * math.ceil(math.log2(ranks))
        sent = 2.0 * (ranks - 1) / ranks * num_bytes
        return rounds * self.latency_s + self.transfer_s(sent)

    def broadcast_s(self, num_bytes: float, ranks: int) -> float:
        """Returns the time (s) to broadcast a model by a pipelined tree."""
        if ranks < 2:
            return 0.0
        rounds = math.ceil(math.log2(ranks))
        return rounds * self.latency_s + self.transfer_s(num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChange:
    """Change of the link from ``at_s`` on."""

    at_s: float
    bytes_per_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        not_negative = "at_s", "latency_s"
        check_fields(self, not_negative=not_negative, positive=("bytes_per_s",))
        if self.bytes_per_s is None and self.latency_s is None:
            raise ConfigError("give bytes_per_s or latency_s of the changed link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Change of the membership; exactly one kind is set.

    Attributes:
        at_s: time of the fault.
        kill_rank: rank whose process dies.
        fail_rank: rank whose loop raises, and reports that.
        hang_rank: rank that hangs, with its connection open.
        join: device of a rank that joins, or the index of its ``[[device]]`` table.
    """

    at_s: float = 0.0
    kill_rank: int | None = None
    fail_rank: int | None = None
    hang_rank: int | None = None
    join: int | Device | None = None

    def __post_init__(self) -> None:
        check_fields(self, not_negative=("at_s",))
        kinds = ("kill_rank", "fail_rank", "hang_rank", "join")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"give exactly one of {', '.join(kinds)}, got {given or 'none'}"
            )

    @property
    def rank(self) -> int | None:
        """Rank that the fault affects; None for a new rank."""
        ranks = self.kill_rank, self.fail_rank, self.hang_rank
        return next((rank for rank in ranks if rank is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """Early exit of a rank's loop from an epoch after ``batches`` batches."""

    rank: int
    epoch: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Training of a simulated run: model, data and policy.

    Attributes:
        samples: number of samples in an epoch.
        batch_size: samples of a global batch.
        model_bytes: number of bytes that a reduction sends.
        epochs: number of epochs.
        seed: seed of all random draws.
        policy: policy of the run.
        options: other fields of `RunConfig`.
        regroup_s: time to form a new process group.
        start_spread_s: largest delay of a rank's start, drawn for each rank.
        pause_s: largest pause of a rank between epochs, drawn for each pause.
        until_s: time at which the simulation stops, even with work left.
        min_share_samples: least samples of a nonempty share, under ``sync``.
        runs: number of consecutive runs by the same processes.
        batch_sizes: batch sizes of an epoch as runs of (samples, batches), instead of
            ``samples`` and ``batch_size``.
        bad_batches: global batches of each epoch whose gradients are not finite (only
            in windows).
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
        counts = "batch_size", "epochs", "runs", "min_share_samples"
        least = dict.fromkeys(counts, 1) | {"samples": int(self.batch_sizes is None)}
        check_fields(
            self,
            not_negative=("model_bytes", "regroup_s", "start_spread_s", "pause_s"),
            positive=("until_s",),
            whole=least,
        )
        self.config  # noqa: B018 - checks the options

    @property
    def config(self) -> RunConfig:
        """Settings that the ranks agree on."""
        return RunConfig(**{"policy": self.policy, **self.options})

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Batch sizes of an epoch; the last batch may be smaller."""
        if self.batch_sizes is not None:
            return self.batch_sizes
        whole, rest = divmod(self.samples, self.batch_size)
        runs = [(self.batch_size, whole), (rest, 1)]
        return tuple((size, count) for size, count in runs if size and count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Complete description of a simulation.

    Attributes:
        run: model, data and policy.
        devices: kinds of devices, with their counts.
        link: link between the ranks.
        link_changes: changes of the link, by time.
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
        for at, fault in enumerate(self.faults):
            where = f"[[fault]] {at}"
            if fault.rank is not None:
                self.check_rank(where, fault.rank)
            if isinstance(fault.join, int) and not (
                0 <= fault.join < len(self.devices)
            ):
                raise ConfigError(
                    f"{where}: join = {fault.join} names no [[device]]; there are "
                    f"{len(self.devices)}, counted from 0"
                )

    def check_rank(self, where: str, rank: int) -> None:
        """Refuses a rank that neither starts in the cluster nor joins it."""
        joins = sum(fault.join is not None for fault in self.faults)
        if not 0 <= rank < self.world_size + joins:
            raise ConfigError(
                f"{where}: there is no rank {rank}; ranks are 0 to "
                f"{self.world_size + joins - 1}"
            )

    @property
    def ranks(self) -> list[Device]:
        """Device of each rank at the start."""
        return [device for device in self.devices for _ in range(device.count)]

    @property
    def world_size(self) -> int:
        """Number of ranks at the start."""
        return sum(device.count for device in self.devices)

    def link_at(self, now_s: float) -> Link:
        """Returns the link at a time."""
        link = self.link
        for change in self.link_changes:
            if change.at_s <= now_s:
                changed = {"latency_s": change.latency_s}
                changed["bytes_per_s"] = change.bytes_per_s
                given = {k: v for k, v in changed.items() if v is not None}
                link = replace(link, **given)
        return link
