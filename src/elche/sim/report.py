"""Report of a simulation: efficiency, waits, staleness, recovery, load. Pure.

A simulation does not train: the convergence table (`elche.cadence.convergence`) gives
the value of samples, for the windows and lags that occurred. Virtual times are
measured, and include start-up, probes, switches of policy and drains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elche.cadence.convergence import sample_efficiency
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.accounts.local_batches import local_cut
from elche.sim.history import CAUSES, Phase, RankHistory
from elche.sim.simulation import Simulation

US_PER_S = 1e6
TRIALS = 0.01
"""Fraction of the busiest rank's samples below which a rank was only probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """Part of the run under one policy.

    Attributes:
        policy: name of the policy.
        began_s: start time.
        seconds: duration.
        samples: number of samples trained.
        ranks: number of ranks that trained them.
        windows: number of synchronisations.
        window_batches: local batches of all ranks in a mean window.
        lag_batches: mean number of the fastest rank's batches before an adoption.
        sample_efficiency: sample efficiency from the convergence table.
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
class Report:
    """Results of a simulated run.

    Attributes:
        policy: policy of the run.
        world_size: number of ranks at the start.
        seconds: virtual time from the start of the first rank to the end of the last.
        samples: number of samples trained; repeated ones after a loss count once.
        samples_per_s: samples per second.
        efficiency: samples per second over the devices' summed speeds, each alone on
            the same batches while it was alive; start-up and drain included.
        sample_efficiency: samples that one device would need, divided by the trained
            samples; from the convergence table (`PhaseReport`).
        goodput: learning speed relative to the fastest device alone; start-up and
            drain included.
        phases: parts of the run, by policy.
        choices: choices of ``auto``.
        waits: fraction of all ranks' time spent waiting, by cause.
        sync_overhead: fraction of all ranks' time spent on synchronisation: waits for
            window ends, reductions and copies.
        windows: number of synchronisations.
        lag_batches: staleness of averages (overlapped only): mean and most batches of
            the next window before the last window's average was adopted.
        lag_s: mean and longest time from a window's end to the adoption of its average.
        recovery_s: by membership change, the time until all surviving ranks trained
            again; None if they did not.
        messages_per_s: events and instructions per second at the coordinator.
        coordinator_us_per_event: mean measured time (µs) of an event in its core; None
            if not measured.
        coordinator_most_us: longest such time; None if not measured.
        most_instructions: most instructions for one event.
        ranks: results of each rank.
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
    most_instructions: int
    ranks: tuple[RankHistory, ...]


def report_of(sim: Simulation) -> Report:
    """Creates the report of a simulation that has run."""
    history, load = sim.history, sim.load
    began_s = min(sums.began_s for sums in history.ranks.values())
    end_s = sim.end_s
    seconds = max(end_s - began_s, 1e-12)
    samples = history.samples
    ranks = [history.ranks[rank] for rank in sorted(history.ranks)]
    for sums in ranks:
        died_s = sums.ended_s if sums.has_died else None
        sums.alive_s = max(0.0, (end_s if died_s is None else died_s) - sums.began_s)
    all_s = sum(sums.alive_s for sums in ranks) or 1.0
    waits = {
        cause: sum(sums.waits[cause] for sums in ranks) / all_s for cause in CAUSES
    }
    copies = sum(sums.copies_s for sums in ranks) / all_s
    capacity = sum(
        _solo_speed(sim, sums) * sums.alive_s
        for sums in ranks
        if not sim.is_rejected(sums.rank)
    )
    whole = sim.cluster.run.sizes[0][0]
    fastest = max(whole / one.mean_batch_s(whole) for one in sim.cluster.devices)
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
        goodput=effective / seconds / fastest,
        phases=phases,
        choices=tuple(
            ChoiceReport(at_s=at_s, policy=choice.policy, reason=choice.reason)
            for at_s, choice in history.choices
        ),
        waits=waits,
        sync_overhead=waits["window end"] + waits["reduction"] + copies,
        windows=history.windows,
        **_lags(ranks),
        recovery_s=_recoveries(sim),
        messages_per_s=(load.events + load.instructions) / seconds,
        coordinator_us_per_event=(
            load.busy_s / load.events * US_PER_S if timed else None
        ),
        coordinator_most_us=load.longest_s * US_PER_S if timed else None,
        most_instructions=load.most_instructions,
        ranks=tuple(ranks),
    )


def _lags(every: Sequence[RankHistory]) -> dict[str, Any]:
    """Returns mean and largest delay of adoptions, in batches and in seconds."""
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


def _solo_speed(sim: Simulation, sums: RankHistory) -> float:
    """Returns the samples per second of a rank's device alone, on its own batches."""
    device = sim.devices[sums.rank]
    if not sums.samples:
        samples = sim.cluster.run.sizes[0][0]
        return samples / device.mean_batch_s(samples)
    if device.prefetch:
        solo_s = max(sums.busy_s, sums.load_s)
    else:
        solo_s = sums.busy_s + sums.load_s
    return sums.samples / solo_s


def _recoveries(sim: Simulation) -> tuple[float | None, ...]:
    found: list[float | None] = []
    for recovery in sim.history.recoveries:
        dead = {r for r, sums in sim.history.ranks.items() if sums.has_died}
        waited_for = recovery.ranks - dead
        if waited_for and waited_for <= recovery.recovered_s.keys():
            last_s = max(recovery.recovered_s[rank] for rank in waited_for)
            found.append(last_s - recovery.at_s)
        else:
            found.append(None)
    return tuple(found)


def _phases(sim: Simulation) -> tuple[PhaseReport, ...]:
    """Returns one phase per policy change of ``auto``; none if no epoch began."""
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
