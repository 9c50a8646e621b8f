"""A stage: consecutive layers of the model on one device."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import nn

from elche.devices import random_state
from elche.torch_internals.batches import tree_leaves

CACHE = "cache"
"""Name of forward's argument for the dict in which a layer caches keys and values."""
LayerCaches: TypeAlias = dict[tuple[int, int, int], dict[str, Any]]
"""Caches of a rank by stage, layer within the stage, and microbatch."""


class OwnBackward(nn.Module):
    """A layer with its own split backward; it forms a stage by itself.

    Its forward runs under autograd, so that its output is part of a graph. It reads
    ``current_microbatch`` to store values for the backward.
    """

    current_microbatch: int = 0

    @abstractmethod
    def backward_input(
        self, microbatch: int, gradients: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...]:
        """Computes the gradients of the inputs from those of the outputs.

        Args:
            microbatch: index of the microbatch.
            gradients: one gradient per output tensor that requires one.

        Returns:
            One gradient per input tensor that requires one.
        """

    @abstractmethod
    def backward_weight(self, microbatch: int) -> None:
        """Adds the parameters' gradients of a microbatch to ``grad``."""


@final
@dataclass(frozen=True)
class Layer:
    """A module of the model with its name in the model.

    Attributes:
        name: prefix of its parameters in the model's state_dict, without the dot.
        module: the module.
        aliases: names in the model that differ from prefix plus own name.
    """

    name: str
    module: nn.Module
    aliases: dict[str, str] | None = None

    def prefixed(self, name: str) -> str:
        """Returns the model's name of a parameter or buffer of this layer."""
        own = f"{self.name}.{name}" if self.name else name
        return (self.aliases or {}).get(name, own)


@final
class Stage:
    """Layers that run one after another.

    Args:
        index: index of the stage in the pipeline.
        layers: layers in order.
        unpacks: pass a tuple as positional arguments and a dict as keywords; otherwise
            pass either as one value, like nn.Sequential.
        seed: seed of dropout, combined with step, layer and microbatch; so masks do not
            depend on the placement. Microbatches are numbered across replicas.
        first_layer: index of the first layer in the model.
        unsplit: positions of the layers whose backward is not split.
    """

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        unpacks: bool,
        seed: int | None = None,
        first_layer: int = 0,
        unsplit: Collection[int] = (),
    ) -> None:
        self.index = index
        self.layers = tuple(layers)
        self.step = 0
        self.first_microbatch = 0
        self._unpacks = unpacks
        self._seed = seed
        self._first_layer = first_layer
        self.split_modules = [
            layer.module for place, layer in enumerate(layers) if place not in unsplit
        ]
        self._keywords = [_keywords(layer.module) for layer in layers]

    @property
    def own_backward(self) -> OwnBackward | None:
        """The stage's only layer, if it has its own backward; else None."""
        only = self.layers[0].module if len(self.layers) == 1 else None
        return only if isinstance(only, OwnBackward) else None

    def named_modules(self) -> dict[str, nn.Module]:
        """The layers' modules and submodules under the model's names."""
        return {
            layer.prefixed(name).rstrip("."): module
            for layer in self.layers
            for name, module in layer.module.named_modules()
        }

    def takes(self, keyword: str) -> bool:
        """True if any layer may accept a keyword."""
        return any(takes_all or keyword in own for own, takes_all in self._keywords)

    @property
    def keywords(self) -> frozenset[str]:
        """Names of the layers' forward arguments."""
        return frozenset().union(*(own for own, _ in self._keywords))

    def run(
        self,
        value: Any,
        microbatch: int,
        keywords: dict[str, Any],
        caches: LayerCaches | None = None,
    ) -> Any:
        """Runs the layers on the output of the previous stage.

        With a seed, torch's generators are restored afterwards, so that the user's
        script draws the same batches on every rank. With `caches`, layers that accept
        `cache=` receive their own cache.
        """
        tensors = (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
        devices = {one.device for one in tensors}
        with random_state.forked(devices, enabled=self._seed is not None):
            for number, layer in enumerate(self.layers):
                if self._seed is not None:
                    self._reseed(number, microbatch, devices)
                own, takes_all = self._keywords[number]
                given = {
                    name: one
                    for name, one in keywords.items()
                    if takes_all or name in own
                }
                if caches is not None and CACHE in own:
                    place = (self.index, number, microbatch)
                    given = {**given, CACHE: caches.setdefault(place, {})}
                if self._unpacks and isinstance(value, tuple):
                    value = layer.module(*value, **given)
                elif self._unpacks and isinstance(value, dict):
                    value = layer.module(**value, **given)
                else:
                    value = layer.module(value, **given)
        return value

    def _reseed(
        self, number: int, microbatch: int, devices: Collection[torch.device]
    ) -> None:
        microbatch += self.first_microbatch
        place = (self._seed, self.step, self._first_layer + number, microbatch)
        drawn = hash(place) % (1 << 63)
        random_state.seed(devices, drawn)


def _keywords(module: nn.Module) -> tuple[frozenset[str], bool]:
    """Names of the arguments of forward, and whether it accepts any keyword."""
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), False
    named = {
        one.name
        for one in found
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    if type(module).__module__.startswith("transformers."):
        named.discard(CACHE)  # since 5.24 transformers' name for its own caches
    # Containers forward all arguments; a compiled module hides its signature.
    takes_all = any(one.kind is one.VAR_KEYWORD for one in found)
    return frozenset(named), takes_all


def named_parameters(layers: Sequence[Layer]) -> dict[str, nn.Parameter]:
    """Parameters of layers under the model's names, each once."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for layer in layers:
        for name, one in layer.module.named_parameters():
            found.setdefault(id(one), (layer.prefixed(name), one))
    return dict(found.values())


@contextmanager
def modes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restores the training modes of all modules and submodules afterwards."""
    modes = [(one, one.training) for top in modules for one in top.modules()]
    try:
        yield
    finally:
        for one, mode in modes:
            one.training = mode
