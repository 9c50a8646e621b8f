"""Ranks that differ in anything they must agree on are refused, and it is named."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from elche.config import RunConfig
from elche.config_parts import DebugConfig, WindowConfig
from elche.coordination.agreement import Settings, disagreement, settings_of
from elche.coordination.protocol.events import Join
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from tests.harness.settings import nested

OTHER: dict[str, Any] = {
    "policy": "async",
    "update": "gradients",
    "loss_reduction": "sum",
    "windows_max_grad_norm": 2.0,
    "deterministic": True,
    "guard": False,
    "non_finite": "leave_out",
    "seed": 3,
    "local_batch_size": 8,
    "anchor": 2,
    "min_anchor": 2,
    "max_anchor": 3,
    "overhead_target": 0.1,
    "max_batch_diff": 4,
    "speed_hints": (1.0, 0.5),
    "max_samples": {1: 8},
    "outer": "slowmo",
    "outer_lr": 0.9,
    "outer_momentum": 0.7,
    "bucket_cap_mb": 2.0,
    "transport": "gloo",
    "codec": "int4",
    "shares": "fixed",
    "timeout_s": 30.0,
    "leave_out": False,
    "survive": False,
    "min_ranks": 2,
}
NAMES = {
    "outer": "windows.outer.optimizer",
    "outer_lr": "windows.outer.lr",
    "outer_momentum": "windows.outer.momentum",
    "transport": "transport.kind",
    "bucket_cap_mb": "transport.bucket_cap_mb",
    "windows_max_grad_norm": "windows.max_grad_norm",
    **{name.name: f"debug.{name.name}" for name in fields(DebugConfig)},
    **{
        name.name: f"windows.{name.name}"
        for name in fields(WindowConfig)
        if name.name != "outer"
    },
}
"""In full, of those that are in groups."""
TENSORS = (("0.weight", "[2, 3]", "float32"), ("0.bias", "[2]", "float32"))


def join_of(rank: int, **options: Any) -> Join:
    config = RunConfig(**nested({"policy": "cadence", **options}))
    optimizer = {"class": "SGD", "lr": 0.1}
    settings = Settings(config=config, optimizer=optimizer)
    return Join(
        rank=rank,
        version=PROTOCOL_VERSION,
        world_size=2,
        settings=settings.as_pairs(),
        tensors=TENSORS,
        device="CPU",
        horizon_batches=0,
    )


def test_every_setting_is_compared_here() -> None:
    known = {name for name, _ in Settings(config=RunConfig()).as_pairs()}
    named = {NAMES.get(name, name) for name in OTHER}
    assert {f"config.{name}" for name in named} == {
        name for name in known if name.startswith("config.")
    }


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_differs_is_named(name: str) -> None:
    usual = {"policy": "sync"} if name == "shares" else {}
    said = disagreement(
        [join_of(0, **usual), join_of(1, **usual | {name: OTHER[name]})]
    )
    assert said.startswith("configuration differs between ranks: ")
    assert f"config.{NAMES.get(name, name)}: rank 0 has " in said
    assert disagreement([join_of(0), join_of(1)]) == ""


def test_another_torch_is_named() -> None:
    joins = [
        replace(
            join_of(rank),
            settings=Settings(
                config=RunConfig(), software={"elche": "1", "torch": version}
            ).as_pairs(),
        )
        for rank, version in enumerate(("2.9", "2.10"))
    ]
    assert settings_of(joins[1]).software["torch"] == "2.10"
    said = disagreement(joins)
    assert 'software.torch: rank 0 has "2.9", rank 1 has "2.10"' in said
    assert "software.elche" not in said


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            (("0.weight", "[2, 4]", "float32"), TENSORS[1]),
            "0.weight: rank 0 has [2, 3] float32, rank 1 has [2, 4] float32",
        ),
        (
            (TENSORS[0], ("0.bias", "[2]", "bfloat16")),
            "0.bias: rank 0 has [2] float32, rank 1 has [2] bfloat16",
        ),
        (
            (TENSORS[0], ("0.bias", "[2]", "float32 (frozen)")),
            "0.bias: rank 0 has [2] float32, rank 1 has [2] float32 (frozen)",
        ),
        (TENSORS[:1], "0.bias: rank 0 has [2] float32, rank 1 has (absent)"),
        (TENSORS[::-1], "rank 0 and rank 1 hold the same tensors in another order"),
    ],
)
def test_a_tensor_that_differs_is_named(tensors: Any, says: str) -> None:
    said = disagreement([join_of(0), replace(join_of(1), tensors=tensors)])
    assert said.startswith("the model differs between ranks: ")
    assert says in said
