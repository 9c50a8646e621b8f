"""Tokens with caches of keys and values are those of one process with its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from elche.errors import ConfigError
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.step.generation import _behind
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_generation_cases import (
    NEW,
    PROMPTS,
    Generated,
    GenerationWork,
    alone,
    failing,
    generated,
    layers_of,
)

pytestmark = pytest.mark.distributed
ONE_BY_ONE = [[1, 1, 1, 1, 1], [3, 3, *[1] * 8]]
"""Positions of an attention's calls: with a cache, in two microbatches at most."""
WHOLE = [[1, 2, 3, 4, 5], [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]]


def check(pool: RankPool | None, work: GenerationWork) -> list[Generated]:
    expected = alone(work)
    assert len(set(expected[1][:, 3:].flatten().tolist())) > 3
    if pool is None:
        found = [generated(work)]
    else:
        found = pool.run(generated, work, case_setup=serve_in_thread)
    for one in found:
        assert all(map(torch.equal, one.tokens, expected)), (one.tokens, expected)
        assert one.left == 0, "caches end with generate"
    return found


def test_one_position_a_token_on_one_rank() -> None:
    (found,) = check(None, GenerationWork())
    assert found.lengths == ONE_BY_ONE
    assert found.warnings == []


@pytest.mark.parametrize(
    "work",
    [
        GenerationWork(),
        GenerationWork(schedule="zb-v"),
        GenerationWork(partition=(2, 4)),
        GenerationWork("masked", partition=(4, 2)),
    ],
)
def test_one_position_a_token_on_two_ranks(
    ranks2: RankPool, work: GenerationWork
) -> None:
    for one in check(ranks2, work):
        assert one.lengths == ONE_BY_ONE
        assert one.warnings == []


def test_sequences_that_end(ranks2: RankPool) -> None:
    token = int(alone(GenerationWork())[1][0, 4])
    found = check(ranks2, GenerationWork(end_token=token))
    assert len(set((found[0].tokens[1] == token).sum(1).tolist())) > 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("counts", "its layers' caches change the logits"),
        ("forgets", "its layers' caches change the logits"),
        ("none", "no layer takes cache="),
    ],
)
def test_layers_without_caches_run_the_whole_sequence(
    ranks2: RankPool, kind: str, reason: str
) -> None:
    found = check(ranks2, GenerationWork(kind))
    for one in found:
        assert one.lengths == WHOLE
    (told,) = found[0].warnings
    assert reason in told
    assert found[1].warnings == []


def test_caches_that_are_not_wanted(ranks2: RankPool) -> None:
    for one in check(ranks2, GenerationWork(options={"use_cache": False})):
        assert one.lengths == WHOLE
        assert one.warnings == []


@pytest.mark.faults
@pytest.mark.parametrize(
    ("kind", "rank"), [("raises", 0), ("raises", 1), ("batch_of", 0)]
)
def test_what_raises_on_one_rank_is_told_everywhere(
    ranks2: RankPool, kind: str, rank: int
) -> None:
    found = ranks2.run(failing, kind, rank, case_setup=serve_in_thread)
    (own, after), _ = found[rank]
    assert own == "ValueError: a layer's own trouble"
    (told, good), _ = found[1 - rank]
    by = f"RemoteRankError: rank {rank} failed" if kind == "raises" else "ConfigError"
    assert told.startswith(f"{by}: ValueError: a layer")
    ended = "CommunicationError: the pipeline has ended" if kind == "raises" else ""
    assert after.startswith(ended)
    assert good.startswith(ended)
    assert (good == "") == (kind == "batch_of"), "nothing had run"
    assert [left for _, left in found] == [0, 0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": torch.zeros(3)}, r"expected tokens \[sequences, length\] of whole"),
        ({"max_new_tokens": -1}, "max_new_tokens to be an int >= 0, got -1"),
        ({"choose": torch.argmax}, "choose to return one token for each of 1 seq"),
    ],
)
def test_wrong_calls_are_refused(given: dict[str, Any], message: str) -> None:
    pipe = Pipeline(layers_of("all"), F.mse_loss, micro_batches=1)
    with pytest.raises(ConfigError, match=message):
        pipe.generate(**{"tokens": PROMPTS[0], "max_new_tokens": 1, **given})


@pytest.mark.faults
def test_a_rank_that_dies_is_named(ranks2: RankPool) -> None:
    first, second = ranks2.run(
        *(failing, "dies", 1), case_setup=serve_in_thread, expect_failure=True
    )
    assert second.error is not None
    assert "exit code 7" in second.error.text
    assert "rank 1" in first.value[0][0]
    assert first.value[0][1].startswith("CommunicationError: the pipeline has ended")


def test_what_of_a_batch_is_new() -> None:
    tokens = torch.arange(6).view(2, 3)
    batch = {
        "tokens": tokens,
        "attention_mask": tokens + 1,
        "beside": (torch.ones(2), torch.ones(2, 4), 5),
    }
    found = _behind(batch, tokens.shape, 2, set())
    assert found["tokens"].tolist() == [[2], [5]]
    assert found["attention_mask"].shape == (2, 3)
    assert [getattr(one, "shape", one) for one in found["beside"]] == [(2,), (2, 4), 5]
    assert len(PROMPTS[1][0]) + NEW == 8


def test_a_tensor_beside_is_not_cut_where_the_sequence_comes_to_its_length() -> None:
    beside, fixed = torch.ones(2, 4), set[int]()
    for length, cut in ((3, 3), (4, 1), (5, 1)):
        tokens = torch.zeros(2, length)
        batch = {"beside": beside, "tokens": tokens, "first": torch.ones(2, 3)}
        found = _behind(batch, tokens.shape, 0 if length == 3 else length - 1, fixed)
        assert [one.shape[1] for one in found.values()] == [4, cut, 3]


@pytest.mark.parametrize("work", [GenerationWork("rules out")])
def test_tokens_that_are_ruled_out_are_no_difference(work: GenerationWork) -> None:
    (found,) = check(None, work)
    assert found.lengths == ONE_BY_ONE
    assert found.warnings == []
