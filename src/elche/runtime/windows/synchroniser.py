"""Synchronisation of this rank's model with the other ranks."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from elche.comm.averaging.averaging import Optimizers, ParameterAverager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.averaging.window_sync import WindowSync
from elche.comm.gradients.buckets.bucket_queue import Reduced
from elche.comm.gradients.gradient_factor import GradientFactor
from elche.comm.gradients.gradient_hooks import ParameterWatch
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.model_buffers.buffers import BufferAverager
from elche.comm.model_buffers.window_buffers import WindowBuffers
from elche.comm.norm.norm_scope import NormScope
from elche.comm.norm.sync_batch_norm import bind_sync_batchnorm, sync_batchnorm_layers
from elche.comm.transport.process_group import Group
from elche.config import PolicyName, RunConfig
from elche.errors import ConfigError, NonFiniteError
from elche.runtime.rank_settings import refuse_sync_norms
from elche.runtime.windows.gradient_sync import GradientSync

logger = logging.getLogger(__name__)


class Synchroniser:
    """Reducers of the trained parameters, for the policy in force.

    Args:
        config: the agreed settings.
        model: the model.
        group: the process group.
        side_group: forms another group, for SyncBatchNorm inside the backward pass.
        optimizers: returns the optimizers that step the model, the main one first.
        is_weighed: the user's function weighs each rank's part of a step.
        keeps_sums: ranks may die, and the others continue.

    Attributes:
        policy: policy in force; under ``auto`` at first ``"sync"``.
        reducer: reducer of gradients, under ``sync``.
        windows: reducer of windows, under the other policies.
        reduced: record of gradients that are sums of ranks, under ``sync``.
        group: group of the next build.
        own_ids: ids of the model's parameters at the last build.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        group: Group,
        side_group: Callable[[], Group],
        *,
        optimizers: Optimizers,
        is_weighed: bool = False,
        keeps_sums: bool = False,
    ) -> None:
        self._optimizers = optimizers
        self._keeps_sums, self._is_weighed = keeps_sums, is_weighed
        self._config = config
        self._model = model
        self.group = group
        self._side_group = side_group
        self._norm_group: Group | None = None
        self._signature: list[tuple[int, bool, torch.dtype | None]] = []
        self._watch = ParameterWatch(model)
        self.policy: str = "sync" if config.policy == "auto" else config.policy
        self.reducer: GradientReducer | None = None
        self.windows: WindowSync | None = None
        self.reduced = Reduced()
        self.own_ids = {*map(id, self.parameters)}
        self._is_nan_from_start = math.isnan(self._norm())

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the model at the last build."""
        return self._watch.parameters

    @property
    def num_parameters(self) -> int:
        """Number of trained elements."""
        return sum(parameter.numel() for parameter in self._trainable)

    @property
    def trained_bytes(self) -> int:
        """Size of the trained parameters in bytes."""
        return sum(p.numel() * p.element_size() for p in self._trainable)

    @property
    def extra_bytes(self) -> int:
        """Host memory held beside the model."""
        held = self.windows or self.reducer
        return held.extra_bytes if held is not None else 0

    @property
    def is_changed(self) -> bool:
        """True if parameters were frozen, unfrozen or added since the last build."""
        return self._signature != self._current_signature()

    def build(self, policy: str | None = None) -> None:
        """Builds a policy's reducers, with all ranks; None keeps the policy."""
        refuse_sync_norms(self._model, self._config.policy)
        self.detach()
        if self.windows is not None:
            self.windows.retire()
        self.policy = policy or self.policy
        self.reducer = self.windows = None
        self._signature = self._current_signature()
        self._watch = ParameterWatch(self._model)
        self.own_ids = {*map(id, self.parameters)}
        if self.policy == "sync":
            if self._norm_group is None and sync_batchnorm_layers(self._model):
                self._norm_group = self._side_group()
            norms = bind_sync_batchnorm(self._model, self._norm_group)
            self._build_reducer(self.group, norms)
        else:
            self.windows = self._window_sync()

    def _window_sync(self) -> WindowSync:
        """Builds the configured averaging, with all ranks of the group."""
        policy = cast("PolicyName", self.policy)
        config, group = replace(self._config, policy=policy), self.group
        parameters, is_sum = self._trainable, config.loss_reduction == "sum"
        if config.sums_gradients:
            window = GradientWindow(parameters, group)
            buffers = WindowBuffers(self._model, group)
            buffers.agree()
            return GradientSync(
                parameters,
                self._optimizers()[0],
                window,
                buffers,
                max_grad_norm=config.windows.max_grad_norm,
                is_sum=is_sum,
            )
        warn_of_codec(group, config.codec)
        form = OverlappedAverager if config.policy == "async" else ParameterAverager
        outer = config.windows.outer
        own_factor = None
        if self._is_weighed or is_sum:
            own_factor = GradientFactor(parameters)
        averager = form(
            parameters,
            self._model,
            self._optimizers,
            group,
            codec=config.codec,
            momentum=None if outer.optimizer == "average" else outer.momentum,
            own_factor=own_factor,
            is_sum=is_sum,
        )
        averager.build()
        if own_factor is not None:
            own_factor.attach()
        return averager

    def build_alone(self, policy: str) -> None:
        """Builds the others' reducers on a rank that is to join."""
        if policy != self.policy:
            group, self.group = self.group, Group.alone(self._config.timeout_s)
            self.build(policy)
            self.group = group

    def share_with(self, group: Group | None) -> None:
        """Reduces gradients in this group from the next step on, with its ranks.

        None: this rank is excluded, and reduces nothing.
        """
        assert self.reducer is not None
        self.reducer.detach()
        if group is not None:
            self._build_reducer(group, None)

    def _build_reducer(self, group: Group, norms: NormScope | None) -> None:
        codec = "fp32"
        if self._config.policy == "sync":  # under auto a codec is for its windows
            codec = self._config.codec
            warn_of_codec(group, codec)
        self.reducer = reducer = GradientReducer(
            self._trainable,
            group,
            int(self._config.transport.bucket_cap_mb * 2**20),
            BufferAverager.for_model(self._model, group),
            norms,
            [name for name, p in self._model.named_parameters() if p.requires_grad],
            codec,
            keeps_sums=self._keeps_sums,
            reduced=self.reduced,
        )
        if self._config.loss_reduction == "sum":
            reducer.weights.sum_losses()
        elif self._is_weighed:
            reducer.weights.weigh_by_user()
        reducer.attach()

    def detach(self) -> None:
        """Removes every hook; SyncBatchNorm becomes plain BatchNorm again."""
        bind_sync_batchnorm(self._model, None)
        if self.reducer is not None:
            self.reducer.detach()
        if self.windows is not None:
            self.windows.detach()

    def check(self) -> None:
        """Refuses a change of the trained parameters inside an epoch.

        Raises:
            ConfigError: parameters were frozen, unfrozen or added since it began.
        """
        if not self._watch.is_same and self.is_changed:
            raise ConfigError(
                "parameters were frozen, unfrozen or added, or BatchNorm layers "
                "converted, inside an epoch; do it between epochs, on every rank"
            )

    def parameter_norm(self) -> float:
        """The L2 norm of the trained parameters; waits for the device.

        0.0, not measured, where parameters were NaN from the start (uninitialised
        memory in a parameter that is not used).
        """
        return 0.0 if self._is_nan_from_start else self._norm()

    def refuse_nan(self, epoch: int) -> None:
        """Refuses windows from NaN parameters, where every batch would seem at fault.

        Earlier steps under ``sync``, or the loop, have made them NaN.

        Raises:
            NonFiniteError: parameters are NaN that were numbers at the start.
        """
        if math.isnan(self.parameter_norm()):
            raise NonFiniteError(
                f"parameters contain NaN at the start of epoch {epoch}: check "
                "data, loss and learning rate, use a GradScaler, or choose a policy "
                "of windows from the start, which discards updates that are not finite"
            )

    def _norm(self) -> float:
        return float(get_total_norm([p.detach() for p in self._trainable]))

    def layout(self) -> str:
        """Digest of the trained parameters, "changed" or "same" since the build."""
        return f"{self.digest()} {'changed' if self.is_changed else 'same'}"

    def digest(self) -> str:
        """Digest that is equal where the same parameters are trained."""
        named = [
            f"{name} {list(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in self._model.named_parameters()
        ]
        return hashlib.sha256("\n".join(named).encode()).hexdigest()[:16]

    @property
    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self._model.parameters() if p.requires_grad]

    def _current_signature(self) -> list[tuple[int, bool, torch.dtype | None]]:
        """Signature of the model; another dtype renews buckets, not averages.

        SyncBatchNorm layers that were made since the last epoch join the others.
        """
        is_sync = self.policy == "sync"
        converted = sync_batchnorm_layers(self._model).values()
        return [
            *((id(layer), True, None) for layer in converted),
            *(
                (id(p), p.requires_grad, p.dtype if is_sync else None)
                for p in self._model.parameters()
            ),
        ]


def warn_of_codec(group: Group, codec: str) -> None:
    """Warns on the first rank if the requested codec saves nothing."""
    if codec == "fp32" or not group.shares_host:
        return
    if len(set(group.hosts())) == 1 and group.rank == 0:
        logger.warning(
            "codec %r costs time and saves none where all ranks share a host's memory: "
            "leave codec out there",
            codec,
        )
