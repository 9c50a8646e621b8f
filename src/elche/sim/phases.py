"""Phases of a simulated run, and their goodput. Pure.

A simulation trains nothing, so samples count as the convergence table says
(`elche.cadence.convergence`), by the windows and lags that really came about. What is
measured is time: start-up, measuring, switching and drains are in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from elche.cadence.convergence import sample_efficiency
from elche.coordination.accounts.batch_ranges import BatchCut, BatchSizes
from elche.coordination.accounts.local_batches import local_cut
from elche.sim.history import Phase
from elche.sim.simulation import Simulation

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


def choices_of(sim: Simulation) -> tuple[ChoiceReport, ...]:
    """Choices of ``auto`` in a simulated run."""
    return tuple(
        ChoiceReport(at_s=at_s, policy=told.policy, reason=told.reason)
        for at_s, told in sim.history.choices
    )


def phases_of(sim: Simulation) -> tuple[PhaseReport, ...]:
    """The run's phases; one, unless ``auto`` changed the policy.

    None of a run that was aborted before it trained.
    """
    history = sim.history
    now = Phase(
        "",
        sim.end_s,
        history.samples,
        history.windows,
        {
            rank: (sums.samples, sums.adoptions, sums.lag_batches)
            for rank, sums in history.ranks.items()
        },
    )
    phases = history.phases
    ends = [*phases[1:], now] if phases else []
    return tuple(_between(sim, one, end) for one, end in zip(phases, ends, strict=True))


def effective_samples(phases: tuple[PhaseReport, ...]) -> float:
    """Samples that one device would have needed for what the run has learned."""
    return sum(phase.samples * phase.sample_efficiency for phase in phases)


def run_batches(sim: Simulation) -> float:
    """Batches of one device in the whole run, as it was meant to be."""
    run = sim.cluster.run
    return float(run.epochs * BatchSizes(run.sizes).num_batches)


def _cut(sim: Simulation) -> BatchCut:
    """Cut of the run's batches into the local ones of windows."""
    run = sim.cluster.run
    ranks = sim.cluster.world_size
    return local_cut(run.config.windows, ranks, run.min_share_samples)


def fastest_alone(sim: Simulation) -> float:
    """Samples per second of the fastest device of the start, without changes of speed.

    It trains on whole batches.
    """
    samples = sim.cluster.run.sizes[0][0]
    return max(samples / device.mean_batch_s(samples) for device in sim.cluster.devices)


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
    local = _cut(sim).largest_of(whole)
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
            run_batches=run_batches(sim),
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
