"""Results of uncut modules in a trace: sizes and types without values.

Blocks that repeat run once. Two calls are alike if the modules' classes, attributes,
modes and sizes of parameters are, and the sizes and plain values of their inputs. Only
an attribute like `layer_idx` may differ, if it is the block's place in its list.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.cutting.stand_ins import StandIns
from elche.torch_internals.batches import tree_map
from elche.torch_internals.held import version

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_PLACE = re.compile(r"(idx|index|layer_id|layer_number)$")


@final
class WholeResults:
    """Results of the calls of uncut modules.

    Args:
        stand_ins: fake tensors of the model.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._known: dict[Any, tuple[Any, list[str], Any]] = {}

    def of(
        self, name: str, module: nn.Module, args: tuple[Any, ...], keywords: Any
    ) -> Any:
        """Returns the result of a call, with fake tensors.

        Args:
            name: name of the module in the model.
            module: the module, with fake parameters.
            args: its positional arguments.
            keywords: its keyword arguments.
        """
        key = _likeness(name, module), _form((args, keywords))
        if key in self._known:
            for buffer in self._known[key][1]:
                module.get_buffer(buffer).zero_()
        else:
            before = {own: version(one) for own, one in module.named_buffers()}
            found = self._run(module, args, keywords)
            after = module.named_buffers()
            changed = [own for own, one in after if version(one) != before.get(own)]
            # The arguments are kept because the key has ids of objects in them.
            self._known[key] = found, changed, (args, keywords)
        return tree_map(
            lambda one: one.clone() if isinstance(one, torch.Tensor) else one,
            self._known[key][0],
        )

    def _run(self, module: nn.Module, args: tuple[Any, ...], keywords: Any) -> Any:
        unbacked = self._stand_ins.mode.shape_env.pending_fresh_unbacked_symbols
        known = len(unbacked)
        try:
            return module(*args, **keywords)
        except Exception as error:
            try:
                return self._stand_ins.computed(module, args, keywords)
            except ConfigError:
                raise
            except Exception:
                raise error from None
        finally:
            del unbacked[known:]  # sizes that are the module's own affair


def _likeness(name: str, module: nn.Module) -> Any:
    place = name.rpartition(".")[2]

    def attributes(one: nn.Module) -> Iterator[Any]:
        for key, value in vars(one).items():
            if key != "_modules" and not (_PLACE.search(key) and str(value) == place):
                yield key, _form(value)

    return tuple(
        (own, type(one), *attributes(one))
        for own, one in module.named_modules(remove_duplicate=False)
    )


def _form(value: Any) -> Any:
    """A hashable value, equal for values that are alike."""
    if isinstance(value, torch.Tensor):
        sizes = *value.shape, None, *value.stride()
        kind = type(value), value.dtype, value.device, value.requires_grad
        return *kind, *map(str, sizes)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
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
