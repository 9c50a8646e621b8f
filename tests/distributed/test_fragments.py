"""Streaming: fragments of a model synchronised in turn, in real processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from elche.runtime.coordinator import serve_in_thread
from tests.distributed.cases import Task, difference, identical, shared
from tests.distributed.fragment_cases import Turns, reference, sent_per_window, train
from tests.distributed.overlap_cases import meeting
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("fragments", [1, 3])
def test_fragments_are_averaged_as_in_one_process(
    ranks2: RankPool, is_overlapped: bool, fragments: int
) -> None:
    turns = Turns(is_overlapped, fragments)
    found = ranks2.run(train, turns, case_setup=meeting)
    assert identical([each.state for each in found])
    for seen, known in zip(found, reference(turns), strict=True):
        for name, value in known.items():
            torch.testing.assert_close(seen.state[name], value, rtol=1e-12, atol=1e-12)
    total = 6 * 5 + 5 + 5 * 7 + 7 + 7 * 4 + 4
    assert len(found[0].sizes) == fragments
    assert sum(found[0].sizes) == total + fragments  # and a weight with each
    assert max(found[0].sizes) <= 1.2 * total / fragments


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_ranks_end_epochs_identical(ranks3: RankPool, policy: str) -> None:
    """Checksums of the ranks are compared when the next epoch opens, too."""
    options = {"policy": policy, "fragments": 3, "drift_weights": "samples"}
    options["max_anchor"] = 0  # a batch of each rank, however busy the machine is
    task = Task(samples=400, batch_size=8, epochs=3, model="norm", options=options)
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])
    assert min(traces[0].windows) >= 50 / 3
    for epoch in range(3):
        seen = sorted(index for trace in traces for index in trace.orders[epoch])
        assert seen == list(range(400))


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_break_synchronises_all_fragments(ranks3: RankPool, policy: str) -> None:
    options = {"policy": policy, "fragments": 4, "max_anchor": 1}
    task = Task(samples=400, batch_size=4, loop="break", epochs=3, options=options)
    traces = ranks3.run(shared, task, case_setup=serve_in_thread)
    assert identical([trace.state for trace in traces])


@pytest.mark.parametrize(
    "policy", [pytest.param("cadence", marks=pytest.mark.slow), "async"]
)
def test_fragmented_runs_repeat_to_the_bit(
    ranks2: RankPool, policy: str, tmp_path: Path
) -> None:
    """By a fixed plan, and from a record, whose ends are the same."""
    options = {"policy": policy, "fragments": 2, "seed": 5}
    task = Task(samples=600, batch_size=8, optimizer="adamw", options=options)
    planned = _with(task, deterministic=True, speed_hints=(1.0, 0.5))
    runs = [ranks2.run(shared, planned, case_setup=serve_in_thread) for _ in range(2)]
    assert identical([trace.state for run in runs for trace in run])
    record = str(tmp_path / "plan.json")
    first = ranks2.run(
        shared, _with(task, record=record), case_setup=serve_in_thread, env=FOUR_TO_ONE
    )
    again = ranks2.run(shared, _with(task, replay=record), case_setup=serve_in_thread)
    assert identical([trace.state for trace in (*first, *again)])
    assert [trace.orders for trace in again] == [trace.orders for trace in first]
    whole = ranks2.run(shared, _with(planned, fragments=1), case_setup=serve_in_thread)
    assert difference(whole[0].state, runs[0][0].state) > 1e-4


def test_the_most_that_is_sent_at_once_falls_with_the_fragments(
    ranks2: RankPool,
) -> None:
    """A fragment per parameter, of which two hold nearly all."""
    options = {"policy": "async", "codec": "bf16", "transport": "gloo", "max_anchor": 0}
    task = Task(samples=160, batch_size=8, epochs=1, model="mlp", options=options)
    whole, parts = (
        ranks2.run(
            sent_per_window, _with(task, fragments=count), case_setup=serve_in_thread
        )
        for count in (1, 2)
    )
    assert len(set(whole[0][0])) == 1
    peak, last = max(parts[0][0][:-1]), parts[0][0][-1]
    assert len(parts[0][0]) >= 10  # both turns, and the end
    assert peak < 0.75 * whole[0][0][0]
    assert last >= whole[0][0][0]  # all fragments, when the epoch ends
    assert identical([state for _, state in parts])


def _with(task: Task, **options: Any) -> Task:
    return dataclasses.replace(task, options={**task.options, **options})
