"""Memory and values of the tensors that a model has on the meta device.

New tensors are blank (NaN, or the largest integer), so that one that nothing has
computed or loaded is refused by name: it would train, and mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.checkpoints.named_states import few
from elche.pipeline.stage import Layer
from elche.torch_internals.held import (
    held_buffers,
    held_parameters,
    unsaved_buffers,
    version,
)

Init: TypeAlias = Callable[[Any], object] | Literal["load"] | None
"""See `elche.pipeline.pipeline_config.PipelineConfig.init`."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of a tensor in a module, and the tensors of the meta device and of here."""

    name: str
    module: nn.Module
    own: str
    meta: torch.Tensor
    made: torch.Tensor

    @property
    def is_saved(self) -> bool:
        return self.own not in unsaved_buffers(self.module)

    def is_blank(self) -> bool:
        now = getattr(self.module, self.own).detach()
        if not now.numel():
            return False
        if now.dtype is torch.bool:  # has no blank value
            return getattr(self.module, self.own) is self.made and version(now) <= 1
        if not (now.is_floating_point() or now.is_complex()):
            return bool((now == torch.iinfo(now.dtype).max).all())
        first = now[(0,) * now.dim()]  # most tensors need no look at the rest
        return bool(first != first) and bool((now != now).all())


@final
class MetaTensors:
    """Tensors of this rank in place of those of the meta device."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []
        self._made: dict[int, torch.Tensor] = {}
        self._waiting: list[_Slot] = []

    def fill(
        self,
        layer: Layer,
        device: torch.device,
        init: Init,
        owners: Mapping[int, Any],
    ) -> None:
        """Makes and initialises a layer's tensors; those with values keep them.

        Args:
            layer: layer of the model.
            device: target device.
            init: see `elche.pipeline.pipeline_config.PipelineConfig`.
            owners: see `elche.pipeline.setup.pretrained.owners`.

        Raises:
            ConfigError: a module has no initialisation, or nothing has computed a
                buffer that no state_dict has.
        """
        slots = self._replace(layer.module, device, layer.prefixed)
        for module in reversed([*layer.module.modules()]) if slots else ():
            mine = [slot for slot in slots if slot.module is module]
            if not mine and next(_tensors(module), None) is not None:
                continue
            owner = owners.get(id(module))
            if owner is not None:
                if init is None or not all(slot.is_saved for slot in mine):
                    with torch.no_grad():
                        owner._init_weights(module)
            elif init is None:
                _reset(module, layer.name, bool(mine))
        if callable(init) and slots:
            init(layer.module)
        blank = [slot for slot in slots if slot.is_blank()]
        lacking = [slot for slot in blank if init is None or not slot.is_saved]
        if lacking:
            raise ConfigError(
                "the model was built on the meta device, and nothing has computed "
                f"{_shown(lacking)} since; write to it in the module's "
                "reset_parameters or in init=, or leave buffers that no state_dict has "
                "their values (accelerate.init_empty_weights does)"
            )
        self._waiting += blank

    def adopt(self, model: nn.Module) -> None:
        """Gives the model itself the tensors that its layers have got."""
        self._replace(model, None, str)

    def missing(self) -> str:
        """Names of the tensors without values; "" from when all have some."""
        self._waiting = [slot for slot in self._waiting if slot.is_blank()]
        return _shown(self._waiting)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Context in which an exception puts the tensors of the meta device back."""
        try:
            yield
        except BaseException:
            for slot in self._slots:
                setattr(slot.module, slot.own, slot.meta)
            raise

    def _replace(
        self,
        top: nn.Module,
        device: torch.device | None,
        name_of: Callable[[str], str],
    ) -> list[_Slot]:
        """Replaces tensors of the meta device; with None only those known here."""
        found: list[_Slot] = []
        for path, module in top.named_modules():
            for own, one in [*_tensors(module)]:
                if not one.is_meta or (device is None and id(one) not in self._made):
                    continue
                if id(one) not in self._made:
                    self._made[id(one)] = _blank_like(one, device)
                made, name = self._made[id(one)], f"{path}.{own}".lstrip(".")
                found.append(_Slot(name_of(name), module, own, one, made))
                setattr(module, own, made)
        self._slots += found
        return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers."""
    for held in (held_parameters(module), held_buffers(module)):
        yield from ((name, one) for name, one in held.items() if one is not None)


def _blank_like(one: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    made = torch.empty_like(one, device=device, requires_grad=False)
    if one.dtype is torch.bool:
        made.fill_(True)
    elif one.is_floating_point() or one.is_complex():
        made.fill_(math.nan)
    else:
        made.fill_(torch.iinfo(one.dtype).max)
    is_parameter = isinstance(one, nn.Parameter)
    return nn.Parameter(made, one.requires_grad) if is_parameter else made


def _reset(module: nn.Module, layer: str, has_tensors: bool) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif has_tensors:
        raise ConfigError(
            f"layer {layer} was built on the meta device, and {type(module).__name__} "
            "in it has no reset_parameters; give init= to initialise layers, or "
            'init="load" and then the weights, by load or load_state_dict'
        )


def _shown(slots: list[_Slot]) -> str:
    return few(list(dict.fromkeys(slot.name for slot in slots)))
