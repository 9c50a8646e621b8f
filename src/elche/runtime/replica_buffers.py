"""Buffers of a model that others copy: which have changed, and how copies follow."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from elche.torch_internals import held_buffers, unsaved_buffers


@dataclass(frozen=True, slots=True)
class _Held:
    """A buffer as it was: the same object, in the same form."""

    buffer: weakref.ref[torch.Tensor]
    form: tuple[torch.Size, torch.dtype]

    @staticmethod
    def of(buffer: torch.Tensor) -> _Held:
        return _Held(weakref.ref(buffer), (buffer.shape, buffer.dtype))

    def still_is(self, buffer: torch.Tensor) -> bool:
        return self.buffer() is buffer and self.form == (buffer.shape, buffer.dtype)


@final
class FollowedBuffers:
    """Lets copies take over buffers that a model has made anew, and no others.

    A forward pass may register or replace a buffer at every step (a cache that grows);
    copying all of the model for that would cost more than the step.

    Args:
        model: what is copied; the copies hold the same now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held = self._present()

    @torch.no_grad()
    def follow(self, copies: Sequence[nn.Module]) -> None:
        """Hands on what was replaced, added or taken away since the last call."""
        now = dict(self._model.named_buffers(remove_duplicate=False))
        changed = {
            name: buffer
            for name, buffer in now.items()
            if name not in self._held or not self._held[name].still_is(buffer)
        }
        gone = self._held.keys() - now.keys()
        if not changed and not gone:
            return
        place = _place(self._model)
        for name, buffer in changed.items():
            if buffer.device != place:
                owner, leaf = _owner(self._model, name)
                held_buffers(owner)[leaf] = buffer.to(place)
        for copy in copies:
            self._hand_on(copy, changed)
            self._take_away(copy, gone)
        self._held = self._present()

    def _hand_on(self, copy: nn.Module, changed: dict[str, torch.Tensor]) -> None:
        place = _place(copy)
        made: dict[int, torch.Tensor] = {}  # one that has two names keeps both
        for name, buffer in changed.items():
            if id(buffer) not in made:
                made[id(buffer)] = buffer.detach().to(place, copy=True)
            source, leaf = _owner(self._model, name)
            target, _ = _owner(copy, name)
            held_buffers(target).pop(leaf, None)
            target.__dict__.pop(leaf, None)  # a plain value before
            keeps = leaf not in unsaved_buffers(source)
            target.register_buffer(leaf, made[id(buffer)], persistent=keeps)

    def _take_away(self, copy: nn.Module, gone: Iterable[str]) -> None:
        for name in gone:
            source, leaf = _owner(self._model, name)
            target, _ = _owner(copy, name)
            if leaf in held_buffers(source):
                held_buffers(target)[leaf] = None
            else:
                held_buffers(target).pop(leaf, None)

    def _present(self) -> dict[str, _Held]:
        named = self._model.named_buffers(remove_duplicate=False)
        return {name: _Held.of(buffer) for name, buffer in named}


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a buffer is registered with, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _place(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
