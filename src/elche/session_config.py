"""Settings of a run, from arguments and the environment."""

from __future__ import annotations

import os
from typing import Any

from elche.config import RunConfig
from elche.errors import ConfigError


def run_config(config: RunConfig | None, options: dict[str, Any]) -> RunConfig:
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
    return RunConfig.from_options(options)


def names_no_policy(config: RunConfig | None, options: dict[str, Any]) -> bool:
    """Whether the policy of :func:`run_config` is the default's, named nowhere."""
    return config is None and not ("policy" in options or "ELCHE_POLICY" in os.environ)
