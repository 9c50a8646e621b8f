"""Models of transformers that are built on the meta device and loaded from files."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import transformers

from elche.errors import ConfigError
from elche.pipeline.pipeline import Pipeline
from elche.pipeline.setup import pretrained
from tests.harness.logged import logged
from tests.harness.rank_pool import RankPool
from tests.integrations.cases.hf_loading import (
    IDS,
    alone,
    initialised,
    labelled,
    loaded,
)
from tests.integrations.cases.hf_pipeline import Tokens, model_of
from tests.pipeline.cases.pipeline_cases import furthest


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "schedule"), [("llama", "zb-v"), ("gpt2", "zb-h1")])
def test_each_rank_reads_its_own_layers(
    ranks2: RankPool, tmp_path: Path, family: str, schedule: str
) -> None:
    """Labels train; evaluation and generation run without them."""
    expected = alone(family, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2, "in several files"
    found = ranks2.serve(loaded, family, tmp_path, schedule)
    for one in found:
        # transformers computes the loss of labels in float32.
        assert one.loss == pytest.approx(expected.loss, rel=1e-6)
        mine = {name: expected.gradients[name] for name in one.gradients}
        assert furthest(one.gradients, mine) <= 1e-12
        assert furthest({"": one.logits}, {"": expected.logits}) <= 1e-12
        assert torch.equal(one.tokens, expected.tokens)
        assert one.read <= one.own, "nothing of other ranks"
    names = set(model_of(Tokens(family)).state_dict())
    assert found[0].own | found[1].own == names
    assert not names <= found[0].own
    assert not names <= found[1].own


@pytest.mark.distributed
def test_replicas_read_their_layers(ranks4: RankPool, tmp_path: Path) -> None:
    expected = alone("llama", tmp_path)
    found = ranks4.serve(loaded, "llama", tmp_path, "1f1b", 2)
    for one in found:
        assert one.loss == pytest.approx(expected.loss, rel=1e-6)
        mine = {name: expected.gradients[name] for name in one.gradients}
        assert furthest(one.gradients, mine) <= 1e-12
        assert one.read <= one.own, "nothing of other ranks"
    assert sum(len(one.own) for one in found) < 3 * len(expected.gradients)


def test_a_rank_computes_what_no_file_has() -> None:
    """By transformers' own initialisation, also where nothing is loaded afterwards."""
    found, deviations = initialised("llama")
    wanted = dict(model_of(Tokens("llama")).named_buffers())
    assert len(found) == len(wanted) == 2
    for name, one in found.items():
        value = next(v for n, v in wanted.items() if name.endswith(n))
        assert torch.equal(one, value.double())
    assert all(math.isfinite(one) for one in deviations.values())
    assert 0.2 < deviations["model.layers.3.mlp.up_proj.weight"] < 0.4


def test_a_newer_transformers_is_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    assert numbers <= pretrained.NEWEST_TRIED, "raise it where these tests pass"
    monkeypatch.setattr(pretrained, "NEWEST_TRIED", (5, 0))
    pretrained.log_untried.cache_clear()
    model = model_of(Tokens("llama"))
    with logged("elche.pipeline.setup.pretrained") as lines:
        pretrained.owners(model)
        pretrained.owners(model)
    pretrained.log_untried.cache_clear()
    assert len(lines) == 1
    assert f"transformers {transformers.__version__} was never tried" in lines[0]


def test_a_step_without_the_samples_labels_is_refused() -> None:
    sample = {"input_ids": IDS[:2], "labels": IDS[:2], "use_cache": False}
    with Pipeline(
        model_of(Tokens("llama")), labelled, micro_batches=1, sample=sample
    ) as pipe:
        with pytest.raises(ConfigError, match="lacks the model's argument labels"):
            pipe.step({"input_ids": IDS, "labels": None}, IDS)
        assert pipe.step({**sample}, IDS[:2]).loss > 0
