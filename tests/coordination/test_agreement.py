"""Ranks that differ in anything they must agree on are refused, and it is named."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from elche.config import RunConfig
from elche.coordination.agreement import Settings, disagreement, settings_of
from elche.coordination.protocol.events import Join
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from tests.harness.settings import nested

PAIRS = dict(Settings(config=RunConfig()).as_pairs())
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


def names_in(config: Any, prefix: str) -> set[str]:
    """Of all settings, in full."""
    found: set[str] = set()
    for each in fields(config):
        value, name = getattr(config, each.name), f"{prefix}.{each.name}"
        found |= names_in(value, name) if is_dataclass(value) else {name}
    return found


def test_every_setting_is_compared() -> None:
    assert {name for name in PAIRS if name.startswith("config.")} == names_in(
        RunConfig(), "config"
    )
    caps = [join_of(rank, max_samples={1: 8}) for rank in range(2)]
    assert disagreement(caps) == ""


@pytest.mark.parametrize("name", PAIRS)
def test_a_setting_that_differs_is_named(name: str) -> None:
    pairs = PAIRS | dict(join_of(1).settings) | {name: '"another"'}
    said = disagreement([join_of(0), replace(join_of(1), settings=(*pairs.items(),))])
    assert said.startswith("configuration differs between ranks: ")
    assert f"{name}: rank 0 has " in said


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
