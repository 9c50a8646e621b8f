"""What a window reduces: parameters at its end, parameters meanwhile, or gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elche.comm.averaging import ParameterAverager
from elche.comm.codec_choice import measured_codec
from elche.comm.fragments import DriftSamples
from elche.comm.gradient_window import GradientWindow
from elche.comm.graph_capture import refuse_capture
from elche.comm.overlap import OverlappedAverager
from elche.comm.parameter_group import SyncResult
from elche.comm.process_group import Group
from elche.comm.window_buffers import WindowBuffers
from elche.config import RunConfig
from elche.coordination.messages import Reduce
from elche.errors import ConfigError, ProtocolError


class WindowSync(ABC):
    """How one rank takes part in the reductions of its windows."""

    is_overlapped = False

    @property
    @abstractmethod
    def extra_bytes(self) -> int:
        """Host memory held beside the model."""

    @abstractmethod
    def rebase(self) -> None:
        """Takes the present model as the common one."""

    def begin_batch(self, samples: int) -> None:  # noqa: B027
        """A loop body begins on so many samples."""

    def batch_done(self) -> None:  # noqa: B027
        """The loop body has run."""

    def hold(self, holds: bool) -> None:  # noqa: B027
        """Gradients that appear now are kept for a later pass through the batch."""

    def rewind(self) -> None:  # noqa: B027
        """A pass through the batch was broken off, and all of it will be run again."""

    def detach(self) -> None:  # noqa: B027
        """Takes every hook off the parameters."""

    def state_layout(self) -> str:
        """Names what of the optimizer's state can be averaged."""
        return ""

    def changed_buffers(self) -> tuple[int, ...]:
        """Indices of buffers written since the last reduction."""
        return ()

    def state_dict(self) -> dict[str, Any] | None:
        """What averaging holds beside the model; None where nothing is averaged."""
        return None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on from what :meth:`state_dict` returned; with all ranks.

        Raises:
            ConfigError: there is a state, but nothing is averaged here.
        """
        refuse_state(state)

    def close(self, *, begins: bool) -> bool:
        """The window ends; True if what this rank did in it can be used.

        Args:
            begins: overlapped, the reduction may begin before its plan is there.
        """
        return True

    def reduce(self, plan: Reduce) -> SyncResult:
        """Reduces now, waiting for the others."""
        raise ProtocolError(f"window {plan.window} is only reduced overlapped")

    def begin(self, plan: Reduce) -> None:
        """The plan is there: begins what :meth:`close` has not begun."""
        raise ProtocolError(f"window {plan.window} is not reduced overlapped")

    def poll(self) -> bool:
        """Whether the overlapped reduction's result is there."""
        return False

    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        """Adopts the overlapped reduction, waiting if need be."""
        raise ProtocolError(f"window {plan.window} is not reduced overlapped")


def make_window_sync(
    config: RunConfig,
    parameters: Sequence[nn.Parameter],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: Group,
) -> WindowSync:
    """What the settings ask for, built with all ranks of the group."""
    if config.sums_gradients:
        window = GradientWindow(parameters, group)
        window.build()
        buffers = WindowBuffers(model, group)
        sync = GradientSync(
            parameters,
            optimizer,
            window,
            buffers,
            config.max_grad_norm,
            is_sum=config.loss_reduction == "sum",
        )
        sync.attach()
        return sync
    reset_state = config.optimizer_state == "reset"
    codec = config.codec
    if codec == "auto":
        codec = measured_codec(group, sum(p.numel() for p in parameters))
    if config.policy == "async":
        overlapped = OverlappedAverager(
            parameters,
            model,
            optimizer,
            group,
            reset_state=reset_state,
            codec=codec,
            fragments=config.fragments,
        )
        overlapped.build()
        drifts = DriftSamples(config.drift_weights, config.fragments)
        return OverlappedSync(overlapped, optimizer, drifts)
    averager = ParameterAverager(
        parameters,
        model,
        optimizer,
        group,
        reset_state=reset_state,
        codec=codec,
        fragments=config.fragments,
    )
    averager.build()
    drifts = DriftSamples(config.drift_weights, config.fragments)
    return ParameterSync(averager, parameters, optimizer, drifts)


@final
class ParameterSync(WindowSync):
    """Parameters averaged at the end of the window."""

    def __init__(
        self,
        averager: ParameterAverager,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        drifts: DriftSamples,
    ) -> None:
        self._averager = averager
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._drifts = drifts
        self._is_finite = True
        self._in_hand = self._samples = 0

    @property
    def extra_bytes(self) -> int:
        """See :meth:`WindowSync.extra_bytes`."""
        return self._averager.extra_bytes

    def rebase(self) -> None:
        """See :meth:`WindowSync.rebase`."""
        self._averager.rebase()
        self._drifts.synchronised(None)

    def state_layout(self) -> str:
        """See :meth:`WindowSync.state_layout`."""
        return self._averager.state_layout()

    def changed_buffers(self) -> tuple[int, ...]:
        """See :meth:`WindowSync.changed_buffers`."""
        return self._averager.changed_buffers()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`WindowSync.state_dict`."""
        return self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """See :meth:`WindowSync.load_state_dict`."""
        self._averager.load_state_dict(state)

    def begin_batch(self, samples: int) -> None:
        """See :meth:`WindowSync.begin_batch`."""
        self._in_hand = samples

    def batch_done(self) -> None:
        """See :meth:`WindowSync.batch_done`."""
        self._samples += self._in_hand
        self._in_hand = 0

    def close(self, *, begins: bool) -> bool:
        """See :meth:`WindowSync.close`."""
        self._is_finite = all_finite(self._parameters)
        self._drifts.add(self._samples)
        self._samples = 0
        return self._is_finite

    def reduce(self, plan: Reduce) -> SyncResult:
        """See :meth:`WindowSync.reduce`; a rank that went astray starts anew."""
        if self._drifts.fragments == 1:
            result = self._averager.synchronise(plan)
        else:
            result = self._averager.synchronise(
                plan, self._drifts.weights(), is_finite=self._is_finite
            )
        self._drifts.synchronised(plan.fragment if self._is_finite else None)
        if not self._is_finite and not plan.include_state:
            self._optimizer.state.clear()
        return result


@final
class OverlappedSync(WindowSync):
    """Parameters averaged while the next window runs.

    Args:
        averager: averages them.
        optimizer: loses its state if this rank went astray.
        drifts: counts what they weigh.
    """

    is_overlapped = True

    def __init__(
        self,
        averager: OverlappedAverager,
        optimizer: torch.optim.Optimizer,
        drifts: DriftSamples,
    ) -> None:
        self._averager = averager
        self._optimizer = optimizer
        self._drifts = drifts
        self._is_finite = True
        self._in_hand = self._samples = self._windows = 0

    @property
    def extra_bytes(self) -> int:
        """See :meth:`WindowSync.extra_bytes`."""
        return self._averager.extra_bytes

    def rebase(self) -> None:
        """See :meth:`WindowSync.rebase`; the first fragment's turn comes next."""
        self._averager.rebase()
        self._drifts.synchronised(None)
        self._windows = 0

    def changed_buffers(self) -> tuple[int, ...]:
        """See :meth:`WindowSync.changed_buffers`."""
        return self._averager.changed_buffers()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`WindowSync.state_dict`."""
        return self._averager.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """See :meth:`WindowSync.load_state_dict`."""
        self._averager.load_state_dict(state)

    def begin_batch(self, samples: int) -> None:
        """See :meth:`WindowSync.begin_batch`."""
        self._in_hand = samples

    def batch_done(self) -> None:
        """See :meth:`WindowSync.batch_done`."""
        self._samples += self._in_hand
        self._in_hand = 0

    def close(self, *, begins: bool) -> bool:
        """See :meth:`WindowSync.close`; a rank that trained begins to reduce."""
        has_trained = self._samples > 0
        self._drifts.add(self._samples)
        self._samples = 0
        fragment = self._windows % self._drifts.fragments
        self._windows += 1
        weight = self._drifts.weights()[fragment]
        self._is_finite = self._averager.snapshot(
            weight, begins=begins, fragment=fragment, has_trained=has_trained
        )
        return self._is_finite

    def begin(self, plan: Reduce) -> None:
        """See :meth:`WindowSync.begin`."""
        if self._drifts.fragments == 1:
            self._averager.begin(plan)
        else:
            self._averager.begin(plan, self._drifts.weights())
        self._drifts.synchronised(plan.fragment if self._is_finite else None)

    def poll(self) -> bool:
        """See :meth:`WindowSync.poll`."""
        return self._averager.poll()

    def finish(self, plan: Reduce, *, is_drained: bool) -> SyncResult:
        """See :meth:`WindowSync.finish`."""
        result = self._averager.adopt(plan, drained=is_drained)
        if not self._is_finite:
            self._optimizer.state.clear()
        return result


@final
class GradientSync(WindowSync):
    """Gradients summed over the window; one common optimizer step at its end.

    Gradients are taken away at the end of every backward pass, so that the loop's own
    ``optimizer.step()`` finds none and does nothing.

    Args:
        parameters: the trainable parameters.
        optimizer: steps them at the window's end.
        window: sums the gradients.
        buffers: averages what changed of the model's buffers.
        max_grad_norm: clip the reduced gradient to this norm.
        is_sum: the loss is a sum over the samples of a batch, and the gradient to be
            that of the sum over all samples of the window; else both are means.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        window: GradientWindow,
        buffers: WindowBuffers,
        max_grad_norm: float | None,
        *,
        is_sum: bool = False,
    ) -> None:
        self._is_sum = is_sum
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._window = window
        self._buffers = buffers
        self._max_grad_norm = max_grad_norm
        self._samples = 0
        self._in_backward = False
        self._holds = False
        self._has_seen = False
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Watches for gradients."""
        for parameter in self._parameters:
            hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
            self._handles.append(hook)

    def detach(self) -> None:
        """See :meth:`WindowSync.detach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._has_seen = True
        if not self._in_backward and not self._holds:
            refuse_capture()
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)

    def hold(self, holds: bool) -> None:
        """See :meth:`WindowSync.hold`."""
        self._holds = holds

    def rewind(self) -> None:
        """See :meth:`WindowSync.rewind`; nothing was added of a pass without an end."""
        self._in_backward = False

    def _end_backward(self) -> None:
        self._in_backward = False
        self._add_gradients()

    def _add_gradients(self) -> None:
        """Adds ``p.grad`` as what it is: a sum over samples, or times their number."""
        weight = float(self._samples > 0) if self._is_sum else self._samples
        self._window.add(weight, is_whole=False)

    @property
    def extra_bytes(self) -> int:
        """See :meth:`WindowSync.extra_bytes`."""
        return self._window.extra_bytes

    def rebase(self) -> None:
        """Parameters only change by common steps; buffers start from here."""
        self._buffers.rebase()

    def changed_buffers(self) -> tuple[int, ...]:
        """See :meth:`WindowSync.changed_buffers`."""
        return self._buffers.changed()

    def begin_batch(self, samples: int) -> None:
        """See :meth:`WindowSync.begin_batch`."""
        self._samples = samples
        self._in_backward = self._holds = self._has_seen = False

    def batch_done(self) -> None:
        """See :meth:`WindowSync.batch_done`."""
        if not self._has_seen:
            refuse_stray_gradients(self._parameters)
        if self._is_sum:  # before their samples are counted
            self._add_gradients()
        self._window.add(self._samples)
        self._samples = 0

    def reduce(self, plan: Reduce) -> SyncResult:
        """See :meth:`WindowSync.reduce`."""
        samples = self._window.samples
        total = self._window.reduce()
        self._buffers.average(plan)
        if self._is_sum:
            self._multiply(total)
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        own = self._share_rates(samples)
        self._optimizer.step()
        self._set_rates(own)
        self._window.clear()  # also of what this optimizer does not hold
        return SyncResult(divergence=0.0, parameter_norm=0.0)

    @torch.no_grad()
    def _multiply(self, samples: float) -> None:
        """Makes the sum over the window of its mean."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, samples)

    def _share_rates(self, samples: float) -> list[float]:
        """Sets every rate to its mean over the window's samples; returns this rank's.

        A schedule in the loop has brought each rank as far as its own batches, and a
        common step needs a common rate.
        """
        own = [float(group["lr"]) for group in self._optimizer.param_groups]
        message = torch.tensor(
            [samples, *(rate * samples for rate in own)], dtype=torch.float64
        )
        self._window.group.all_reduce(message, "sharing learning rates")
        total, *sums = message.tolist()
        if total > 0:
            self._set_rates([each / total for each in sums])
        return own

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def refuse_stray_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Refuses gradients that came without a backward pass, and were not reduced.

    Where such a gradient is, the loop's optimizer has stepped along it on this rank
    alone.

    Raises:
        ConfigError: there is one.
    """
    stray = next((p for p in parameters if p.grad is not None), None)
    if stray is not None:
        raise ConfigError(
            f"a parameter of shape {list(stray.shape)} has a gradient, but no backward "
            "pass of this loop produced one: gradients that are assigned "
            "(torch.autograd.grad), or that a replayed CUDA graph writes, are not "
            "reduced; call loss.backward(), or choose policy 'async' or 'cadence', "
            "which average parameters"
        )


def refuse_state(state: dict[str, Any] | None) -> None:
    """Refuses a state of averaging where gradients are reduced.

    Raises:
        ConfigError: there is one.
    """
    if state is not None:
        raise ConfigError(
            "the state is of averaged parameters, and this run reduces gradients; "
            "expected the policy and update that it was saved under"
        )


@torch.no_grad()
def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every element is a finite number (one pass, one answer per device)."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(
        bool(
            torch.stack([n.float() for n in torch._foreach_norm(some)]).isfinite().all()
        )
        for some in by_device.values()
    )
