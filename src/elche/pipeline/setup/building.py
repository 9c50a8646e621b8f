"""List of the model's layers, of which each rank builds only its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elche.comm.tensors.unshareable import why_not_plain, wrapped_module
from elche.devices import random_state
from elche.errors import ConfigError
from elche.pipeline.cutting.whole_modules import SplitPoints
from elche.pipeline.setup.meta_tensors import MetaTensors
from elche.pipeline.setup.pretrained import owners
from elche.pipeline.stage import Layer
from elche.torch_internals.held import held_parameters

LayerSource = nn.Module | Callable[[], nn.Module]
Split = Callable[[Any], Sequence[nn.Module]]


@final
@dataclass(frozen=True)
class LayerList:
    """Layers of a model in order, built or not.

    Attributes:
        names: prefix of each layer's parameters in the model.
        sources: the modules, or their factories.
        unpacks: see `elche.pipeline.stage.Stage`.
        aliases: names of a layer's parameters and buffers in the model, where they
            differ from prefix plus own name.
        state_names: only for a split model: every name in its state_dict, with all
            names of the same tensor.
        cut_again: only for a model that elche cut: function that cuts it again, without
            some arguments or with `cache=`; see `cut_model` of
            `elche.pipeline.cutting.segments`.
        owners: see `elche.pipeline.setup.pretrained.owners`.
    """

    names: tuple[str, ...]
    sources: tuple[LayerSource, ...]
    unpacks: bool
    aliases: tuple[dict[str, str] | None, ...]
    state_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cut_again: Callable[[Sequence[str], bool], Sequence[nn.Module]] | None = None
    owners: Mapping[int, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sources)

    def name_of(self, index: int, own: str) -> str:
        """The model's name of a parameter or buffer of a layer."""
        aliases, prefix = self.aliases[index] or {}, self.names[index]
        return aliases.get(own, f"{prefix}.{own}" if prefix else own)

    def describe(self) -> list[str]:
        """Names, types and shapes of built layers, which must agree between ranks."""
        found: list[str] = []
        for name, source in zip(self.names, self.sources, strict=True):
            parts = ["a factory"]
            if isinstance(source, nn.Module):
                held = source.state_dict().items()
                parts = [type(one).__name__ for one in source.modules()]
                parts += [
                    f"{own} {list(one.shape)} {str(one.dtype).removeprefix('torch.')}"
                    for own, one in held
                    if isinstance(one, torch.Tensor)
                ]
            found.append(f"{name} ({', '.join(parts)})")
        return found

    def ties(self) -> list[list[tuple[int, str]]]:
        """Parameters used in several places: (layer, own name) of each use."""
        uses: dict[int, list[tuple[int, str]]] = {}
        for index, source in enumerate(self.sources):
            if isinstance(source, nn.Module):
                for name, one in source.named_parameters(remove_duplicate=False):
                    uses.setdefault(id(one), []).append((index, name))
        return [found for found in uses.values() if len(found) > 1]

    def build(
        self,
        indices: Sequence[int],
        device: torch.device,
        seed: int | None,
        meta: MetaTensors | None = None,
    ) -> dict[int, Layer]:
        """Builds layers on a device, by index; ties the parameters that they share.

        Args:
            indices: indices of the layers.
            device: target device.
            seed: seed that makes every layer's values independent of its rank; torch's
                generators are restored afterwards.
            meta: makes and initialises the tensors of layers on the meta device.
        """
        ties, meta = self.ties(), meta or MetaTensors()
        # Afterwards every rank's script draws the same numbers, for any layers built.
        with random_state.forked([device], enabled=seed is not None):
            built = {at: self._build(at, device, seed, meta) for at in indices}
        for uses in ties:  # a move separates them if torch cannot move in place
            here = [(built[at].module, name) for at, name in uses if at in built]
            for module, name in here[1:]:
                owner, _, own = name.rpartition(".")
                first = here[0][0].get_parameter(here[0][1])
                held_parameters(module.get_submodule(owner))[own] = first
        return built

    def _build(
        self, index: int, device: torch.device, seed: int | None, meta: MetaTensors
    ) -> Layer:
        source = self.sources[index]
        if seed is not None:
            torch.manual_seed(hash((seed, index)) % (1 << 63))
        if not isinstance(source, nn.Module):
            with torch.device(device):
                source = source()
            if not isinstance(source, nn.Module):
                raise ConfigError(
                    f"expected the factory of layer {index} to make an nn.Module, got "
                    f"{type(source).__name__}"
                )
            _check_layer(source, index)
            return Layer(self.names[index], source.to(device), self.aliases[index])
        layer = Layer(self.names[index], source, self.aliases[index])
        meta.fill(layer, device, self.owners)
        source.to(device)
        return layer


def layers_of(
    model: Any,
    split: Split | None,
    points: SplitPoints | None = None,
    sample: Any = None,
) -> LayerList:
    """Converts the user's model into layers.

    Args:
        model: an nn.Sequential, a list of modules or factories of modules, or any
            module with `split` or a sample.
        split: function from the module to its layers in execution order: submodules, or
            new modules that hold the same parameters.
        points: split points, in place of `split`.
        sample: one microbatch of the input, to trace the module.
    """
    if points is not None and (split is not None or not isinstance(model, nn.Module)):
        raise ConfigError(
            "split_points= cuts a module, and excludes split=; got "
            f"{type(model).__name__}{' and split' if split else ''}"
        )
    is_plain = isinstance(model, nn.Module) and not isinstance(model, nn.Sequential)
    again: Callable[[Sequence[str], bool], Sequence[nn.Module]] | None = None
    if points is not None or (split is None and is_plain):
        # This imports sympy, which no other path needs.
        from elche.pipeline.cutting.segments import cut_model

        split = partial(cut_model, points=points, sample=sample)
        again = partial(cut_model, model, points, sample)
    if split is not None:
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"split= cuts a module, got {type(model).__name__} as the model"
            )
        _check_layer(model, None)
        found = layers_of_split(model, list(split(model)))
    elif isinstance(model, nn.Sequential):
        named = dict(model.named_children())
        nothing = (None,) * len(named)
        found = LayerList(tuple(named), tuple(named.values()), False, nothing)
    elif isinstance(model, (list, tuple)):
        names = tuple(map(str, range(len(model))))
        found = LayerList(names, tuple(model), True, (None,) * len(model))
    else:
        raise ConfigError(
            "expected an nn.Module or a list of layers as the model, got "
            f"{type(model).__name__}"
        )
    for index, source in enumerate(found.sources):
        if isinstance(source, nn.Module):
            _check_layer(source, index)
        elif not callable(source):
            raise ConfigError(
                f"expected modules or factories of modules as layers, got "
                f"{type(source).__name__} at {index}"
            )
    return replace(found, cut_again=again, owners=owners(model))


def layers_of_split(model: nn.Module, modules: Sequence[Any]) -> LayerList:
    """Layers returned by `split`, checked against the model's tensors."""
    prefixes = {id(one): name for name, one in model.named_modules()}
    originals: dict[int, str] = {}
    for name, one in _held(model):
        originals.setdefault(id(one), name)
    covered: set[int] = set()
    names: list[str] = []
    aliases: list[dict[str, str] | None] = []
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"expected split to return modules, got {type(module).__name__} at "
                f"{index}; wrap a function in a module"
            )
        held = _held(module)
        covered |= {id(one) for _, one in held}
        prefix = prefixes.get(id(module))
        names.append(f"{index}" if prefix is None else prefix)
        if prefix is not None:
            aliases.append(None)
            continue
        foreign = [name for name, one in held if id(one) not in originals]
        if foreign:
            raise ConfigError(
                f"layer {index} of split has {', '.join(foreign[:3])}, which the "
                "model lacks; layers must hold the model's own parameters"
            )
        aliases.append({name: originals[id(one)] for name, one in held})
    left = [name for key, name in originals.items() if key not in covered]
    if left:
        raise ConfigError(
            f"no layer of split holds {', '.join(left[:3])} of the model, which would "
            "never be trained; add the module that holds it"
        )
    state_names = _names_of_state(model)
    return LayerList(*(tuple(names), tuple(modules), True, tuple(aliases)), state_names)


def _held(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all their names."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _names_of_state(model: nn.Module) -> dict[str, tuple[str, ...]]:
    state = model.state_dict()
    shared: dict[int, list[str]] = {}
    for name, one in _held(model):
        shared.setdefault(id(one), []).extend([name] * (name in state))
    known = {name: tuple(names) for names in shared.values() for name in names}
    return {name: known.get(name, (name,)) for name in state}


def _check_layer(module: nn.Module, index: int | None) -> None:
    """Rejects modules that torch shards, reduces or steps itself, and lazy modules.

    A lazy module gets parameters at its first batch, after the optimizer was made.
    """
    where = "the model" if index is None else f"layer {index}"
    named = (*module.named_parameters(), *module.named_buffers())
    lacking = [name for name, one in named if is_lazy(one)]
    unlike = (f"{name} {why}" for name, one in named if (why := why_not_plain(one)))
    if not lacking and (fault := wrapped_module(module) or next(unlike, "")):
        raise ConfigError(f"{where}: {fault}")
    if lacking:
        kinds = {type(one).__name__ for one in module.modules()}
        lazy = ", ".join(sorted(kind for kind in kinds if kind.startswith("Lazy")))
        raise ConfigError(
            f"{where} ({lazy or type(module).__name__}) has parameters or buffers "
            f"without a size: {', '.join(lacking[:3])}; run one batch through the "
            "model first, or give the sizes (nn.Linear instead of nn.LazyLinear)"
        )
