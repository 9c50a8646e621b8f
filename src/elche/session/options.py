"""Settings of a run, from arguments and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from elche.config import Codec, LossReduction, PolicyName, RunConfig, Shares
from elche.config_parts import DebugConfig, TransportConfig, WindowConfig
from elche.errors import ConfigError


class RunOptions(TypedDict, total=False):
    """Settings of `elche.RunConfig` as keywords, except the policy."""

    seed: int | None
    loss_reduction: LossReduction
    max_samples: Mapping[int, int] | Sequence[int | None]
    speed_hints: Sequence[float] | None
    shares: Shares
    codec: Codec
    timeout_s: float
    leave_out: bool
    survive: bool
    min_ranks: int
    windows: WindowConfig | Mapping[str, Any]
    transport: TransportConfig | Mapping[str, Any]
    debug: DebugConfig | Mapping[str, Any]


class SetupOptions(RunOptions, total=False):
    """Keywords of `elche.setup` that are settings."""

    policy: PolicyName


def run_config(config: RunConfig | None, options: Mapping[str, Any]) -> RunConfig:
    """The settings, from one value or from options; arguments beat the environment.

    Raises:
        ConfigError: an option or a form is unknown or wrong, or both were given.
    """
    if config is not None:
        if options:
            raise ConfigError(
                f"expected config= or options, got both ({', '.join(sorted(options))})"
            )
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"expected config to be an elche.RunConfig, got {config!r}"
            )
        return config
    if "policy" not in options and "ELCHE_POLICY" in os.environ:
        options = {**options, "policy": os.environ["ELCHE_POLICY"]}
    if "min_ranks" not in options and "ELCHE_MIN_RANKS" in os.environ:
        least = os.environ["ELCHE_MIN_RANKS"]
        options = {**options, "min_ranks": int(least) if least.isdigit() else least}
    if "speed_hints" not in options and "ELCHE_SPEED_HINTS" in os.environ:
        hints = os.environ["ELCHE_SPEED_HINTS"].split(",")
        options = {**options, "speed_hints": tuple(map(float, hints))}
    return RunConfig(**options)


def names_no_policy(config: RunConfig | None, options: Mapping[str, Any]) -> bool:
    """True where neither arguments nor the environment name a policy."""
    return config is None and not ("policy" in options or "ELCHE_POLICY" in os.environ)
