"""Report of a simulation: efficiency, waits, staleness, recovery, load. Pure.

A simulation trains nothing, so samples count as the convergence table says
(`elche.cadence.convergence`), by the windows and lags that really came about. What is
measured is time: start-up, measuring, switching and drains are in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elche.cadence.convergence import sample_efficiency
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.local_batches import local_cut
from elche.sim.cluster import Device
from elche.sim.history import CAUSES, Phase, RankHistory
from elche.sim.simulation import Simulation

US_PER_S = 1e6
TRIALS = 0.01
"""Fraction of the busiest rank's samples below which a rank was only probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """A part of the run under one policy.

    Attributes:
        policy: its name.
        began_s: when.
        seconds: how long it lasted.
        samples: trained on.
        ranks: of them took part.
        windows: synchronisations.
        window_batches: local batches of all ranks in a mean window.
        lag_batches: mean batches of the fastest rank until an average was adopted.
        sample_efficiency: that the convergence table gives for this.
    """

    policy: str
    began_s: float
    seconds: float
    samples: int
    ranks: int
    windows: int
    window_batches: float
    lag_batches: float
    sample_efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceReport:
    """Choice of ``auto``: policy, time and reason."""

    at_s: float
    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRank:
    """One rank; times in seconds.

    Attributes:
        rank: its number.
        device: its kind's name.
        batches: trained on.
        samples: trained on.
        busy_s: computing.
        alive_s: from its start to its end or death, or the run's end.
        waits: by cause.
        has_died: whether it was killed.
    """

    rank: int
    device: str
    batches: int
    samples: int
    busy_s: float
    alive_s: float
    waits: dict[str, float]
    has_died: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A simulated run.

    Attributes:
        policy: of the run.
        world_size: ranks at the start.
        seconds: virtual, from the start of the first rank to the end of the last one.
        samples: trained on; what was lost with a rank and done again counts once.
        samples_per_s: of them.
        efficiency: samples per second over the sum of what each device delivers alone,
            on the same batches, while it lived; start-up and drain included.
        sample_efficiency: samples that one device would need over those that were
            trained on, by the convergence table (`PhaseReport`).
        goodput: what the run has learned per second over what the fastest device would
            alone; start-up and drain included.
        phases: parts of the run, by policy.
        choices: of ``auto``.
        waits: share of all ranks' time spent waiting, by cause.
        sync_overhead: share of all ranks' time that synchronising costs: waiting for
            window ends, reductions and copies.
        windows: synchronisations.
        lag_batches: mean and most batches run in the next window before the average of
            the last one was adopted (overlapped only): the staleness of averages.
        lag_s: likewise in seconds from a window's end.
        recovery_s: per change of the membership, until all who lived trained again;
            None if it came too late to matter.
        messages_per_s: events and instructions at the coordinator.
        coordinator_us_per_event: mean of measured time in its core, and ...
        coordinator_most_us: ... the longest; None where it was not measured.
        events: that the coordinator handled.
        instructions: that it gave.
        most_instructions: as answer to one event.
        by_kind: events of each kind, and microseconds of one.
        ranks: each one.
    """

    policy: str
    world_size: int
    seconds: float
    samples: int
    samples_per_s: float
    efficiency: float
    sample_efficiency: float
    goodput: float
    phases: tuple[PhaseReport, ...]
    choices: tuple[ChoiceReport, ...]
    waits: dict[str, float]
    sync_overhead: float
    windows: int
    lag_batches: tuple[float, int]
    lag_s: tuple[float, float]
    recovery_s: tuple[float | None, ...]
    messages_per_s: float
    coordinator_us_per_event: float | None
    coordinator_most_us: float | None
    events: int
    instructions: int
    most_instructions: int
    by_kind: dict[str, tuple[int, float]]
    ranks: tuple[SimulatedRank, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def report_of(sim: Simulation) -> Report:
    """Sums up a simulation that has run."""
    history, load = sim.history, sim.load
    began_s = min(sums.began_s for sums in history.ranks.values())
    end_s = sim.end_s
    seconds = max(end_s - began_s, 1e-12)
    samples = history.samples
    ranks = sorted(history.ranks.items())
    alive_s = {rank: _alive_s(sums, end_s) for rank, sums in ranks}
    all_s = sum(alive_s.values()) or 1.0
    waits = {
        cause: sum(sums.waits_s[cause] for _, sums in ranks) / all_s for cause in CAUSES
    }
    copies = sum(sums.copies_s for _, sums in ranks) / all_s
    capacity = sum(
        _solo_speed(sim, rank, sums) * alive_s[rank]
        for rank, sums in ranks
        if not sim.is_turned_away(rank)
    )
    timed = sim.watch.timer is not None and load.events > 0
    phases = _phases(sim)
    effective = sum(one.samples * one.sample_efficiency for one in phases)
    return Report(
        policy=sim.cluster.run.policy,
        world_size=sim.cluster.world_size,
        seconds=seconds,
        samples=samples,
        samples_per_s=samples / seconds,
        efficiency=samples / capacity if capacity else 0.0,
        sample_efficiency=effective / samples if samples else 0.0,
        goodput=effective / seconds / _fastest_alone(sim),
        phases=phases,
        choices=tuple(
            ChoiceReport(at_s=at_s, policy=told.policy, reason=told.reason)
            for at_s, told in history.choices
        ),
        waits=waits,
        sync_overhead=waits["window end"] + waits["reduction"] + copies,
        windows=history.windows,
        **_lags([sums for _, sums in ranks]),
        recovery_s=_recoveries(sim),
        messages_per_s=(load.events + load.instructions) / seconds,
        coordinator_us_per_event=(
            load.busy_s / load.events * US_PER_S if timed else None
        ),
        coordinator_most_us=load.longest_s * US_PER_S if timed else None,
        events=load.events,
        instructions=load.instructions,
        most_instructions=load.most_instructions,
        by_kind={
            kind: (int(count), spent_s / count * US_PER_S)
            for kind, (count, spent_s) in sorted(load.by_kind.items())
        },
        ranks=tuple(_report_of_rank(rank, sums, alive_s[rank]) for rank, sums in ranks),
    )


def _report_of_rank(rank: int, sums: RankHistory, alive_s: float) -> SimulatedRank:
    return SimulatedRank(
        rank=rank,
        device=sums.device,
        batches=sums.batches,
        samples=sums.samples,
        busy_s=sums.compute_s,
        alive_s=alive_s,
        waits=dict(sums.waits_s),
        has_died=sums.has_died,
    )


def _lags(every: Sequence[RankHistory]) -> dict[str, Any]:
    """Delay until averages were adopted: mean and most, in batches and in seconds."""
    adoptions = max(1, sum(sums.adoptions for sums in every))
    return {
        "lag_batches": (
            sum(sums.lag_batches for sums in every) / adoptions,
            max(sums.most_lag_batches for sums in every),
        ),
        "lag_s": (
            sum(sums.lag_s for sums in every) / adoptions,
            max(sums.most_lag_s for sums in every),
        ),
    }


def _alive_s(sums: RankHistory, end_s: float) -> float:
    """From its start to its death, or to the end of the run that it was part of."""
    until_s = sums.ended_s if sums.has_died and sums.ended_s is not None else end_s
    return max(0.0, until_s - sums.began_s)


def _solo_speed(sim: Simulation, rank: int, sums: RankHistory) -> float:
    """Samples per second that its device delivers alone, as its batches really were."""
    device: Device = sim.devices[rank]
    if not sums.samples:
        samples = sim.cluster.run.sizes[0][0]
        return samples / device.mean_batch_s(samples)
    if device.prefetch:
        solo_s = max(sums.compute_s, sums.load_s)
    else:
        solo_s = sums.compute_s + sums.load_s
    return sums.samples / solo_s


def _recoveries(sim: Simulation) -> tuple[float | None, ...]:
    found: list[float | None] = []
    for recovery in sim.history.recoveries:
        dead = {r for r, sums in sim.history.ranks.items() if sums.has_died}
        waited_for = recovery.ranks - dead
        if waited_for and waited_for <= recovery.going.keys():
            last_s = max(recovery.going[rank] for rank in waited_for)
            found.append(last_s - recovery.at_s)
        else:
            found.append(None)
    return tuple(found)


def _fastest_alone(sim: Simulation) -> float:
    """Samples per second of the fastest device, on whole batches without drifts."""
    samples = sim.cluster.run.sizes[0][0]
    return max(samples / device.mean_batch_s(samples) for device in sim.cluster.devices)


def _phases(sim: Simulation) -> tuple[PhaseReport, ...]:
    """One unless ``auto`` changed the policy; none if no epoch began."""
    history = sim.history
    begun = history.phases
    ends = [*begun[1:], history.phase("", sim.end_s)] if begun else []
    return tuple(_between(sim, one, end) for one, end in zip(begun, ends, strict=True))


def _between(sim: Simulation, began: Phase, end: Phase) -> PhaseReport:
    samples = end.samples - began.samples
    windows = end.windows - began.windows
    done = {
        rank: tuple(
            after - before
            for after, before in zip(
                sums, began.ranks.get(rank, (0, 0, 0)), strict=True
            )
        )
        for rank, sums in end.ranks.items()
    }
    most = max((counts[0] for counts in done.values()), default=0)
    ranks = sum(counts[0] > TRIALS * most for counts in done.values())
    whole = sim.cluster.run.sizes[0][0]
    run = sim.cluster.run
    cut = local_cut(run.config.windows, sim.cluster.world_size, run.min_share_samples)
    local = cut.largest_of(whole)
    batches = samples / max(1, windows) / local
    _, adoptions, late = max(done.values(), default=(0, 0, 0))
    lag = late / max(1, adoptions)
    efficiency = 1.0
    if samples and ranks:
        efficiency = sample_efficiency(
            began.policy,
            ranks,
            batches,
            lag,
            run_batches=float(run.epochs * BatchSizes(run.sizes).num_batches),
            global_batch=ranks * local / whole,
        )
    return PhaseReport(
        policy=began.policy,
        began_s=began.began_s,
        seconds=end.began_s - began.began_s,
        samples=samples,
        ranks=ranks,
        windows=windows,
        window_batches=batches,
        lag_batches=lag,
        sample_efficiency=efficiency,
    )
