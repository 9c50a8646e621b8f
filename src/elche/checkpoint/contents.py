"""Contents of a checkpoint: captured from a rank of a run, and loaded into one.

`SavedRun` and `SavedContents` are the interfaces of `elche.setup` and of pipelines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from elche.checkpoint.capture import Captured, random_state, restore_random
from elche.errors import ConfigError, ElcheError, MismatchError
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.training import RunParts
from elche.runtime.watch.rate_watch import is_scheduled
from elche.torch_internals.groups import COMPILED_MODULE as _INNER
from elche.torch_internals.passes import is_compiled

if TYPE_CHECKING:
    from elche.checkpoint.state_transfer import ReceivedState
    from elche.checkpoint.store import Checkpoint

    SavedState: TypeAlias = Checkpoint | ReceivedState


class SavedContents(Protocol):
    """Interface to the objects whose state a checkpoint holds; see `Contents`."""

    def capture(self, loop: Mapping[str, int]) -> Captured:
        """Copies all state; a collective call."""

    def load(self, found: Checkpoint) -> dict[str, Any]:
        """Loads a checkpoint into the objects; returns the shared state."""


class SavedRun(Protocol):
    """Interface of a run to checkpoints; `Run`, `SingleRun` and pipelines have it."""

    @property
    def rank(self) -> int:
        """Index of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""

    @property
    def timeout_s(self) -> float:
        """Deadline (s) of waits for other ranks."""

    @property
    def is_in_epoch(self) -> bool:
        """True within an epoch."""

    @property
    def why_no_cut(self) -> str:
        """Why the current epoch cannot be interrupted; "" if it can."""

    @property
    def notifications(self) -> RunNotifications:
        """Channel of messages to the user."""

    def agree(self, make: Callable[[], str], what: str) -> str:
        """Broadcasts the text that rank 0 makes; returns it on every rank."""

    def heeds_signals(self, heeds: bool) -> None:
        """Notifies the launcher whether this rank exits by itself after a signal."""

    def report_saved(self, text: str) -> None:
        """Reports a complete checkpoint to the coordinator; called by a thread."""

    def described(self) -> dict[str, Any]:
        """Returns progress for the manifest, with samples or steps."""

    def resume(self, state: dict[str, Any], epochs: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The objects whose state a checkpoint holds.

    *Bound* state changes with the optimizer's steps, so ranks with common steps hold it
    in common; *free* state is each rank's own.

    Attributes:
        rank: index of this rank.
        parts: model, optimizers and other parts of the run.
        schedulers: learning rate schedulers that follow the run.
        registered: objects registered by the user, by name.
    """

    rank: int
    parts: RunParts
    schedulers: Sequence[LRScheduler]
    registered: Mapping[str, Any]

    def capture(self, loop: Mapping[str, int]) -> Captured:
        """Copies all state, including the given state of the user's loop.

        Raises:
            ConfigError: an optimizer or a scheduler is not registered.
        """
        self._refuse_unknown()
        parts, registered = self.parts, self.registered
        bound: dict[str, Any] = {
            "optimizer": parts.optimizers[0].state_dict(),
            "registered": {n: r.state_dict() for n, r in registered.items()},
            "schedulers": [each.state_dict() for each in self.schedulers],
            "schedules": parts.epochs["schedules"],  # in windows a rank may be ahead
        }
        free: dict[str, Any] = {}
        if parts.is_common:
            names = [name for name, each in registered.items() if not is_bound(each)]
            free = {name: bound["registered"].pop(name) for name in names}
        averaging, is_first = parts.state["averaging"], self.rank == 0
        own = {
            "bound": None if parts.is_common else bound,
            "free": free,
            "averaging": averaging if is_first else _without_common(averaging),
            "random": random_state(parts.generators),
        }
        if not is_first:
            return Captured.of(own, {}, {})
        held = parts.model.state_dict()
        shared = {
            "model": {n: v for n, v in held.items() if not isinstance(v, Tensor)},
            "bound": bound if parts.is_common else None,
            "copies": [each.state_dict() for each in parts.copies],
            "run": {**parts.state, "averaging": None},
            "epochs": {**parts.epochs, "schedules": None},
            "loop": dict(loop),
        }
        return Captured.of(own, shared, bare_state(parts.model))

    def _refuse_unknown(self) -> None:
        registered = list(self.registered.values())
        for optimizer in self.parts.optimizers[1:]:
            if not any(optimizer is each for each in registered):
                raise ConfigError(
                    f"{type(optimizer).__name__} also steps the model, but "
                    "elche.setup did not get it: pass setup both optimizers in a "
                    "list, or call elche.register_for_checkpointing(optimizer) before "
                    "the first epoch, so that its state is saved"
                )
        for optimizer in self.parts.optimizers:
            known = [getattr(e, "optimizer", None) for e in registered]
            known += [each.optimizer for each in self.schedulers]
            if is_scheduled(optimizer) and not any(optimizer is e for e in known):
                raise ConfigError(
                    "a scheduler sets the learning rate of "
                    f"{type(optimizer).__name__}, and its state is in no checkpoint: "
                    "pass it to elche.setup(..., schedulers=[...]), or call "
                    "elche.register_for_checkpointing(scheduler)"
                )

    def load(self, found: SavedState) -> dict[str, Any]:
        """Loads a checkpoint into all objects except the run itself.

        Returns:
            The shared state, with this rank's state of the run as ``run``.

        Raises:
            MismatchError: a state does not fit its object.
            CheckpointError: a file is damaged.
        """
        if found.manifest.info.get("kind") is not None:
            raise MismatchError(
                f"{found.path} was saved by a Pipeline, but this run uses elche.setup"
            )
        was_there = self.rank < found.manifest.world_size
        shared = found.shared()
        own = found.of_rank(self.rank if was_there else 0)
        with fitting(found, "model"):
            self._load_model(found, shared["model"])
        first = own if self.rank == 0 or not was_there else found.of_rank(0)
        bound = shared["bound"] or self._bound(first["bound"], own["bound"])
        with fitting(found, "optimizer"):
            self.parts.optimizers[0].load_state_dict(bound["optimizer"])
        load_registered(found, self.registered, {**bound["registered"], **own["free"]})
        self._load_all(found, "schedulers", self.schedulers, bound)
        self._load_all(found, "copies", self.parts.copies, shared)
        averaging = _joined(first["averaging"], own["averaging"] if was_there else None)
        if was_there:
            restore_random(own["random"], self.parts.generators)
        epochs = {**shared["epochs"], "schedules": bound["schedules"]}
        run = {**shared["run"], "averaging": averaging}
        return {**shared, "run": run, "epochs": epochs}

    def _bound(self, first: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """Bound state of a windowed run: this rank's, or rank 0's under common steps.

        Under common steps, registered free objects still get this rank's state.
        """
        if not self.parts.is_common:
            return own
        named = self.registered
        apart = {
            n: r for n, r in own["registered"].items() if not is_bound(named.get(n))
        }
        return {**first, "registered": {**first["registered"], **apart}}

    def _load_model(self, found: SavedState, more: Mapping[str, Any]) -> None:
        model, saved = self.parts.model, found.model
        held = model.state_dict().items()
        names = [name for name, value in held if isinstance(value, Tensor)]
        bare = list(bare_state(model))
        if set(bare) != set(saved):
            others = sorted(set(bare) ^ set(saved))
            raise MismatchError(
                f"{found.path} was saved from another model: only one of the two has "
                f"{', '.join(others[:5])}"
            )
        state = {own: saved[name] for own, name in zip(names, bare, strict=True)}
        model.load_state_dict({**state, **more})

    def _load_all(
        self,
        found: SavedState,
        what: str,
        objects: Sequence[Any],
        saved: Mapping[str, Any],
    ) -> None:
        if len(objects) != len(saved[what]):
            raise MismatchError(
                f"{found.path} holds {len(saved[what])} {what}, but this script "
                f"passes {len(objects)}; resume with the script that saved it"
            )
        for each, state in zip(objects, saved[what], strict=True):
            with fitting(found, what):
                each.load_state_dict(state)


def bare_state(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model's `state_dict` without `torch.compile` prefixes."""
    compiled = [
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if is_compiled(module) and any(n == _INNER for n, _ in module.named_children())
    ]
    compiled.sort(key=len, reverse=True)  # inner ones first
    bare = {}
    for name, value in model.state_dict().items():
        for prefix in compiled:
            if name.startswith(f"{prefix}{_INNER}."):
                name = prefix + name.removeprefix(f"{prefix}{_INNER}.")
        if isinstance(value, Tensor):
            bare[name] = value.detach()
    return bare


def load_registered(
    found: SavedState, registered: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    """Loads the state of registered objects, by name.

    Raises:
        MismatchError: the registered names differ, or a state does not fit.
    """
    if set(states) != set(registered):
        raise MismatchError(
            f"{found.path} holds registered objects {sorted(states)}, this script "
            f"has registered {sorted(registered)}; register the same ones "
            "before elche.resume"
        )
    for name, state in states.items():
        with fitting(found, name):
            registered[name].load_state_dict(state)


def is_bound(each: Any) -> bool:
    """True if an object's state changes with the model, as torch's own objects do."""
    module = type(each).__module__.split(".")[0]
    has_parameters = hasattr(each, "parameters") or hasattr(each, "param_groups")
    return module == "torch" or has_parameters or hasattr(each, "optimizer")


def _without_common(averaging: dict[str, Any] | None) -> dict[str, Any] | None:
    """Averaging state without the fields that all ranks hold in common."""
    if averaging is None:
        return None
    groups = [{**each, "momentum": None, "base": None} for each in averaging["groups"]]
    return {**averaging, "groups": groups}


def _joined(
    first: dict[str, Any] | None, own: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Combines rank 0's averaging state with a rank's own residuals, if any."""
    if first is None:
        return None
    residuals = [None] * len(first["groups"])
    if own is not None:
        residuals = [each["residual"] for each in own["groups"]]
    groups = [
        {**each, "residual": residual}
        for each, residual in zip(first["groups"], residuals, strict=True)
    ]
    return {**first, "groups": groups}


@contextlib.contextmanager
def fitting(found: SavedState, what: str) -> Iterator[None]:
    """Turns load errors into a MismatchError that names the checkpoint."""
    try:
        yield
    except ElcheError:
        raise
    except (RuntimeError, LookupError, ValueError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"{found.path} does not fit the {what} of this script: {error}"
        ) from error
