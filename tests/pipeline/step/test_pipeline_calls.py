"""Wrong calls of a running pipeline: told on every rank, and the next one is right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from elche.comm.control.control_channel import ControlChannel
from elche.coordination.protocol.events import Failed
from elche.errors import DeadlineError, RemoteRankError
from elche.pipeline.peers.waits import BEYOND_S, Waits
from elche.runtime.process.environment import read_placement
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_call_cases import (
    arrays,
    keywords_where_taken,
    leaves,
    loaded,
    outputs_by_choice,
    wrong_calls,
)

pytestmark = [pytest.mark.distributed, pytest.mark.faults]

MESSAGES = {
    "unknown keyword": "no layer of ranks 0, 1 takes the keyword 'scale' that step",
    "unknown keyword of evaluate": "takes the keyword 'scael' that evaluate was given",
    "keyword of one rank": "no layer of rank 1 takes the keyword 'a'",
    "no gradients": r"step runs under torch.no_grad\(\) .* on rank \d",
    "no gradients on one rank": r"step runs under torch.no_grad\(\) .* on rank 0",
    "a named tuple": "the batch on rank 0 holds a OrderedDict; expected plain tuples",
    "a sparse batch": "the batch on rank 0 holds a tensor of layout torch.sparse_coo",
    "a sparse target": "the target on rank 1 holds a tensor of layout torch.sparse_coo",
    "a scale of zero": "expected a finite loss_scale above 0, got 0.0",
    "a scale that is none": "expected a finite loss_scale above 0, got nan",
    "a scale of text": "expected a number as loss_scale, got '2'",
    "two scales": r"one loss_scale on all ranks, got \[2.0, 3.0\] by rank",
    "unscaled by zero": "expected a finite loss_scale above 0, got 0.0",
    "unscaled by two": r"one loss_scale on all ranks, got \[2.0, 3.0\] by rank",
    "a negative norm": "expected a max_norm of at least 0, got -1.0",
    "a norm that is none": "expected a max_norm of at least 0, got nan",
    "a norm of text": "expected a number as max_norm, got '1'",
    "a negative norm on one rank": "expected a max_norm of at least 0, got -1.0",
    "torch's clipping": r"torch's clip_grad_norm_ .*; call pipe.clip_grad_norm_",
    "two norms": r"expected one max_norm on all ranks, got \[1.0, 2.0\] by rank",
    "two kinds of call": "different methods: rank 0: step, rank 1: clip_grad_norm_",
    "state and step": "different methods: rank 0: step, rank 1: state_dict",
    "state for others": r"ranks call state_dict for different ranks: \[0, None\]",
    "a copy": "a Pipeline cannot be copied or pickled",
    "outputs elsewhere": r"one choice of outputs on all ranks, got \['all', 'last'\]",
    "outputs of no rank": "expected outputs= of 'last', 'all' or a rank below 2, got 2",
}


def test_wrong_calls_are_told_everywhere_and_change_nothing(ranks2: RankPool) -> None:
    for found, is_right in ranks2.run(wrong_calls, case_setup=serve_in_thread):
        assert found.keys() == MESSAGES.keys()
        for name, text in found.items():
            assert re.search(MESSAGES[name], text), f"{name}: {text}"
        assert is_right


def test_arrays_are_taken_as_tensors(ranks2: RankPool) -> None:
    for losses, wrong in ranks2.run(arrays, case_setup=serve_in_thread):
        assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3
        assert "the target on rank 1 holds a ndarray that is no tensor" in wrong[0]
        assert "the batch on rank 0 holds a ndarray that is no tensor" in wrong[1]


def test_keywords_go_wherever_layers_take_them(ranks2: RankPool) -> None:
    for found in ranks2.run(keywords_where_taken, case_setup=serve_in_thread):
        assert found[0] == found[3] == ""
        assert "'scale' on rank 0, but not on rank 1, whose layers take it" in found[1]
        assert "no layer of ranks 0, 1 takes the keyword 'other'" in found[2]


def test_states_of_other_models_are_refused(ranks2: RankPool) -> None:
    first, second = ranks2.run(loaded, case_setup=serve_in_thread)
    for found in (first, second):
        assert "the state has 9.weight, which the model lacks" in found[0]
        assert found[3:] == ["", ""]
    assert "the state has 0.wieght" in first[1]
    assert second[1] == "", "it may be rank 0's"
    assert first[2] == "", "it is rank 1's"
    assert "the state has another shape of 2.bias [1] (not [3])" in second[2]


@pytest.mark.parametrize("replicas", [1, 2])
def test_outputs_come_to_the_ranks_that_ask_for_them(
    ranks2: RankPool, replicas: int
) -> None:
    for found in ranks2.run(outputs_by_choice, replicas, case_setup=serve_in_thread):
        assert len(found) == 3 * len(("last", "all", 0, 1))
        assert [name for name, is_right in found.items() if not is_right] == []


@pytest.mark.parametrize(
    ("kind", "own", "other"),
    [
        ("closes", "", "CommunicationError: rank 0 lost rank 1"),
        (
            "is interrupted",
            "KeyboardInterrupt: Ctrl-C",
            "RemoteRankError: rank 1 failed: KeyboardInterrupt: Ctrl-C",
        ),
    ],
)
def test_a_rank_that_leaves_leaves_nobody_waiting(
    ranks2: RankPool, kind: str, own: str, other: str
) -> None:
    first, second = ranks2.run(leaves, kind, case_setup=serve_in_thread)
    assert first.startswith(other)
    assert second == own


@contextmanager
def two_channels() -> Iterator[list[ControlChannel]]:
    """Of the ranks of a run, in one process."""
    with serve_in_thread(2) as environments, ExitStack() as ends:
        place = read_placement(environments[0])
        assert place.coordinator is not None
        yield [
            ends.enter_context(
                closing(ControlChannel.connect(place.coordinator, place.key, r, 20.0))
            )
            for r in (0, 1)
        ]


def test_a_wait_for_an_address_ends_with_the_run() -> None:
    with two_channels() as ends:
        ends[1].store_set("there", b"1")
        store = Waits(ends[0], 0, "pipeline/1")
        assert store.store_get("there", 20.0 + BEYOND_S) == b"1"
        with pytest.raises(DeadlineError, match=r"rank 0 waited 0 s for the other"):
            store.store_get("never", BEYOND_S)
        ends[1].send(Failed(rank=1, error="no data", traceback=""))
        with pytest.raises(RemoteRankError, match="rank 1 failed: no data"):
            store.store_get("never", 20.0 + BEYOND_S)


def test_the_present_wait_of_a_rank_is_read_and_not_the_last_one() -> None:
    with two_channels() as ends:
        waits = [Waits(end, rank, "pipeline/1") for rank, end in enumerate(ends)]
        for wait in ("0 the gradient", "", "0 the begin of step"):
            waits[1]._publish(wait)
            until_s = time.monotonic() + 20.0
            while waits[0]._waits_of(1) != wait:
                assert time.monotonic() < until_s
