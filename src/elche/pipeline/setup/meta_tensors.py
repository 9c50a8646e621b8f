"""Values of the tensors that a model has on the meta device.

New tensors are blank (NaN, or the largest integer). An error names a tensor that is
still blank because nothing has computed or loaded it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias, final

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


class _Slot(NamedTuple):
    """A tensor's place in a module, its name in the model, and its former value."""

    module: nn.Module
    own: str
    name: str
    meta: torch.Tensor

    @property
    def is_saved(self) -> bool:
        return self.own not in unsaved_buffers(self.module)


@final
class MetaTensors:
    """Tensors of this rank that replace tensors on the meta device.

    Args:
        init: see `elche.pipeline.pipeline_config.PipelineConfig`.
    """

    def __init__(self, init: Init = None) -> None:
        self._init = init
        self._slots: list[_Slot] = []
        self._made: dict[int, torch.Tensor] = {}
        self._blank: list[_Slot] = []

    def fill(
        self, layer: Layer, device: torch.device, owners: Mapping[int, Any]
    ) -> None:
        """Makes and initialises a layer's tensors; existing values are kept.

        Raises:
            ConfigError: a module has no initialisation, or nothing has computed a
                non-persistent buffer.
        """
        init, slots = self._init, self._replace(layer, device)
        made = {id(one) for one in self._made.values()}
        held = (*layer.module.parameters(), *layer.module.buffers()) if slots else ()
        kept = [(one, one.detach().clone()) for one in held if id(one) not in made]
        for module in reversed([*layer.module.modules()]) if slots else ():
            mine = [one for one in slots if one.module is module]
            if init is None or not all(one.is_saved for one in mine):
                must = init is None and bool(mine)
                _initialise(module, owners.get(id(module)), layer.name, must)
        with torch.no_grad():
            for one, value in kept:
                one.copy_(value)
        if callable(init) and slots:
            init(layer.module)
        blank = [one for one in slots if self._is_blank(one)]
        lacking = [one for one in blank if init is None or not one.is_saved]
        if lacking:
            raise ConfigError(_why(lacking))
        self._blank += blank

    def trouble(self) -> str:
        """Error text for tensors that still have no values; "" if there are none."""
        self._blank = [one for one in self._blank if self._is_blank(one)]
        return _why(self._blank) if self._blank else ""

    def adopt(self, model: nn.Module) -> None:
        """Puts the layers' new tensors into the model itself."""
        self._replace(Layer("", model), None)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Context in which an exception restores the tensors on the meta device."""
        try:
            yield
        except BaseException:
            for module, own, _, meta in self._slots:
                setattr(module, own, meta)
            raise

    def _replace(self, layer: Layer, device: torch.device | None) -> list[_Slot]:
        """Replaces tensors on the meta device; without a device only known ones."""
        found: list[_Slot] = []
        for path, module in layer.module.named_modules():
            held = {**held_parameters(module), **held_buffers(module)}
            for own, one in held.items():
                if one is None or not one.is_meta:
                    continue
                if id(one) not in self._made and device is not None:
                    made = torch.empty_like(one, device=device, requires_grad=False)
                    made.fill_(_blank_value(one.dtype))
                    if isinstance(one, nn.Parameter):
                        made = nn.Parameter(made, one.requires_grad)
                    self._made[id(one)] = made
                if id(one) in self._made:
                    name = layer.prefixed(f"{path}.{own}" if path else own)
                    found.append(_Slot(module, own, name, one))
                    setattr(module, own, self._made[id(one)])
        self._slots += found
        return found

    def _is_blank(self, slot: _Slot) -> bool:
        """True if a tensor was neither replaced nor written to."""
        held = getattr(slot.module, slot.own)
        was_written = held is not self._made[id(slot.meta)] or version(held) > 1
        if was_written or not held.numel():
            return False
        now: torch.Tensor = held.detach()  # its `.data` may have been written to
        return bool(((now != now) | (now == _blank_value(now.dtype))).all())


def _blank_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return dtype is torch.bool or torch.iinfo(dtype).max


def _why(slots: Sequence[_Slot]) -> str:
    return (
        "the model was built on the meta device, and nothing has computed or loaded "
        f"{few([one.name for one in slots])} since: load the weights (Pipeline.load, "
        "load_state_dict); write to buffers that no state_dict has in the module's "
        "reset_parameters, or in init="
    )


def _initialise(module: nn.Module, owner: Any, layer: str, must: bool) -> None:
    reset = getattr(module, "reset_parameters", None)
    if owner is not None:
        with torch.no_grad():
            owner._init_weights(module)
    elif callable(reset):
        reset()
    elif must:
        raise ConfigError(
            f"layer {layer} was built on the meta device, and {type(module).__name__} "
            "in it has no reset_parameters; give init= to initialise layers, or "
            'init="load" and then the weights, by load or load_state_dict'
        )
