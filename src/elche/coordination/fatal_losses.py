"""Losses of ranks that end a run, and the reason of each. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

from elche.config import DELAYED_SYNC
from elche.config_parts import DebugConfig
from elche.coordination.agreement import Settings


class FatalLoss(Enum):
    """Reasons for which the loss of a rank ends the run.

    Those up to `NCCL_STEPS` hold for every rank as long as the run lasts; their texts
    follow "the death of a rank ends" or "none can join".
    """

    NO_LAUNCHER = "a run without a launcher of elche's"
    DEFAULT_GROUP = (
        "a script that meets in torch.distributed's own process group, whose others "
        "would wait for it"
    )
    DELAYED_STEPS = "policy='delayed_sync'"
    CODEC = "codec={codec!r} under policy 'sync'"
    NCCL = "transport.kind='nccl'"
    DETERMINISTIC = "a deterministic run"
    SURVIVE = "survive=False"
    STREAM = "a stream"
    SYNC_BATCHNORM = "SyncBatchNorm under policy={policy!r}"
    NCCL_STEPS = "policy={policy!r} over NCCL"
    SOLE_HOLDER = (
        "rank {rank} trains alone, and no other has its optimizer's state and model"
    )
    CHANGING_STEPS = "ranks {changing} are being excluded from steps, or come back"
    OWN_SAMPLER = (
        "rank {rank} drew the samples' order from the script's own {own_sampler}, "
        "which no other rank can continue"
    )
    NOT_BEGUN = "no rank may die before the first epoch has begun"
    NO_GROUP = "ranks have left, and no new group can form"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """Losses that a policy does not survive now.

    Attributes:
        sole_holders: ranks with state that no other rank has.
        changing: ranks that are being excluded from steps, or come back. Each of the
            others forms its group as it receives that, and some may not have yet.
        has_breaks: loops have left the epoch early.
    """

    sole_holders: Set[int] = frozenset()
    changing: tuple[int, ...] = ()
    has_breaks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that decide whether the run survives the loss of a rank.

    Attributes:
        has_launcher: a launcher of elche's ends the processes of lost ranks.
        has_default_group: the script has formed torch.distributed's default group.
        settings: agreed on by the ranks; None before they have joined.
        devices: of the ranks that the run began with.
        ranks: of the run, also those that have left it in order.
        has_left: some of them have.
        epoch: begun last, -1 before the first.
        limits: of the policy now.
    """

    has_launcher: bool
    has_default_group: bool = False
    settings: Settings | None = None
    devices: tuple[str, ...] = ()
    ranks: Set[int] = frozenset()
    has_left: bool = False
    epoch: int = -1
    limits: LossLimits = LossLimits()


def fatal_setting(facts: RunFacts) -> str:
    """Names the setting by which the loss of any rank ends the run; "" if none does."""
    if not facts.has_launcher:
        return FatalLoss.NO_LAUNCHER.value
    if facts.has_default_group:
        return FatalLoss.DEFAULT_GROUP.value
    if facts.settings is None:
        return ""
    settings, config = facts.settings, facts.settings.config
    has_steps = config.policy in ("sync", "auto")
    on_cpu = any(device.startswith("CPU") for device in facts.devices)
    is_delayed = settings.is_delayed or config.policy == DELAYED_SYNC
    is_coded = config.codec != "fp32" and config.policy == "sync"
    over_nccl = has_steps and config.transport.kind == "auto" and not on_cpu
    reason = _first(
        (is_delayed, FatalLoss.DELAYED_STEPS),
        (is_coded, FatalLoss.CODEC),
        (config.transport.kind == "nccl", FatalLoss.NCCL),
        (config.debug != DebugConfig(), FatalLoss.DETERMINISTIC),
        (not config.survive, FatalLoss.SURVIVE),
        (settings.is_stream, FatalLoss.STREAM),
        (settings.syncs_batchnorm and has_steps, FatalLoss.SYNC_BATCHNORM),
        (over_nccl, FatalLoss.NCCL_STEPS),
    )
    names = {"codec": config.codec, "policy": config.policy}
    return "" if reason is None else reason.value.format_map(names)


def fatal_loss(rank: int, facts: RunFacts) -> str:
    """Decides whether the loss of a rank ends the run now, and why; "" if not."""
    if setting := fatal_setting(facts):
        return f"the death of a rank ends {setting}"
    limits = facts.limits
    own_sampler = "" if facts.settings is None else facts.settings.own_sampler
    is_first = rank == min(facts.ranks, default=rank)
    cannot_form = limits.has_breaks or facts.has_left or len(facts.ranks) < 2
    reason = _first(
        (rank in limits.sole_holders, FatalLoss.SOLE_HOLDER),
        (bool(limits.changing), FatalLoss.CHANGING_STEPS),
        (bool(own_sampler) and is_first, FatalLoss.OWN_SAMPLER),
        (facts.epoch < 0, FatalLoss.NOT_BEGUN),
        (cannot_form, FatalLoss.NO_GROUP),
    )
    changing = [*limits.changing]
    names = {"rank": rank, "changing": changing, "own_sampler": own_sampler}
    return "" if reason is None else reason.value.format_map(names)


def _first(*cases: tuple[bool, FatalLoss]) -> FatalLoss | None:
    """The reason of the first case that holds."""
    return next((reason for holds, reason in cases if holds), None)
