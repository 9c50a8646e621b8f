"""Emulated devices: real, small compute stretched to a fixed time per sample.

An emulated device is a real worker on the CPU. It computes the real model, its real
gradients and its real updates, and sleeps until a device of the declared speed would be
as far: one third of a pass's time in the forward pass, two thirds spread over the
backward pass before each gradient appears. So a reduction started by a gradient can
overlap with the rest, as on a device. Every contender of a comparison gets the same
wrapper.

Deadlines are absolute. Real compute is absorbed by the sleep that follows it, and
errors of single sleeps do not add up. If real compute takes longer than the declared
time, nothing can be stretched: the handle counts that excess, so that a benchmark can
report a dishonest emulation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elche.config_checks import check_not_negative, check_positive
from elche.errors import ConfigError
from elche.torch_internals.batches import tree_leaves
from elche.torch_internals.held import disable_dynamo
from elche.torch_internals.passes import queue_callback

FORWARD_FRACTION = 1 / 3
"""Share of a sample's time spent in the forward pass; the backward has the rest."""


@dataclass(frozen=True)
class EmulationConfig:
    """Speed of an emulated device.

    Attributes:
        speed: relative to the reference device of speed 1; 0.25 is four times
            slower. Positive and finite.
        ms_per_sample: time of one sample, forward and backward, on the
            reference device, in milliseconds. Positive and finite.
        fixed_ms: time of a pass beside its samples' (kernel launches, latencies), in
            milliseconds, whatever the speed. Finite, not negative.
        memory_samples: samples that fit the device in one forward pass of training;
            a larger one raises torch's OutOfMemoryError. None: any.

    Raises:
        ConfigError: if a value is not such a number.
    """

    speed: float
    ms_per_sample: float = 1.25
    fixed_ms: float = 0.0
    memory_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("speed", "ms_per_sample"):
            check_positive(f"{name} of an emulated device", getattr(self, name))
        check_not_negative("fixed_ms of an emulated device", self.fixed_ms)

    def pass_s(self, samples: int) -> float:
        """Seconds that ``samples`` take together, forward and backward."""
        return (self.fixed_ms + samples * self.ms_per_sample / self.speed) / 1e3

    def for_layer(self, layers: int) -> EmulationConfig:
        """The same device for one of a model's layers, which share its time equally."""
        ms_per_sample, fixed_ms = self.ms_per_sample / layers, self.fixed_ms / layers
        return replace(self, ms_per_sample=ms_per_sample, fixed_ms=fixed_ms)


@final
class EmulationHandle:
    """Makes training steps of a model take the time of an emulated device.

    Make it before the model is wrapped (DistributedDataParallel, elche): the gradient
    hooks then run ahead of the wrapper's. Only calls in training mode with gradients
    enabled are stretched; evaluation runs at real speed. The number of samples is the
    leading dimension of the first tensor among the arguments.

    A backward pass is stretched for the forward passes whose outputs it goes through. A
    forward pass whose output requires no gradient is stretched for both.

    Args:
        model: root module, on the CPU.
        config: the device's speed.

    Attributes:
        steps: backward passes finished so far.
        nominal_s: declared time of those passes and their forward passes.
        overrun_s: time by which real compute exceeded the declaration. Delays that the
            scheduler adds to sleeps are not included.

    Raises:
        ConfigError: if no parameter requires a gradient, or one is not on the CPU.
    """

    def __init__(self, model: nn.Module, config: EmulationConfig) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise ConfigError(
                "an emulated device needs a model with parameters that require a"
                f" gradient, got {type(model).__name__} without any"
            )
        foreign = {str(p.device) for p in parameters if p.device.type != "cpu"}
        if foreign:
            raise ConfigError(
                "an emulated device computes on the CPU, but the model has"
                f" parameters on {', '.join(sorted(foreign))}; move it with .cpu()"
            )
        self._config = config
        self.steps = 0
        self.nominal_s = self.overrun_s = 0.0
        self._num_parameters = len(parameters)
        self._forward_begin_s = 0.0
        self._pass_s = 0.0
        self._forwards = 0
        self._backward = _BackwardPass()
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward),
            *(_tensor_hook(p, self._on_gradient) for p in parameters),
        ]

    def remove(self) -> None:
        """Detach the emulation; the model runs at real speed again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @disable_dynamo  # a compiled model would be compiled again at every step
    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        # An exception in a backward pass skips its end: start afresh here.
        self._backward = _BackwardPass()
        samples = num_samples(args, kwargs)
        memory = self._config.memory_samples
        if memory is not None and samples > memory:
            raise torch.OutOfMemoryError(
                f"the emulated device holds {memory} samples, not {samples}"
            )
        self._pass_s = self._config.pass_s(samples)
        self._forward_begin_s = time.perf_counter()

    @disable_dynamo
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        pass_s, leaves = self._pass_s, tree_leaves(output)
        outputs = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        part = FORWARD_FRACTION if outputs else 1.0
        deadline_s = self._forward_begin_s + part * pass_s
        overrun_s = max(0.0, time.perf_counter() - deadline_s)
        sleep_until(deadline_s)
        self._forwards += 1
        for tensor in outputs:
            _tensor_hook(tensor, self._output_hook(self._forwards, pass_s, overrun_s))

    def _output_hook(
        self, forward: int, pass_s: float, overrun_s: float
    ) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            backward = self._running_backward()
            if forward not in backward.forwards:
                backward.forwards.add(forward)
                backward.passes_s += pass_s
                backward.forward_overrun_s += overrun_s

        return hook

    def _on_gradient(self, gradient: Tensor) -> None:
        backward = self._running_backward()
        backward.gradients += 1
        done = min(1.0, backward.gradients / self._num_parameters)
        deadline_s = backward.begin_s + done * backward.duration_s
        if sleep_until(deadline_s):
            backward.woke_s = time.perf_counter()

    def _running_backward(self) -> _BackwardPass:
        if not self._backward.running:
            self._backward = _BackwardPass(running=True, begin_s=time.perf_counter())
            queue_callback(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        """Ends a pass: sleeps for parameters without a gradient, and counts it."""
        backward, self._backward = self._backward, _BackwardPass()
        deadline_s = backward.begin_s + backward.duration_s
        late_s = time.perf_counter() - max(deadline_s, backward.woke_s)
        sleep_until(deadline_s)
        overrun_s = backward.forward_overrun_s + max(0.0, late_s)
        self.steps += 1
        self.nominal_s += backward.passes_s
        self.overrun_s += overrun_s


emulate = EmulationHandle


@dataclass
class _BackwardPass:
    """One backward pass in progress: its emulated time and its state.

    Each gradient takes an equal part of the time, in whatever order autograd brings
    them. Layers have about equal numbers of parameters, so this is time by depth; time
    by size would leave almost none for the layers below a large table, so their real
    compute could not hide.
    """

    running: bool = False
    begin_s: float = 0.0
    woke_s: float = 0.0
    passes_s: float = 0.0
    gradients: int = 0
    forward_overrun_s: float = 0.0
    forwards: set[int] = field(default_factory=set)

    @property
    def duration_s(self) -> float:
        return (1 - FORWARD_FRACTION) * self.passes_s


def _tensor_hook(tensor: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def num_samples(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Leading dimension of the first tensor that has one."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise ConfigError(
        "an emulated device counts samples by the leading dimension of the first"
        " tensor argument, but the model was called without such a tensor"
    )


def sleep_until(deadline_s: float) -> bool:
    """Sleeps until `deadline_s` of `time.perf_counter`; False if it has passed."""
    remaining_s = deadline_s - time.perf_counter()
    if remaining_s <= 0:
        return False
    time.sleep(remaining_s)
    return True
