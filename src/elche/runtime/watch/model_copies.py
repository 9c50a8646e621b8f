"""Copies of the model that a loop keeps (EMA, SWA): equal on all ranks in windows."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elche.comm.tensors.equal_tensors import average
from elche.comm.transport.process_group import Group
from elche.coordination.accounts.copy_updates import DueUpdates
from elche.errors import ConfigError
from elche.torch_internals.held import version

AVERAGING = "averaging copies of the model"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Averaged:
    """One `AveragedModel`, and the module that it is an average of.

    ``samples`` counts the samples of this window's batches whose loop body updated it;
    ``is_called`` is True if any batch of this epoch did.
    """

    copy: weakref.ref[AveragedModel]
    source: nn.Module
    samples: int = 0
    is_called: bool = False
    due: DueUpdates = field(default_factory=DueUpdates)


@final
class ModelCopies:
    """Keeps the loop's copies of the model equal on all ranks.

    Calls of ``update_parameters`` of torch's `AveragedModel` with the model, or a part
    of it, are deferred. At a commit the method is called once per committed global
    batch, with the common model. That is the user's own rule, so an EMA of decay d
    moves by 1 - d^k in k batches. Outside of windows, and between epochs, calls pass
    through. Any other copy becomes its mean over the ranks that trained, at every
    epoch's end.

    Args:
        model: trained model.
        copies: copies passed to `elche.setup`.

    Attributes:
        is_in_steps: the loop is in an epoch of ``sync``, where updates pass through.
        has_unknown: a copy that the user has not given was updated in them.
    """

    def __init__(self, model: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._model = model
        self._made: CopiesMade | None = None
        self._held = {id(parameter) for parameter in model.parameters()}
        self._averaged = [
            _Averaged(weakref.ref(copy), model)
            for copy in copies
            if isinstance(copy, AveragedModel)
        ]
        self._others = [c for c in copies if not isinstance(c, AveragedModel)]
        self._current = 0
        self._epoch = 1, 1
        self._updated: set[int] = set()
        self._known_ids = {id(copy) for copy in copies}
        self._has_warned = False
        self.is_in_steps = self.has_unknown = False
        self._original: Callable[[AveragedModel, Any], None] | None = None

    def attach(self) -> None:
        """Starts intercepting updates, unless it has started."""
        if self._original is not None:
            return
        original = self._original = AveragedModel.update_parameters
        me = weakref.WeakMethod(self._puts_off)

        @functools.wraps(original)
        def update_parameters(copy: AveragedModel, model: nn.Module) -> None:
            puts_off = me()
            if puts_off is None or not puts_off(copy, model):
                original(copy, model)

        setattr(AveragedModel, "update_parameters", update_parameters)  # noqa: B010

    def detach(self) -> None:
        """Stops intercepting updates."""
        if self._original is not None:
            setattr(AveragedModel, "update_parameters", self._original)  # noqa: B010
            self._original = None

    def begin_epoch(self, batches: int, samples: int) -> None:
        """Begins windows, in which one device would take ``batches`` steps.

        Args:
            batches: global batches, to the end of the epoch.
            samples: samples of these batches.
        """
        if self._made is None:
            self._made = CopiesMade(self._model, [*self._others])
        self._epoch = batches, max(1, samples)
        self._updated.clear()
        for each in self._averaged:
            each.is_called = False

    def state_dict(self) -> list[list[int]]:
        """Fraction of an update that is pending for each known copy."""
        return [each.due.state_dict() for each in self._averaged]

    def load_state_dict(self, state: Sequence[Sequence[int]]) -> None:
        """Restores :meth:`state_dict` for the copies that the user has given."""
        for each, due in zip(self._averaged, state, strict=False):
            each.due.load_state_dict(due)

    def begin_batch(self, samples: int) -> None:
        """Records the samples of the current batch of a window; 0: there is none."""
        self._current = samples

    def closed(self, *, is_finite: bool) -> tuple[int, ...]:
        """Ends this rank's window; returns the samples that updated each copy."""
        samples = tuple(each.samples for each in self._averaged)
        for each in self._averaged:
            each.samples = 0
        return samples if is_finite else (0,) * len(samples)

    @torch.no_grad()
    def committed(
        self, samples: Sequence[int], common: Callable[[], Mapping[int, torch.Tensor]]
    ) -> None:
        """Updates copies as often as is due, after a commit.

        Args:
            samples: committed samples by which each copy is behind.
            common: returns tensors of the common model, by the ids of the model's
                tensors that have moved on.
        """
        due = [
            (each, each.due.take(more, *self._epoch))
            for each, more in zip(self._averaged, samples, strict=False)
        ]
        self._updated.update(i for i, more in enumerate(samples) if more)
        if not any(count for _, count in due):
            return
        held, update = common(), self._original
        assert update is not None
        for each, count in due:
            copy = each.copy()
            if copy is not None and count:
                source = _held_in_common(each.source, held)
                for _ in range(count):
                    update(copy, source)

    @torch.no_grad()
    def end_epoch(self, group: Group, *, has_trained: bool) -> None:
        """Averages other copies, with all ranks.

        Args:
            group: group of all ranks.
            has_trained: this rank has trained in the epoch.
        """
        self._warn_of_missing(has_trained)
        if self._made is not None and self._made.take_written() and group.rank == 0:
            logger.warning(
                "the loop writes a copy of the model (an EMA, say) that elche does not "
                "know: in windows each rank has its own model, so the copies differ "
                "between ranks; pass it to elche.setup(..., copies=[...]), or use "
                "torch.optim.swa_utils.AveragedModel, which follows the run"
            )
        for copy in self._others:
            for tensor in (*copy.parameters(), *copy.buffers()):  # one may be large
                average(group, [tensor], AVERAGING, counts=has_trained)

    def _warn_of_missing(self, has_trained: bool) -> None:
        """Warns once where only other ranks have updated a copy in this epoch."""
        known = self._averaged
        is_missing = any(
            at >= len(known) or (has_trained and not known[at].is_called)
            for at in self._updated
        )
        if is_missing and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "other ranks have updated an AveragedModel in this epoch, and this "
                "one has not: updates follow only the batches of ranks whose loops "
                "call update_parameters, so call it on every rank; if policy 'auto' "
                "may exclude a rank, pass the copy to elche.setup(..., copies=[...])"
            )

    def _puts_off(self, copy: AveragedModel, model: nn.Module) -> bool:
        """Defers an update of a copy; returns False if it is to be made now."""
        if not self._current:
            is_known = id(copy) in self._known_ids
            self.has_unknown |= self.is_in_steps and not is_known
            return False
        known = next((e for e in self._averaged if e.copy() is copy), None)
        if known is None:
            if self._held.isdisjoint(map(id, model.parameters())):
                return False
            known = _Averaged(weakref.ref(copy), model)
            self._averaged.append(known)
        known.source = model
        known.samples += self._current
        known.is_called = True
        return True


def _held_in_common(module: nn.Module, common: Mapping[int, torch.Tensor]) -> Any:
    """A module's tensors as all ranks hold them, for ``update_parameters``."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        found = common.get(id(tensor), tensor)
        return found.to(tensor.device, tensor.dtype)

    return SimpleNamespace(
        parameters=lambda: map(held, module.parameters()),
        buffers=lambda: map(held, module.buffers()),
    )


def check_copies(copies: Sequence[nn.Module], model: nn.Module) -> None:
    """Refuses modules that are no copies of the model.

    Raises:
        ConfigError: names it.
    """
    held = {id(parameter) for parameter in model.parameters()}
    shapes = [parameter.shape for parameter in model.parameters()]
    for copy in copies:
        if not isinstance(copy, nn.Module):
            raise ConfigError(f"expected copies= to hold modules, got {copy!r}")
        own = list(copy.parameters())
        if not held.isdisjoint(map(id, own)):
            raise ConfigError(
                f"copies= holds a {type(copy).__name__} that shares parameters with "
                "the model; expected copies with tensors of their own"
            )
        if isinstance(copy, AveragedModel) and [p.shape for p in own] != shapes:
            raise ConfigError(
                "copies= holds an AveragedModel of another module than the model; "
                "leave it out: it is recognised when it is updated"
            )


@final
class CopiesMade:
    """Copies of a model's parameters in a module, dict or list of the script.

    Views are excluded: elche keeps averages in views of one tensor.

    Args:
        model: trained model; copies are equal to it now.
        known: copies that the user has given; an AveragedModel is known anyway.
    """

    def __init__(self, model: nn.Module, known: Sequence[nn.Module]) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        parameters = [*model.parameters()]
        modules = (model, *known, *instances(AveragedModel))
        owned = [parameter for each in modules for parameter in each.parameters()]
        ids = {id(each) for each in owned}
        self._versions = [
            (weakref.ref(tensor), version(tensor))
            for holder in instances((type(model), dict, list))
            for tensor in self._copied(holder, parameters, ids)
        ]

    def take_written(self) -> bool:
        """True once, when one of them has been written in place since."""
        held = ((ref(), before) for ref, before in self._versions)
        is_written = any(t is not None and version(t) != before for t, before in held)
        if is_written:
            self._versions.clear()
        return is_written

    def _copied(
        self, holder: Any, parameters: list[nn.Parameter], owned: set[int]
    ) -> list[torch.Tensor]:
        if isinstance(holder, nn.Module):
            is_made = "_parameters" in vars(holder)
            values: list[Any] = [*holder.parameters()] if is_made else []
        elif isinstance(holder, dict):  # a subclass may mean something else by get()
            is_like = len(holder) >= len(self._names) and dict.__contains__(
                holder, self._names[0]
            )
            values = [dict.get(holder, n) for n in self._names] if is_like else []
        else:
            values = list.copy(holder)  # other threads may append
        is_copy = len(values) == len(parameters) > 0 and all(
            _is_copy(value, parameter) and id(value) not in owned
            for value, parameter in zip(values, parameters, strict=True)
        )
        return [*values] if is_copy else []


def _is_copy(value: Any, parameter: torch.Tensor) -> bool:
    return (
        type(value) in (torch.Tensor, nn.Parameter)  # not fake, not wrapped
        and value.layout is torch.strided
        and not (value.is_meta or value.is_inference())
        and value.shape == parameter.shape
        and value.untyped_storage().nbytes() == value.nbytes
        and torch.equal(value.detach(), parameter.detach().to(value))
    )


def instances(kind: type | tuple[type, ...]) -> Iterator[Any]:
    """Objects of a kind that Python's garbage collector tracks.

    Compares types: reading ``__class__`` of a lazy module would import it.
    """
    return (each for each in gc.get_objects() if issubclass(type(each), kind))
