"""Choice of the uncut submodules and of the cuts between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

from torch import nn

from elche.errors import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CHAINS = (*_LISTS, nn.Sequential)

SplitPoints = Sequence[str] | Mapping[str, Any]


@final
@dataclass(frozen=True)
class CutChoice:
    """Places at which a model may be cut.

    Attributes:
        whole: names of uncut submodules; the code between them is traced.
        before: submodules before whose calls a layer begins.
        after: submodules after whose calls a layer begins.
        merges: whether layers without parameters join their neighbours.
    """

    whole: tuple[str, ...]
    before: frozenset[str]
    after: frozenset[str]
    merges: bool = False


def at_points(model: nn.Module, points: SplitPoints) -> CutChoice:
    """Cuts at the user's split points.

    Args:
        model: model to cut.
        points: names of submodules before which to cut; or a dict from names to torch's
            ``SplitPoint.BEGINNING`` or ``SplitPoint.END``.
    """
    if isinstance(points, str):
        raise ConfigError(
            f"expected a list of names as split_points, got {points!r}; write "
            f"split_points=[{points!r}]"
        )
    given = points if isinstance(points, Mapping) else dict.fromkeys(points)
    modules = dict(model.named_modules())
    ends: dict[str, str] = {}
    for name, point in given.items():
        if name not in modules or not name or isinstance(modules[name], _LISTS):
            called = [n for n, one in modules.items() if not isinstance(one, _LISTS)]
            near = [one for one in called if one.startswith(f"{name}.")]
            near = near or get_close_matches(str(name), called, n=6)
            shown = ", ".join((near or called[1:])[:6])
            raise ConfigError(
                "expected names of submodules that forward calls as split_points, got "
                f"{name!r}; the model has {shown}, ..."
            )
        ends[name] = "BEGINNING" if point is None else getattr(point, "name", "")
        if ends[name] not in ("BEGINNING", "END"):
            raise ConfigError(
                f"expected SplitPoint.BEGINNING or SplitPoint.END for {name!r}, got "
                f"{point!r}"
            )

    def opens(name: str) -> bool:
        return any(one.startswith(f"{name}.") for one in ends)

    return CutChoice(
        whole=tuple(_whole(model, opens)),
        before=frozenset(n for n, end in ends.items() if end == "BEGINNING"),
        after=frozenset(n for n, end in ends.items() if end == "END"),
    )


def at_blocks(model: nn.Module) -> CutChoice:
    """Cuts around the members of the model's chains of blocks.

    Chains are the outermost ModuleLists and Sequentials, and those directly inside
    them. A model without chains may be cut between any of its children.
    """
    modules = dict(model.named_modules())
    chains = [name for name, one in modules.items() if isinstance(one, _CHAINS)]

    def opens(name: str) -> bool:
        is_inside = any(one and name.startswith(f"{one}.") for one in chains)
        has_chain = any(one.startswith(f"{name}.") for one in chains)
        return name in chains or (has_chain and not is_inside)

    whole = tuple(_whole(model, opens))
    parents = {n: model.get_submodule(n.rpartition(".")[0]) for n in whole}
    members = frozenset(n for n in whole if isinstance(parents[n], _CHAINS))
    if members:
        return CutChoice(whole, members, members, merges=True)
    members = frozenset(n for n in whole if has_parameters(model.get_submodule(n)))
    return CutChoice(whole, members, frozenset(), merges=True)


def has_parameters(module: nn.Module) -> bool:
    """True if a module has any parameters."""
    return next(module.parameters(), None) is not None


def _whole(
    module: nn.Module, opens: Callable[[str], bool], prefix: str = ""
) -> Iterator[str]:
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        if isinstance(child, _LISTS) or opens(name):
            yield from _whole(child, opens, f"{name}.")
        else:
            yield name
