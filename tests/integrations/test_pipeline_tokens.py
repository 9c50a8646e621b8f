"""Models of transformers generate from a pipeline, with a cache on each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elche.pipeline.cutting.segments import cut_model
from tests.harness.rank_pool import RankPool
from tests.integrations.cases.hf_pipeline import (
    NEW_TOKENS,
    Tokens,
    gpt2,
    tokens_alone,
    tokens_piped,
)

pytestmark = pytest.mark.distributed


def check_tokens(pool: RankPool, work: Tokens) -> None:
    """Those of transformers with its cache, one new position a token."""
    expected = tokens_alone(work)
    found = pool.serve(tokens_piped, work)
    assert len(set(expected[-1][:, 4:].flatten().tolist())) > 3
    for one in found:
        assert all(map(torch.equal, one.tokens, expected)), (one.tokens, expected)
        assert one.lengths == [4, 4, *[1] * (2 * NEW_TOKENS - 2)]
        assert one.left == 0, "caches end with generate"
        assert one.warnings == []


@pytest.mark.parametrize(
    "work", [Tokens(), Tokens("llama", "zb-v", padded=True), Tokens("qwen3")]
)
def test_tokens_with_a_cache_on_each_stage(ranks2: RankPool, work: Tokens) -> None:
    check_tokens(ranks2, work)


def test_tokens_of_a_model_that_was_cut_by_name(ranks2: RankPool) -> None:
    points = ("transformer.h.2", "transformer.h.4", "transformer.ln_f")
    check_tokens(ranks2, Tokens(schedule="zb-v", points=points))


def test_a_model_of_which_a_part_is_elsewhere_is_cut_with_a_cache() -> None:
    """As on a rank that was given a model without values, and built its own layers."""
    sample = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "use_cache": False}
    model = gpt2()
    model.transformer.h[1].to("meta")
    layers = cut_model(model, None, sample, (), has_cache=True)
    assert len(layers) == len(cut_model(gpt2(), None, sample))
    caches: list[dict[str, Any]] = [{}, {}]
    for tokens, wanted in (([[3, 1, 4]], 3), ([[1]], 4)):
        found = layers[0](torch.tensor(tokens), cache=caches[0])
        layers[1](*found, cache=caches[1])
        kept = caches[1]["past_key_values"]
        assert kept.get_seq_length() == caches[0]["length"] == wanted
