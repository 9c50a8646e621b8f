"""Hooks of an epoch that runs without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from elche.coordination.accounts.step_count import StepCount
from elche.coordination.sync.lost_ranks import LostRanks
from elche.coordination.sync.nonfinite import NonFiniteRecord
from elche.runtime.report.scalars import ScalarLog
from elche.runtime.sync.epoch_hooks import EpochHooks
from elche.runtime.watch.followed_schedulers import FollowedSchedulers
from elche.runtime.watch.live_graph import LiveGraph
from elche.runtime.watch.model_copies import ModelCopies
from elche.runtime.watch.model_sums import ModelSums


def hooks_without_run() -> EpochHooks:
    """They log nothing, check nothing, and no rank dies."""
    observer = SimpleNamespace(
        scalars=ScalarLog(),
        graphs=LiveGraph(nn.Identity()),
        schedulers=FollowedSchedulers("sync", float, StepCount()),
        copies=ModelCopies(nn.Identity(), ()),
    )
    return EpochHooks(
        on_error=lambda error: None,
        check=lambda: None,
        parameter_norm=lambda: 0.0,
        left_with=lambda: ((), 0),
        observer=cast(Any, observer),
        numbers=NonFiniteRecord(),
        sums=ModelSums(()),
        regrouping=cast(Any, None),
        steps=cast(Any, SimpleNamespace(lost=LostRanks(), unknown=str)),
    )
