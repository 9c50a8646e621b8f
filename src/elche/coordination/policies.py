"""The policies by name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elche.config import RunConfig
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_policy import AutoPolicy
from elche.coordination.policy import Member, Policy
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import WindowPolicy


def build_policy(
    config: RunConfig,
    members: Sequence[Member],
    settings: Settings,
) -> Policy:
    """The policy that the configuration names.

    Args:
        config: the run's settings.
        members: all ranks, in order.
        settings: what else the ranks agreed on.
    """
    if config.policy == "sync":
        return SyncPolicy(config, members, settings.min_share_samples)
    if config.policy == "auto":
        return AutoPolicy(config, members, settings)
    return WindowPolicy(config, members, settings.epochs)
