"""Results of uncut modules in a trace: sizes and types without values.

Blocks that repeat run once. Two calls are alike if the modules' classes, attributes,
modes and sizes of parameters are, and the sizes and plain values of their inputs. An
attribute may be the block's own place in its list, such as `layer_idx`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.cutting.stand_ins import StandIns
from elche.torch_internals.batches import tree_map
from elche.torch_internals.held import version

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@final
@dataclass(frozen=True)
class _Result:
    """Result of a call.

    Attributes:
        place: the module's place in its list.
        numbers: integers among the attributes.
        value: output, with fake tensors.
        changed: names of buffers that the call changed.
        arguments: arguments of the call; the key has ids of objects in them.
    """

    place: int | None
    numbers: tuple[int, ...]
    value: Any
    changed: list[str]
    arguments: Any

    def fits(self, place: int | None, numbers: tuple[int, ...]) -> bool:
        places = self.place, place
        pairs = zip(self.numbers, numbers, strict=True)
        return all(one == other or (one, other) == places for one, other in pairs)


@final
class WholeResults:
    """Results of the calls of uncut modules.

    Args:
        stand_ins: fake tensors of the model.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._known: dict[Any, list[_Result]] = {}

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
        last = name.rpartition(".")[2]
        place = int(last) if last.isdecimal() else None
        form, numbers = _likeness(module)
        known = self._known.setdefault((form, _form((args, keywords))), [])
        found = next((one for one in known if one.fits(place, numbers)), None)
        if found is None:
            before = {own: version(one) for own, one in module.named_buffers()}
            value = self._run(module, args, keywords)
            after = module.named_buffers()
            changed = [own for own, one in after if version(one) != before.get(own)]
            found = _Result(place, numbers, value, changed, (args, keywords))
            known.append(found)
        else:
            for buffer in found.changed:
                module.get_buffer(buffer).zero_()
        return tree_map(
            lambda one: one.clone() if isinstance(one, torch.Tensor) else one,
            found.value,
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


def _likeness(module: nn.Module) -> tuple[Any, tuple[int, ...]]:
    """Attributes in a hashable form, and the integers among them."""
    forms: list[Any] = []
    numbers: dict[tuple[str, str], int] = {}
    for own, one in module.named_modules(remove_duplicate=False):
        rest = {**vars(one), "_modules": None}
        for name in [name for name, value in rest.items() if type(value) is int]:
            numbers[own, name] = rest.pop(name)
        forms.append((own, type(one), _form(rest)))
    return (*forms, *numbers), tuple(numbers.values())


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
