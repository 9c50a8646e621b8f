"""The policies by name. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_chooser import AutoChooser
from elche.coordination.auto.windows_advice import AdvisedSync
from elche.coordination.policy import Member
from elche.coordination.policy_chooser import PolicyChooser
from elche.coordination.sync.sync_policy import SyncPolicy
from elche.coordination.windows.window_policy import WindowPolicy


def policy_chooser(members: Sequence[Member], settings: Settings) -> PolicyChooser:
    """Owner of the policy that the settings name.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """
    config = settings.config
    if config.policy == "auto":
        return AutoChooser(members, settings)
    if config.policy == "sync":
        is_advised = settings.is_default and not config.debug.deterministic
        if is_advised and len(members) > 1:
            return AdvisedSync(members, settings)
        return PolicyChooser(SyncPolicy(members, settings))
    epochs, cut_for = settings.epochs, settings.cut_for
    return PolicyChooser(WindowPolicy(config, members, epochs, cut_for=cut_for))
