"""Settings of runs in frameworks whose ranks count steps for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.session.options import run_config


def sync_config(options: Mapping[str, Any], framework: str) -> RunConfig:
    """The run's settings for a framework whose ranks count the same steps.

    Raises:
        ConfigError: the policy trains windows, or an option is unknown or wrong.
    """
    config = run_config(None, {"leave_out": False, **options})
    if config.policy != "sync":
        raise ConfigError(
            f"{framework} counts steps on every rank, and under policy "
            f"{config.policy!r} ranks run different numbers of batches; choose "
            "policy='sync' (also in ELCHE_POLICY), or use elche.setup in your own loop"
        )
    if config.leave_out:
        raise ConfigError(
            f"{framework} counts steps on every rank, also on ranks that would be left "
            "out; leave leave_out=True out"
        )
    return config
