"""Fake tensors that replace the model's and the sample's during a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from elche.devices import random_state
from elche.torch_internals.batches import tree_map
from elche.torch_internals.held import held_buffers, held_parameters, version
from elche.torch_internals.passes import FakeTensorMode, unset_fake_temporarily


@final
class StandIns:
    """Fake tensors for a trace: forward changes them, and no real ones.

    For example, BatchNorm counts its batches.

    Args:
        model: model with the real tensors.
        samples: the sample's tensors.
        device: device of the trace.

    Attributes:
        mode: fake tensor mode, whose sizes are symbols.
        inputs: fake tensors of the sample.
        held: the model's own parameters and buffers, by their names in traces.
        names: the same name of each fake parameter and buffer, by id.
        device: the argument.
    """

    def __init__(
        self, model: nn.Module, samples: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        self.inputs: list[torch.Tensor] = []
        for one in samples:
            sizes: Any = [DimDynamic.DYNAMIC] * one.dim()
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
            self.inputs.append(self.mode.from_tensor(one, symbolic_context=context))
        self._model, self.device = model, device
        self._named = dict((*model.named_parameters(), *model.named_buffers()))
        self._fakes = {
            id(one): self.mode.from_tensor(
                one if one.device == device else torch.empty_like(one, device=device),
                static_shapes=True,
            )
            for one in self._named.values()
        }
        self.held = {f"held_{i}": one for i, one in enumerate(self._named.values())}
        self.names = {id(self._fakes[id(one)]): own for own, one in self.held.items()}
        self._samples = dict(zip(map(id, self.inputs), samples, strict=True))
        self._sizes: list[tuple[Any, int]] = [
            (size, number)
            for fake, one in zip(self.inputs, samples, strict=True)
            for size, number in zip(fake.shape, one.shape, strict=True)
            if isinstance(size, torch.SymInt)
        ]
        self._versions = {key: version(fake) for key, fake in self._fakes.items()}

    def patched(self) -> AbstractContextManager[None]:
        """Puts the fake tensors into the model, and restores the real ones afterwards.

        `torch.func.functional_call` would leave fakes in a module that is used twice.
        """
        return _replaced(self._model, lambda one: self._fakes[id(one)])

    def computed(self, module: nn.Module, args: Any, keywords: Any) -> Any:
        """Runs a patched module on real tensors, because its code depends on values.

        Only the sizes of its output are used. A second run with other sizes shows
        whether each is constant or a size of the input. The sample's tensors have their
        own values. All others, and parameters of a model on the meta device, have
        made-up values.

        Returns:
            The output with fake tensors.

        Raises:
            KeyError: a size of the output is neither, or the output has a number.
        """
        symbols = {
            size.node.expr: (size, number)
            for size, number in self._sizes
            if size.node.expr.is_symbol  # else the trace has fixed it
        }
        sizes: dict[tuple[int, int], Any] = {}
        for i, (size, n) in enumerate(symbols.values()):
            sizes[n, n - 1 - i if n > i + 2 else n + 1 + i] = size
        turns = [{s.node.expr: pair[i] for pair, s in sizes.items()} for i in (0, 1)]
        found, again = (self._run(module, (args, keywords), turn) for turn in turns)
        learns = any(one.requires_grad for one in module.parameters())

        def fake(one: Any, other: Any) -> Any:
            if isinstance(one, (bool, int, float)):
                raise KeyError("a number, which values may have decided")
            if not isinstance(one, torch.Tensor):
                return one
            pairs = zip(one.shape, other.shape, strict=True)
            shape = [n if n == m else sizes[n, m] for n, m in pairs]
            with self.mode:
                made = torch.empty(shape, dtype=one.dtype, device=self.device)
                return made.requires_grad_(learns and one.is_floating_point()).clone()

        return tree_map(fake, found, again)

    def _run(self, module: nn.Module, given: Any, sizes: Mapping[Any, int]) -> Any:
        def evaluated(value: Any) -> Any:
            if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return value
            return value.node.pytype(value.node.expr.xreplace(sizes))

        def real(value: Any) -> Any:
            if hasattr(value, "past_length"):  # a cache of keys and values
                value.real_past_length = evaluated(value.past_length)
            if not isinstance(value, torch.Tensor):
                return evaluated(value)
            held = self.held.get(self.names.get(id(value), ""))
            if held is not None and not held.is_meta:
                return held if isinstance(held, nn.Parameter) else held.clone()
            shape = [evaluated(one) for one in value.shape]
            return _with_values(value, self._samples.get(id(value)), shape)

        devices = [self.device] if self.device.type != "meta" else []
        with (
            unset_fake_temporarily(),
            random_state.forked(devices),
            torch.no_grad(),
            _replaced(module, real),
        ):
            random_state.seed(devices, 0)
            args, keywords = tree_map(real, given)
            return module(*args, **keywords)

    def changed(self) -> dict[str, torch.Tensor]:
        """Tensors to which forward has written, by the model's names."""
        return {
            name: one
            for name, one in self._named.items()
            if version(self._fakes[id(one)]) != self._versions[id(one)]
        }


def _with_values(
    fake: torch.Tensor, sample: torch.Tensor | None, shape: list[int]
) -> torch.Tensor:
    """Tensor of the given shape, filled with the repeated sample or made-up values."""
    device = "cpu" if fake.is_meta else fake.device
    if sample is not None and not sample.is_meta:
        for dim, size in enumerate(shape):
            places = torch.arange(size, device=sample.device) % sample.shape[dim]
            sample = sample.index_select(dim, places)
        return sample
    if fake.is_floating_point() or fake.is_complex():
        return torch.randn(shape, dtype=fake.dtype, device=device)
    fill = int(fake.dtype is torch.bool)
    return torch.full(shape, fill, dtype=fake.dtype, device=device)


@contextmanager
def _replaced(
    module: nn.Module, chosen: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Replaces a module's tensors in this context."""
    slots = [
        (held, name, one)
        for each in module.modules()
        for held in (held_parameters(each), held_buffers(each))
        for name, one in held.items()
        if one is not None
    ]
    try:
        for held, name, one in slots:
            held[name] = chosen(one)
        yield
    finally:
        for held, name, one in slots:
            held[name] = one
