"""State of a pipeline under the model's names: model, optimizers and loop.

`CheckpointKeeper` treats it as a run (`elche.checkpoint.contents`).
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

import torch

from elche.comm.transport.messages import Message
from elche.errors import ConfigError, MismatchError
from elche.pipeline.checkpoints.named_states import (
    NamedState,
    check_alike,
    describe,
    few,
    join_states,
    load_named_state,
    named_state,
    only_optimizer,
)
from elche.pipeline.step.stepping import Stepping
from elche.pipeline.trees import flatten, unflatten
from elche.runtime.report.notifications import RunNotifications


@final
class PipelineState:
    """State of an open pipeline on one rank, for saving and loading.

    Args:
        stepping: this rank's layers and step counter.

    Attributes:
        stepping: the argument.
        communicator: connections to all ranks.
        timeout_s: deadline (s) of each message.
        passes: this rank's passes over the loader.
        optimizers: registered optimizers.
        notifications: messages for the user.
    """

    def __init__(self, stepping: Stepping) -> None:
        self.stepping, self.communicator = stepping, stepping.communicator
        self.timeout_s, self.passes = stepping.config.timeout_s, stepping.passes
        self._on_close: Callable[[bool], None] | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.notifications = RunNotifications(self.rank)
        self.notifications.emit = lambda line: print(line, file=sys.stderr, flush=True)
        _open.append(weakref.ref(self))

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return sum(map(len, self.stepping.groups.ranks))

    @staticmethod
    def only_open() -> PipelineState | None:
        """State of the only open pipeline of this process, or None."""
        found = [state for one in _open if (state := one()) is not None]
        if len(found) > 1:
            raise ConfigError(
                f"checkpoints are of one pipeline, and {len(found)} are open; close "
                "the others, or save their state_dict() and optimizer_state_dict()"
            )
        return found[0] if found else None

    def end_with(self, end: Callable[[bool], None]) -> None:
        """Calls ``end`` once, on close or at exit, with True if the run has failed."""
        self._on_close = end
        atexit.register(self._close_at_exit)

    def close(self, has_failed: bool) -> None:
        """Ends the run once; may be called twice."""
        atexit.unregister(self._close_at_exit)
        _open[:] = [one for one in _open if one() is not self]
        end, self._on_close = self._on_close, None
        if end is not None:
            end(has_failed)

    def _close_at_exit(self) -> None:
        self.close(has_failed=hasattr(sys, "last_value"))  # an uncaught exception

    def parameter_names(self) -> dict[int, tuple[str, ...]]:
        """All of the model's names for each of this rank's parameters, by id.

        The order is the same on all ranks, so that the first name identifies a shared
        parameter.
        """
        layers = self.stepping.parts.given.layers
        tied = {use: uses for uses in self.stepping.parts.given.ties for use in uses}
        found: dict[int, tuple[str, ...]] = {}
        for index, layer in self.stepping.parts.built.items():
            for own, one in layer.module.named_parameters():
                uses = tied.get((index, own), [(index, own)])
                names = [layers.name_of(*use) for use in uses]
                known = [layers.state_names.get(name, (name,)) for name in names]
                found[id(one)] = tuple(dict.fromkeys(n for some in known for n in some))
        return found

    def average_buffers(self) -> None:
        """Averages buffers changed by replicas; must be called on all ranks."""
        replicas = self.stepping.replicas
        replicas.average_buffers(self.communicator, self.timeout_s)

    def local_model(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and buffers under all of their names in the model."""
        names = self.stepping.parts.given.layers.state_names
        return {
            known: value
            for layer in self.stepping.parts.layers
            for name, value in layer.module.state_dict().items()
            if isinstance(value, torch.Tensor)
            for known in names.get(layer.prefixed(name), (layer.prefixed(name),))
        }

    def model(self, rank: int | None) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the whole model; see `Pipeline.state_dict`."""
        self._agree("state_dict", rank, dict)
        self.average_buffers()
        found: dict[str, torch.Tensor] = {}
        for part in self._gather(self.local_model(), rank):
            found.update(part)
        order_of = self.stepping.parts.order_of
        return dict(sorted(found.items(), key=lambda item: order_of(item[0])))

    def load_model(self, state: Mapping[str, torch.Tensor]) -> None:
        """Loads this rank's part; see `Pipeline.load_state_dict`."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"expected a state_dict, got {type(state).__name__}")
        mine, is_known = self.local_model(), self.stepping.parts.is_elsewhere
        names: dict[int, list[str]] = {}
        for name, value in mine.items():
            names.setdefault(id(value), []).append(name)
        # A tied tensor has several names; files may have only one of them.
        given = [[n for n in known if n in state] or known for known in names.values()]
        faults = {
            f"has no %s, which rank {self.rank} needs": [
                known[0] for known in given if known[0] not in state
            ],
            "has another shape of %s": [
                f"{name} {_form(state[name])} (not {_form(mine[name])})"
                for name, *_ in given
                if name in state and _form(state[name]) != _form(mine[name])
            ],
            "has other values of %s, which are tied": [
                f"{name} and {also}"
                for name, *others in given
                for also in others
                if also in state and not torch.equal(state[name], state[also])
            ],
            "has %s, which the model lacks": [
                str(n) for n in state if n not in mine and not is_known(str(n))
            ],
        }
        wrong = [fault % few(found) for fault, found in faults.items() if found]
        if wrong:
            raise ConfigError(
                f"the state {', and '.join(wrong)}; nothing was loaded on rank "
                f"{self.rank}; give the state_dict of this model, or files with its "
                "names (save_pretrained(..., save_original_format=False))"
            )
        last = {
            each: [name for name in known if name in state][-1:]
            for known in self.parameter_names().values()
            for each in known
        }  # as torch loads it; the same on all ranks of a shared parameter
        with torch.no_grad():
            for name, *_ in given:
                mine[name].copy_(state[last.get(name, [name])[0]])
        if trouble := self.stepping.parts.given.meta.trouble():
            raise ConfigError(trouble)

    def optimizer(
        self, optimizer: torch.optim.Optimizer, rank: int | None
    ) -> NamedState:
        """State over the whole model; see `Pipeline.optimizer_state_dict`."""
        given = only_optimizer(optimizer)
        made: list[NamedState] = []

        def described() -> dict[str, str]:
            made.append(named_state(given, self.parameter_names()))
            return describe([given])

        check_alike(self._agree("optimizer_state_dict", rank, described))
        parts = self._gather(made[0], rank)
        return join_states(parts) if parts else {}

    def _agree(self, what: str, rank: int | None, make: Callable[[], Any]) -> list[Any]:
        """Gathers values from all ranks, which must pass the same destination rank."""
        if self.communicator.peers is None:
            return [make()]
        reports = self.communicator.agree(lambda: [rank, make()], what)
        wanted = [one for one, _ in reports]
        if any(one != rank for one in wanted):
            raise MismatchError(f"ranks call {what} for different ranks: {wanted}")
        return [one for _, one in reports]

    def _gather(self, mine: dict[str, Any], rank: int | None) -> list[dict[str, Any]]:
        """Gathers the replica's parts in CPU memory, on one rank or on all."""
        tensors, structure = flatten(mine, "the state")
        copied = [one.detach().to("cpu", copy=True) for one in tensors]
        peers = self.communicator.peers
        if peers is None:
            return [unflatten(structure, copied)]
        whole = Message(tuple(copied), structure)
        nothing = Message((), flatten({}, "nothing")[1])
        found: list[dict[str, Any]] = []
        with self.communicator.ending_on_failure():
            for to in range(self.world_size) if rank is None else (rank,):
                part = whole if to in self.stepping.groups.members else nothing
                parts = peers.gather(part, to, self.timeout_s)
                found += [unflatten(one.structure, one.tensors) for one in parts]
        return [one for one in found if one]

    def load_optimizer(
        self, optimizer: torch.optim.Optimizer, state: NamedState
    ) -> None:
        """Loads this rank's part; see `Pipeline.load_optimizer_state_dict`."""
        given = only_optimizer(optimizer)
        load_named_state(given, self.parameter_names(), state)

    @property
    def is_in_epoch(self) -> bool:
        """True if an epoch of `elche.epochs` has begun and its end is not known."""
        counts_epochs = self.passes.pauses.counts_epochs
        return self.passes.is_open or (counts_epochs and self.passes.steps_outside > 0)

    @property
    def why_no_cut(self) -> str:
        """Refusal of a checkpoint in an epoch whose remaining batches are unknown."""
        if self.passes.is_open:
            return ""
        return (
            "elche.save() inside this loop cannot record the rest of the epoch: write "
            "`for batch in pipe.batches(loader)`, or leave saving to elche.save_every, "
            "or count epochs by yourself and register the count"
        )

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Broadcasts rank 0's text. All ranks call this between epochs or at a cut."""
        reports = self.communicator.agree(lambda: "" if self.rank else make(), what)
        self.passes.steps_outside = 0
        return str(reports[0])

    def heeds_signals(self, heeds: bool) -> None:
        """Reports to the launcher whether this rank stops by itself after a signal."""
        if self.communicator.peers is not None:
            self.communicator.peers.heeds_signals(heeds)

    def report_saved(self, text: str) -> None:
        """Reports a complete checkpoint to the coordinator."""
        if self.communicator.peers is not None:
            self.communicator.peers.report_saved(text)

    def described(self) -> dict[str, Any]:
        """Progress of the run, for a checkpoint's manifest."""
        return {"kind": "pipeline", "steps": self.stepping.steps}

    def resume(self, state: Mapping[str, Any], epochs: Mapping[str, Any]) -> None:
        """Does nothing: loading the contents has restored everything."""


_open: list[weakref.ref[PipelineState]] = []
"""States of this process's open pipelines."""


def _form(value: Any) -> str:
    """Type or shape of a value; values can be copied only if these agree."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{list(value.shape)}{' on meta' if value.is_meta else ''}"
