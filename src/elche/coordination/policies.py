"""The policies by name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_policy import AutoPolicy
from elche.coordination.auto.windows_advice import AdvisedSync
from elche.coordination.policy import Member, Policy
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import WindowPolicy


def build_policy(members: Sequence[Member], settings: Settings) -> Policy:
    """The policy that the settings name.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """
    config = settings.config
    if config.policy == "sync":
        is_advised = settings.is_default and not config.debug.deterministic
        kind = AdvisedSync if is_advised and len(members) > 1 else SyncPolicy
        return kind(members, settings)
    if config.policy == "auto":
        return AutoPolicy(members, settings)
    epochs, cut_for = settings.epochs, settings.cut_for
    return WindowPolicy(config, members, epochs, cut_for=cut_for)
