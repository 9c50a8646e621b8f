"""The anchor follows a link that becomes ten times slower, and one that recovers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elche.coordination.protocol.events import Event
from elche.coordination.protocol.instructions import Instruction, OpenWindow
from elche.sim.cluster import Cluster, Device, Link, LinkChange, SimulatedRun
from elche.sim.simulation import Simulation

BATCH = 32
FAST_BATCH_S = 0.04
SLOW_S, BACK_S = 60.0, 200.0
GROWS_WITHIN = 6
"""Windows after which the anchor is what the slow link asks for."""


def anchors(
    sync_batches: float, jitter: float, seed: int, batches: int
) -> list[tuple[float, int]]:
    """When each window was opened, and batches that the slowest rank was to run."""
    ranks, model_bytes = 2, 8e6
    rate = model_bytes / (sync_batches * FAST_BATCH_S)
    cluster = Cluster(
        run=SimulatedRun(
            policy="cadence",
            samples=batches * BATCH,
            batch_size=BATCH,
            model_bytes=model_bytes,
            seed=seed,
            options={"windows": {"local_batch_size": BATCH}},
        ),
        devices=(
            Device(seconds_per_sample=FAST_BATCH_S / BATCH, jitter=jitter, count=ranks),
        ),
        link=Link(latency_s=1e-5, bytes_per_s=rate, efficiency=1.0),
    )
    slower = LinkChange(at_s=SLOW_S, bytes_per_s=rate / 10)
    back = LinkChange(at_s=BACK_S, bytes_per_s=rate)
    sim = Simulation(replace(cluster, link_changes=(slower, back)))
    handle = sim.core.handle
    opened: list[tuple[float, int]] = []

    def listen(event: Event, now_s: float) -> list[Instruction]:
        told = handle(event, now_s)
        opened.extend(
            (now_s, one.planned_batches)
            for one in told
            if isinstance(one, OpenWindow) and one.rank == 0
        )
        return told

    sim.core.handle = listen  # type: ignore[method-assign]
    sim.run()
    return opened


@pytest.mark.parametrize(
    ("sync_batches", "jitter", "seed", "batches"),
    [
        (0.1, 0.0, 0, 12_000),
        (0.1, 0.1, 0, 12_000),
        (0.1, 0.1, 1, 12_000),
        (0.3, 0.1, 0, 20_000),
    ],
)
def test_the_anchor_grows_with_the_link_and_comes_back(
    sync_batches: float, jitter: float, seed: int, batches: int
) -> None:
    """Up in proportion, within six windows; down by one batch in each window.

    It stays where a synchronisation costs between half of the target and all of it, so
    it comes back to twice what it was at most.
    """
    opened = anchors(sync_batches, jitter, seed, batches)
    slow = [anchor for at_s, anchor in opened if SLOW_S <= at_s < BACK_S]
    after = [anchor for at_s, anchor in opened if at_s >= BACK_S]
    before = slow[0]
    wanted = sync_batches * 10 / 0.03
    assert before < 0.5 * wanted
    assert all(anchor >= 0.9 * wanted for anchor in slow[GROWS_WITHIN:])
    assert after[0] < 1.3 * wanted
    falls_within = after[0] - 2 * before + GROWS_WITHIN
    assert len(after) > falls_within
    assert all(anchor <= 2 * before for anchor in after[falls_within:])
