"""Settings that contradict each other are refused at once, with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from elche.config import RunConfig
from elche.errors import ConfigError
from tests.harness.settings import nested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "auto", "deterministic": True}, "cannot be deterministic"),
        ({"policy": "auto", "update": "gradients"}, "leave update out"),
        ({"policy": "async", "update": "gradients"}, "need policy 'cadence'"),
        ({"policy": "sync", "update": "parameters"}, "'sync' .* has no windows"),
        (
            {"policy": "cadence", "update": "gradients", "codec": "bf16"},
            "windows of update='gradients' sum theirs as they are",
        ),
        ({"policy": "sync", "outer": "slowmo"}, "leave windows= out, or choose"),
        (
            {"policy": "cadence", "update": "gradients", "outer": "nesterov"},
            "'nesterov' steps along averaged parameters",
        ),
        ({"policy": "async", "outer": "adam"}, "unknown outer.optimizer 'adam'"),
        ({"outer": "slowmo", "outer_momentum": 1.0}, "0 <= outer.momentum < 1"),
        ({"outer": "slowmo", "outer_lr": 0.0}, "outer.lr to be a positive"),
        (
            {"policy": "cadence", "transport": "nccl"},
            "gradients of policy 'sync' as they",
        ),
        ({"policy": "delayed_sync", "transport": "nccl"}, "leave kind= out"),
        (
            {"policy": "auto", "transport": "nccl"},
            "gradients of policy 'sync' as they are",
        ),
        (
            {"policy": "sync", "codec": "int8", "transport": "nccl"},
            "choose .* codec 'fp32'",
        ),
        (
            {"policy": "cadence", "deterministic": True, "max_batch_diff": 2},
            "leave it out",
        ),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**nested(options))
