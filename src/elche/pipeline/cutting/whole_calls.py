"""Calls of modules while a model is traced; an uncut module becomes one node.

Of several equal calls only one is run. Calls are equal if their modules have equal
classes, attributes, modes and sizes of parameters, and their inputs equal sizes and
plain values. An attribute such as `layer_idx` may differ if it is the module's index in
its list, and forward does not read it.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)

from elche.errors import ConfigError
from elche.pipeline.cutting.stand_ins import StandIns
from elche.torch_internals.batches import tree_leaves, tree_map
from elche.torch_internals.held import version

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout)
_PLACE = re.compile(r"(idx|index|layer_id|layer_number)$")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def call_whole(name: str, args: Any, keywords: Any) -> NoReturn:
    """Placeholder in a trace for the call of a submodule; replaced before it runs."""
    raise RuntimeError(f"the call of {name} was not put into a layer")


@final
class ModuleCalls:
    """Intercepts calls of modules while a model is traced.

    Args:
        model: model to trace.
        whole: names of uncut submodules, by id.
        stand_ins: fake tensors of the model.

    Attributes:
        inside: innermost module that was running when an error occurred.
    """

    def __init__(
        self, model: nn.Module, whole: Mapping[int, str], stand_ins: StandIns
    ) -> None:
        self._whole = whole
        self._stand_ins = stand_ins
        self._results: dict[Any, tuple[Any, list[str], Any]] = {}
        self._names = {id(one): name for name, one in model.named_modules()}
        # Some classes override `__call__` itself, for activation checkpointing.
        self._owners = {
            owner
            for one in (model, *model.modules())
            for owner in type(one).__mro__
            if issubclass(owner, nn.Module) and "__call__" in owner.__dict__
        }
        self._opaque = 0
        self.inside = type(model).__name__

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Intercepts the calls of all modules in this context, as torch.fx does."""
        calls = {owner: owner.__dict__["__call__"] for owner in self._owners}
        for owner, call in calls.items():
            setattr(owner, "__call__", self._hook(call))  # noqa: B010
        try:
            yield
        finally:
            for owner, call in calls.items():
                setattr(owner, "__call__", call)  # noqa: B010

    def _hook(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **keywords: Any) -> Any:
            if self._opaque or id(module) not in self._names:
                return call(module, *args, **keywords)
            name, kind, outer = self._names[id(module)], type(module), self.inside
            self.inside = f"{name} ({kind.__name__})" if name else kind.__name__
            if id(module) in self._whole:
                found = self._record(module, args, keywords)
            else:
                found = call(module, *args, **keywords)
            self.inside = outer
            return found

        return called

    def _record(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "only while tracing"
        tracer: Any = mode.tracer
        given = self._proxies((args, keywords), tracer)
        name = self._whole[id(module)]
        self._opaque += 1
        with disable_proxy_modes_tracing():
            found = self._result(name, module, args, keywords)
        self._opaque -= 1
        node = tracer.create_proxy("call_function", call_whole, (name, *given), {})
        if isinstance(found, torch.Tensor):
            track_tensor_tree(found, node, constant=None, tracer=tracer)
            return found
        leaves = tracer.create_proxy("call_function", tree_leaves, (node,), {})
        for index, one in enumerate(tree_leaves(found)):
            if isinstance(one, torch.Tensor):
                each = (leaves, index)
                proxy = tracer.create_proxy("call_function", operator.getitem, each, {})
                track_tensor_tree(one, proxy, constant=None, tracer=tracer)
        return found

    def _result(
        self, name: str, module: nn.Module, args: tuple[Any, ...], keywords: Any
    ) -> Any:
        """Output of a call, made of fake tensors."""
        places = _places(name, module)
        key = _likeness(module, places), _form((args, keywords))
        if key in self._results:
            found, changed, _ = self._results[key]
            for buffer in changed:
                module.get_buffer(buffer).zero_()  # marks it as changed
        else:
            before = {own: version(one) for own, one in module.named_buffers()}
            with _reads_noted(places) as reads:
                found = self._run(module, args, keywords)
            after = module.named_buffers()
            changed = [own for own, one in after if version(one) != before.get(own)]
            # Caches read the index; generation checks them, see `CutVariants.proven`.
            given = tree_leaves((args, keywords))
            if not reads or any(hasattr(one, "traced_as") for one in given):
                # The arguments are kept because the key has ids of objects in them.
                self._results[key] = found, changed, (args, keywords)
        return tree_map(
            lambda one: one.clone() if isinstance(one, torch.Tensor) else one, found
        )

    def _run(self, module: nn.Module, args: tuple[Any, ...], keywords: Any) -> Any:
        unbacked = self._stand_ins.mode.shape_env.pending_fresh_unbacked_symbols
        known = len(unbacked)
        try:
            return module(*args, **keywords)
        except Exception as error:
            try:
                return self._stand_ins.computed(module, args, keywords)
            except Exception:
                raise error from None
        finally:
            del unbacked[known:]  # sizes used only inside the module

    def _proxies(self, value: Any, tracer: Any) -> Any:
        """Replaces tensors in a call's arguments by the trace's proxies."""
        if hasattr(value, "traced_as"):
            return value.traced_as
        if isinstance(value, (torch.Tensor, *_SYMBOLS)):
            return tracer.unwrap_proxy(value)
        if type(value) in (tuple, list):
            return type(value)(self._proxies(one, tracer) for one in value)
        if type(value) is dict:
            return {key: self._proxies(one, tracer) for key, one in value.items()}
        if isinstance(value, _PLAIN):
            return value
        raise ConfigError(
            f"{self.inside} is given a {type(value).__name__}, which layers cannot "
            "exchange; disable it by an argument of the model, such as "
            'sample={"input_ids": ..., "use_cache": False}, or cut by hand with '
            "split=lambda model: [...]"
        )


def _places(name: str, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Attributes of a module and its submodules that equal its index in its list."""
    place = name.rpartition(".")[2]
    return [
        (one, key)
        for one in module.modules()
        for key, value in vars(one).items()
        if _PLACE.search(key) and str(value) == place and not hasattr(type(one), key)
    ]


@contextmanager
def _reads_noted(places: Sequence[tuple[nn.Module, str]]) -> Iterator[list[str]]:
    """Yields a list to which each read of these attributes is added."""
    slots, reads = {(type(one), key) for one, key in places}, list[str]()

    def reading(key: str) -> property:
        def read(module: nn.Module) -> Any:
            reads.append(key)
            return vars(module)[key]

        return property(read)

    for owner, key in slots:
        setattr(owner, key, reading(key))
    try:
        yield reads
    finally:
        for owner, key in slots:
            delattr(owner, key)


def _likeness(module: nn.Module, places: Sequence[tuple[nn.Module, str]]) -> Any:
    left_out = {(id(one), key) for one, key in places}

    def attributes(one: nn.Module) -> Iterator[Any]:
        for key, value in vars(one).items():
            if key != "_modules" and (id(one), key) not in left_out:
                yield key, _form(value)

    return tuple(
        (own, type(one), *attributes(one))
        for own, one in module.named_modules(remove_duplicate=False)
    )


def _form(value: Any) -> Any:
    """Hashable form of a value; equal forms mean equal values for a trace."""
    if isinstance(value, torch.Tensor):
        sizes = *value.shape, None, *value.stride()
        kind = type(value), value.dtype, value.device, value.requires_grad
        return *kind, *map(str, sizes)
    if isinstance(value, _SYMBOLS):
        return str(value)
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return type(value), tuple(map(_form, value))
    if type(value) is set:
        return frozenset(map(_form, value))
    if type(value) in (dict, OrderedDict):
        return tuple((key, _form(one)) for key, one in value.items())
    return id(value)
