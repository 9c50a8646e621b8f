"""Choice of the uncut submodules, and of the cuts between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        points: names of submodules before which to cut; or by name
            ``SplitPoint.BEGINNING`` or ``SplitPoint.END`` of torch's pipelining.

    Raises:
        ConfigError: there is no such module, or forward does not call it.
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

    def opened(name: str) -> bool:
        return any(one.startswith(f"{name}.") for one in ends)

    return CutChoice(
        whole=tuple(_whole(model, "", opened)),
        before=frozenset(n for n, end in ends.items() if end == "BEGINNING"),
        after=frozenset(n for n, end in ends.items() if end == "END"),
    )


def at_blocks(model: nn.Module) -> CutChoice:
    """Cuts around the members of the model's chains of blocks.

    Chains are its outermost ModuleLists and Sequentials, and those directly in them. A
    model without chains may be cut between any of its children.
    """
    chains = {
        name: one for name, one in model.named_modules() if isinstance(one, _CHAINS)
    }
    opened = {
        name
        for name, one in model.named_modules()
        if not isinstance(one, _CHAINS)
        and any(chain.startswith(f"{name}.") for chain in chains)
        and not _is_inside(name, chains)
    }
    whole = tuple(_whole(model, "", lambda name: name in opened or name in chains))
    members = frozenset(
        name for name in whole if isinstance(_parent(model, name), _CHAINS)
    )
    if not members:
        members = frozenset(
            name for name in whole if has_parameters(model.get_submodule(name))
        )
        return CutChoice(whole, members, frozenset(), merges=True)
    return CutChoice(whole, members, members, merges=True)


def has_parameters(module: nn.Module) -> bool:
    """True if a module has any parameters."""
    return next(module.parameters(), None) is not None


def _whole(module: nn.Module, prefix: str, opened: Any) -> Iterator[str]:
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        if isinstance(child, _LISTS) or opened(name):
            yield from _whole(child, f"{name}.", opened)
        else:
            yield name


def _is_inside(name: str, chains: Mapping[str, nn.Module]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in chains for end in range(1, len(parts)))


def _parent(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])
