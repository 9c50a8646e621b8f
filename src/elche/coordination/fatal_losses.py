"""Losses of ranks that end a run, with their reasons. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from elche.config_parts import DebugConfig
from elche.coordination.agreement import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """Losses that the policy cannot survive now.

    Attributes:
        sole_holders: ranks with state that no other rank has.
        changing: ranks that are being excluded from steps, or return to them. The
            others regroup at different times, so a loss now is not survived.
        has_breaks: whether loops have left the epoch early.
        stale: ranks excluded for good, which cannot become the first rank.
    """

    sole_holders: Set[int] = frozenset()
    changing: tuple[int, ...] = ()
    has_breaks: bool = False
    stale: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that decide whether the run survives the loss of a rank.

    Attributes:
        has_launcher: whether elche's launcher ends the processes of lost ranks.
        has_default_group: whether the script formed torch.distributed's default group.
        settings: settings that the ranks agreed on; None before they have joined.
        backend: the devices' own backend that sums gradients; "" if the host does.
        ranks: ranks of the run, including those that have left cleanly.
        has_left: whether some of them have left.
        epoch: number of the latest epoch, -1 before the first.
        limits: the policy's current limits.
    """

    has_launcher: bool
    has_default_group: bool = False
    settings: Settings | None = None
    backend: str = ""
    ranks: Set[int] = frozenset()
    has_left: bool = False
    epoch: int = -1
    limits: LossLimits = LossLimits()


def fatal_setting(facts: RunFacts) -> str:
    """Names the setting that makes the loss of any rank fatal; "" if none does.

    The text completes "the death of a rank ends" and "none can join".
    """
    if not facts.has_launcher:
        return "a run without a launcher of elche's"
    if facts.has_default_group:
        return (
            "a script with torch.distributed's own process group, whose other ranks "
            "would wait for the dead one"
        )
    if facts.settings is None:
        return ""
    settings, config = facts.settings, facts.settings.config
    policy, kind = config.policy, config.transport.kind
    has_steps = policy in ("sync", "auto")
    is_coded = config.codec != "fp32" and policy == "sync"
    return _first(
        (is_coded, f"codec={config.codec!r} under policy 'sync'"),
        (kind == "nccl", "transport.kind='nccl'"),
        (config.debug != DebugConfig(), "a deterministic run"),
        (not config.survive, "survive=False"),
        (settings.is_stream, "a stream"),
        (settings.syncs_batchnorm and has_steps, f"SyncBatchNorm under {policy=}"),
        (has_steps and bool(facts.backend), f"{policy=} over {facts.backend}"),
    )


def fatal_loss(rank: int, facts: RunFacts) -> str:
    """Returns the reason why the loss of a rank ends the run now; "" if it does not."""
    if setting := fatal_setting(facts):
        return f"the death of a rank ends {setting}"
    limits, changing = facts.limits, [*facts.limits.changing]
    sampler = "" if facts.settings is None else facts.settings.own_sampler
    is_first = rank == min(facts.ranks, default=rank)
    follows = min({*facts.ranks} - {rank}, default=rank)
    cannot_form = limits.has_breaks or facts.has_left or len(facts.ranks) < 2
    return _first(
        (
            rank in limits.sole_holders,
            f"rank {rank} trains alone, and no other rank has its model and optimizer "
            "state",
        ),
        (
            is_first and follows in limits.stale,
            f"rank {follows}, the next one to lead, is excluded for good and lacks "
            "state of its loop",
        ),
        (
            bool(changing),
            f"ranks {changing} are being excluded from steps, or readmitted",
        ),
        (
            bool(sampler) and is_first,
            f"rank {rank} drew the samples' order from the script's own {sampler}, "
            "which no other rank can continue",
        ),
        (facts.epoch < 0, "no rank may die before the first epoch has begun"),
        (cannot_form, "ranks have left, and no new group can form"),
    )


def _first(*cases: tuple[bool, str]) -> str:
    """Returns the reason of the first case that holds, or ""."""
    return next((reason for holds, reason in cases if holds), "")
