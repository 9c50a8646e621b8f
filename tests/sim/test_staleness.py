"""``async`` in whole runs: how old what a rank trains on may be."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings

from elche.coordination.protocol.events import Event, ModelUpdated, WindowClosed
from elche.sim.cluster import Cluster
from tests.sim.checks import CHECKED, check_all
from tests.sim.strategies import clusters
from tests.sim.watched import WatchedSimulation


@pytest.mark.reaches("reductions", "late adoptions")
@given(clusters("async"))
@settings(max_examples=25)
def test_a_window_ends_only_when_the_last_result_is_in_the_ranks_model(
    cluster: Cluster,
) -> None:
    """So one reduction is in flight, and no drift is measured from an older base."""
    sim = WatchedSimulation(cluster, CHECKED)
    reduced: dict[tuple[int, int], int] = {}
    closed = 0
    send = sim.send

    def note(event: Event) -> None:
        nonlocal closed
        if isinstance(event, WindowClosed | ModelUpdated):
            at = event.rank, event.epoch  # before an epoch all is reduced
            last = reduced.setdefault(at, event.window - 1)
            assert event.window == last + 1, event
            if isinstance(event, ModelUpdated):
                reduced[at] = event.window
            closed += isinstance(event, WindowClosed)
        send(event)

    with patch.object(sim, "send", note):
        sim.run()
    sim.note()
    check_all(sim)
    assert closed
