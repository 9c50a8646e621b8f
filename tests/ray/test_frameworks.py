"""Hugging Face's Trainer and Lightning inside ranks on Ray, beside one device alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import elche.ray

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Weights = list[list[float]]


def weights_of(state: dict[str, torch.Tensor]) -> Weights:
    return [value.flatten().tolist() for value in state.values()]


def with_lightning(folder: str) -> Weights:
    from tests.integrations.cases.lightning_fit import Regression, loaders, trainer

    torch.manual_seed(5)
    module = Regression()
    trainer("plain", "elche", folder, max_epochs=2).fit(module, *loaders(True))
    return weights_of(module.state_dict())


def with_transformers(folder: str) -> Weights:
    from tests.integrations.cases.hf_tasks import Job, train

    return weights_of(train(Job("plain", folder)).state)


@pytest.mark.parametrize(
    ("framework", "train"),
    [("lightning", with_lightning), ("transformers", with_transformers)],
)
def test_a_frameworks_loop_trains_as_on_one_device(
    cluster: Any, tmp_path: Any, framework: str, train: Callable[[str], Weights]
) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"needs {framework}: make test-ray-full installs it")
    cpu = elche.ray.RankSpec(resources={"CPU": 0.5})
    args = (os.fspath(tmp_path),)
    one = elche.ray.run(train, [cpu], args=args)
    two = elche.ray.run(train, [cpu, cpu], args=args, speeds=(1.0, 0.5))
    for mine, alone in zip(two, one, strict=True):
        assert mine == pytest.approx(alone, rel=1e-4, abs=1e-6)
