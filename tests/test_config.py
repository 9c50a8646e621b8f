"""Settings of the wrong kind are refused by name; what fits is kept as it is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import elche
from elche.config import RunConfig
from elche.config_parts import FORMER_SETTINGS, DebugConfig, WindowConfig
from elche.errors import ConfigError
from elche.trainer.trainer_config import TrainerConfig, trainer_config
from tests.harness.settings import nested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outer_momentum": "half"}, "outer.momentum < 1, got 'half'"),
        ({"speed_hints": 1.0}, "speed_hints to be a number per rank"),
        ({"speed_hints": {0: 1.0}}, "speed_hints to be a number per rank"),
        ({"speed_hints": (1.0, "fast")}, r"speed_hints\[1\] to be a positive"),
        ({"anchor": 500}, r"anchor of at most max_anchor \(200\), got 500"),
        ({"min_anchor": 9, "max_anchor": 8}, r"min_anchor of at most max_anchor \(8\)"),
        ({"max_samples": 8}, "max_samples to be {rank: samples}"),
        ({"timeout_s": 0}, "timeout_s to be a positive finite number"),
        ({"guard": 1}, "guard to be True or False"),
        ({"seed": -1}, "seed to be an int >= 0"),
    ],
)
def test_wrong_kinds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**nested({"policy": "cadence"} | options))


@pytest.mark.parametrize("name", FORMER_SETTINGS)
def test_former_names_are_answered_with_the_new_place(name: str) -> None:
    expected = re.escape(FORMER_SETTINGS[name])
    removed: dict[str, Any] = {name: 2}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = [
        lambda: RunConfig(**removed),
        lambda: elche.setup(model, optimizer, [], **removed),
    ]
    if name not in TrainerConfig.__dataclass_fields__:
        calls.append(lambda: trainer_config(removed))
    for made in calls:
        with pytest.raises(ConfigError, match=expected):
            made()


@pytest.mark.parametrize(
    ("group", "name"), [("windows", "optimizer_state"), ("debug", "replay")]
)
def test_removed_settings_are_refused_in_their_group(group: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}= was removed"):
        RunConfig(**{"policy": "cadence", group: {name: "average"}})
    kind: Any = {"windows": WindowConfig, "debug": DebugConfig}[group]
    with pytest.raises(ConfigError, match=f"{name}= was removed"):
        kind(**{name: "average"})


def test_a_misspelt_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="'polcy' of RunConfig; did you mean 'policy'"
    ):
        RunConfig(polcy=3)
    with pytest.raises(
        ConfigError, match="'ancor' of WindowConfig; did you mean 'anchor'"
    ):
        RunConfig(policy="async", windows={"ancor": 3})
    with pytest.raises(
        ConfigError, match="'zzz' of RunConfig; known are: codec, debug"
    ):
        RunConfig(zzz=3)


@pytest.mark.parametrize("policy", ["cadence", "async", "auto"])
def test_fixed_shares_are_refused_under_windows(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"'{policy}' leases whole batches, of"):
        RunConfig(policy=policy, shares="fixed")
    with pytest.raises(
        ConfigError, match="unknown shares 'equal'; expected one of: auto"
    ):
        RunConfig(shares="equal")


def test_a_codec_chosen_by_the_link_is_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"'auto' was removed: .* name the codec"):
        RunConfig(codec="auto")


OF_GRADIENTS = {"policy": "cadence", "update": "gradients"}
PLANNED = {"policy": "cadence", "deterministic": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "auto", "deterministic": True}, "cannot be deterministic"),
        ({"policy": "auto", "update": "gradients"}, "leave update out"),
        ({"policy": "async", "update": "gradients"}, "need policy 'cadence'"),
        ({"policy": "sync", "update": "parameters"}, "'sync' .* has no windows"),
        (OF_GRADIENTS | {"codec": "bf16"}, "sums uncompressed gradients"),
        ({"policy": "sync", "outer": "slowmo"}, "leave windows= out, or choose"),
        (OF_GRADIENTS | {"outer": "nesterov"}, "steps along averaged parameters"),
        ({"policy": "async", "outer": "adam"}, "unknown outer.optimizer 'adam'"),
        ({"outer": "slowmo", "outer_momentum": 1.0}, "0 <= outer.momentum < 1"),
        ({"outer": "slowmo", "outer_lr": 0.0}, "outer.lr to be a positive"),
        ({"policy": "cadence", "transport": "nccl"}, "gradients of policy 'sync'"),
        ({"policy": "delayed_sync"}, "was removed: on one machine 'sync' is faster"),
        ({"policy": "auto", "transport": "nccl"}, "gradients of policy 'sync'"),
        ({"codec": "int8", "transport": "nccl"}, "choose .* codec 'fp32'"),
        (PLANNED | {"max_batch_diff": 2}, "leave it out"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**nested(options))
