"""A run's checkpoints as a process makes them: when, of what, and resumed from where.

An epoch pauses for one (`elche.runtime.training.Pauses`): rank 0 asks for that, and at
the pause all ranks hand copies of what they hold to a thread that writes them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torch.optim.lr_scheduler import LRScheduler

from elche.checkpoint.bare_model import bare_state
from elche.checkpoint.capture import copied, random_state, restore_random
from elche.checkpoint.store import Checkpoint, CheckpointStore
from elche.checkpoint.writer import CheckpointWriter
from elche.errors import CheckpointError, ConfigError, ElcheError, MismatchError
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.runtime.training import Pauses, RunParts

logger = logging.getLogger(__name__)

AT_EXIT_S: Final = 60.0
"""So long a process that ends waits for what is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints by time.

    Attributes:
        folder: where to.
        every_s: seconds from one to the next.
        keep: how many are kept, the newest.
    """

    folder: Path
    every_s: float = 600.0
    keep: int = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.every_s) and self.every_s > 0.0):
            raise ConfigError(f"expected every_s above 0, got {self.every_s!r}")
        if self.keep < 1:
            raise ConfigError(f"expected keep of at least 1, got {self.keep!r}")

    @staticmethod
    def from_environment() -> CheckpointConfig | None:
        """What the launcher asks for, if anything.

        Raises:
            ConfigError: a variable is no number.
        """
        folder = os.environ.get("ELCHE_CHECKPOINT_DIR")
        if not folder:
            return None
        try:
            every_s = float(os.environ.get("ELCHE_CHECKPOINT_EVERY_S") or 600.0)
            keep = int(os.environ.get("ELCHE_CHECKPOINT_KEEP") or 2)
        except ValueError as error:
            raise ConfigError(
                f"expected numbers in ELCHE_CHECKPOINT_EVERY_S and _KEEP: {error}"
            ) from error
        return CheckpointConfig(folder=Path(folder), every_s=every_s, keep=keep)


@final
class CheckpointKeeper(Pauses):
    """Makes checkpoints of the run under way, and resumes from one."""

    def __init__(self) -> None:
        self._registered: dict[str, Any] = {}
        self._config: CheckpointConfig | None = None
        self._stores: dict[Path, CheckpointStore] = {}
        self._writers: dict[Path, CheckpointWriter] = {}
        self._clear()

    def _clear(self) -> None:
        self._run: Run | SingleRun | None = None
        self._schedulers: list[LRScheduler] = []
        self._run_id = ""
        self._asked: list[Path] = []
        self._due_at_s = math.inf
        self._epoch = self._passes = self._passes_done = 0
        self._counts_epochs = self._is_resumed = False
        self._is_used = False

    def begin_run(
        self, run: Run | SingleRun, schedulers: Sequence[LRScheduler]
    ) -> None:
        """A run begins; these schedulers follow it."""
        self._clear()
        self._run, self._schedulers = run, list(schedulers)
        self.configure(CheckpointConfig.from_environment())

    def run_failed(self) -> None:
        """Other ranks write no more; what they have written may still be completed."""
        for writer in self._writers.values():
            writer.stop_waiting()

    def end_run(self) -> None:
        """The run ends when what is being written is written, or takes too long."""
        for writer in self._writers.values():
            writer.close(AT_EXIT_S)
        if self._asked:
            logger.warning("no checkpoint was made: the run ended before its epoch")
        self._writers.clear()
        self._stores.clear()
        self._registered.clear()
        self._config = None
        self._clear()

    def configure(self, config: CheckpointConfig | None) -> None:
        """Makes checkpoints by time from now on."""
        self._config = config
        if config is not None:
            self._current.check_record()
            self._stores[config.folder] = CheckpointStore(config.folder, config.keep)
            self._is_used = True
            self._plan_next()

    def register(self, objects: Mapping[str, Any]) -> None:
        """Takes objects whose state belongs to the run.

        Raises:
            ConfigError: a name is taken, or it is no object with a state.
        """
        for name, each in objects.items():
            if any(each is other for other in self._registered.values()):
                continue
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(each, method, None)):
                    raise ConfigError(
                        f"expected {name} to have state_dict() and load_state_dict(), "
                        f"got {type(each).__name__}"
                    )
            if name in self._registered:
                raise ConfigError(f"two objects are registered as {name!r}; name them")
            self._registered[name] = each

    @property
    def num_registered(self) -> int:
        """Objects that are registered."""
        return len(self._registered)

    def follow(self, scheduler: LRScheduler) -> None:
        """Takes a scheduler that follows the run."""
        if not any(scheduler is each for each in self._schedulers):
            self._schedulers.append(scheduler)

    @property
    def is_active(self) -> bool:
        """Whether checkpoints may be made inside epochs."""
        return self._is_used

    def wants_cut(self) -> bool:
        """Whether a checkpoint was asked for, or is due."""
        return bool(self._asked) or self._is_due

    @property
    def _is_due(self) -> bool:
        if time.monotonic() < self._due_at_s or self._config is None:
            return False
        writer = self._writers.get(self._config.folder)
        return writer is None or not writer.is_busy

    def begin_pass(self) -> bool:
        """The loop goes over the loader; False for a pass that is done already."""
        self._passes += 1
        is_done = self._passes <= self._passes_done
        return not is_done

    def cut(self) -> None:
        """Makes what is asked for, inside an epoch."""
        self._save(self._epoch, self._passes - 1 if self._counts_epochs else 0)

    def epochs(self, count: int) -> Iterator[int]:
        """Numbers of the epochs that are left; see `elche.epochs`."""
        self._is_used = self._counts_epochs = True
        folder = os.environ.get("ELCHE_RESUME")
        if folder and not self._is_resumed:
            self.resume(Path(folder))
        for epoch in range(self._epoch, count):
            self._epoch = epoch
            yield epoch
            self._epoch, self._passes, self._passes_done = epoch + 1, 0, 0
            if self._wants_one():
                self._save(epoch + 1, 0)

    def _wants_one(self) -> bool:
        """What rank 0 wants, between epochs."""
        run = self._current
        run.barrier("the end of an epoch")
        return (
            run.agree("1" if self.wants_cut() else "", "agreeing on a checkpoint")
            == "1"
        )

    def save(self, folder: Path) -> None:
        """Makes a checkpoint now, or inside a loop as soon as all ranks pause."""
        run, self._is_used = self._current, True
        if run.is_in_epoch:
            run.check_cut()
            if run.rank == 0 and folder not in self._asked:
                self._asked.append(folder)
            return
        self._asked.append(folder)
        run.barrier("elche.save")
        self._save(self._epoch + bool(self._passes), 0)

    @property
    def _current(self) -> Run | SingleRun:
        if self._run is None:
            raise ConfigError(
                "expected a run to save or resume: call elche.setup first"
            )
        return self._run

    def _plan_next(self) -> None:
        if self._config is not None:
            self._due_at_s = time.monotonic() + self._config.every_s

    def _save(self, epoch: int, passes: int) -> None:
        run = self._current
        said = ""
        if run.rank == 0:
            folders = list(dict.fromkeys(self._asked))
            if self._is_due and self._config is not None:
                folders.append(self._config.folder)
            self._run_id = self._run_id or uuid.uuid4().hex
            names = [(str(each), self._name_in(each)) for each in folders]
            said = json.dumps([self._run_id, names])
        told = json.loads(run.agree(said, "agreeing on a checkpoint"))
        self._asked.clear()
        self._run_id, names = told
        parts = run.parts()
        own, shared, model = self._captured(parts, epoch, passes)
        for folder, name in names:
            self._writer(Path(folder)).begin(
                name,
                own=own,
                shared=shared if run.rank == 0 else None,
                manifest=run.described() | {"epoch": epoch} if run.rank == 0 else None,
                model=model if run.rank == 0 else None,
            )
        self._plan_next()

    def _name_in(self, folder: Path) -> str:
        """The next one's name, when the last one is written."""
        if folder in self._writers:
            with contextlib.suppress(CheckpointError):  # it was said
                self._writers[folder].wait(self._current.timeout_s)
        return self._store(folder).next_name()

    def _store(self, folder: Path) -> CheckpointStore:
        return self._stores.setdefault(folder, CheckpointStore(folder))

    def _writer(self, folder: Path) -> CheckpointWriter:
        if folder not in self._writers:
            run = self._current
            self._writers[folder] = CheckpointWriter(
                self._store(folder),
                run.rank,
                run.world_size,
                self._run_id,
                run.timeout_s,
            )
        return self._writers[folder]

    def _captured(
        self, parts: RunParts, epoch: int, passes: int
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """What is this rank's own, what all hold in common, and the model."""
        others = [
            each
            for each in parts.optimizers[1:]
            if not any(each is one for one in self._registered.values())
        ]
        if others:
            raise ConfigError(
                f"{type(others[0]).__name__} steps the model beside the optimizer of "
                "elche.setup: call elche.register_for_checkpointing(optimizer) before "
                "the first epoch, so that it can be resumed"
            )
        is_first = self._current.rank == 0
        bound = {"optimizer": parts.optimizers[0].state_dict()}
        bound["registered"] = {
            name: each.state_dict() for name, each in self._registered.items()
        }
        own: dict[str, Any] = {
            "bound": None if parts.is_common else copied(bound),
            "free": {
                name: state
                for name, state in copied(bound["registered"]).items()
                if parts.is_common and not _is_bound(self._registered[name])
            },
            "averaging": _without_common(parts.state["averaging"], is_first),
            "random": random_state(parts.generators),
        }
        if not is_first:
            return copied(own), {}, {}
        model = copied(bare_state(parts.model))
        shared = {
            "model": {
                name: value
                for name, value in parts.model.state_dict().items()
                if not hasattr(value, "dtype")
            },
            "bound": bound if parts.is_common else None,
            "schedulers": [each.state_dict() for each in self._schedulers],
            "copies": [each.state_dict() for each in parts.copies],
            "run": {**parts.state, "averaging": None},
            "epochs": parts.epochs,
            "loop": {"epoch": epoch, "passes": passes},
        }
        return copied(own), copied(shared), model

    def resume(self, folder: Path) -> bool:
        """Goes on from the newest checkpoint; see `elche.resume`."""
        run, self._is_used, self._is_resumed = self._current, True, True
        found = self._newest(folder)
        if found is None:
            return False
        parts, was_there = run.parts(), run.rank < found.manifest.world_size
        shared = found.shared()
        own = found.of_rank(run.rank if was_there else 0)
        with _fitting(found, "model"):
            self._load_model(parts, found, shared)
        bound = shared["bound"] or own["bound"]
        with _fitting(found, "optimizer"):
            parts.optimizers[0].load_state_dict(bound["optimizer"])
        self._load_registered(found, {**bound["registered"], **own["free"]})
        handed: dict[str, Sequence[Any]] = {
            "schedulers": self._schedulers,
            "copies": parts.copies,
        }
        for what, objects in handed.items():
            if len(objects) != len(shared[what]):
                raise MismatchError(
                    f"{found.name} holds {len(shared[what])} {what}, this script hands "
                    f"over {len(objects)}; resume with the script that saved it"
                )
            for each, state in zip(objects, shared[what], strict=True):
                with _fitting(found, what):
                    each.load_state_dict(state)
        first = own if run.rank == 0 or not was_there else found.of_rank(0)
        averaging = _joined(first["averaging"], own["averaging"] if was_there else None)
        run.resume({**shared["run"], "averaging": averaging}, shared["epochs"])
        self._epoch, self._passes = shared["loop"]["epoch"], 0
        self._passes_done = shared["loop"]["passes"]
        if was_there:
            restore_random(own["random"], parts.generators)
        if run.rank == 0:
            logger.info("resumed from %s", found.path)
        return True

    def _newest(self, folder: Path) -> Checkpoint | None:
        """The one that rank 0 finds."""
        run, found = self._current, None
        if run.is_in_epoch:
            raise ConfigError("elche.resume() inside a loop; call it before the first")
        run.barrier("elche.resume")
        if run.rank == 0:
            found = self._store(folder).newest()
        name = run.agree("" if found is None else found.name, "choosing a checkpoint")
        if not name:
            return None
        return found or self._store(folder).open(name)

    def _load_model(
        self, parts: RunParts, found: Checkpoint, shared: dict[str, Any]
    ) -> None:
        held, saved = parts.model.state_dict(), found.model()
        names = [name for name, value in held.items() if hasattr(value, "dtype")]
        bare = list(bare_state(parts.model))
        if set(bare) != set(saved):
            more = sorted(set(bare) ^ set(saved))
            raise MismatchError(
                f"{found.name} is of another model: {', '.join(more[:5])} on one side "
                "only"
            )
        state = {own: saved[name] for own, name in zip(names, bare, strict=True)}
        parts.model.load_state_dict({**state, **shared["model"]})

    def _load_registered(self, found: Checkpoint, states: Mapping[str, Any]) -> None:
        if set(states) != set(self._registered):
            raise MismatchError(
                f"{found.name} holds registered objects {sorted(states)}, this script "
                f"has registered {sorted(self._registered)}; register the same ones "
                "before elche.resume"
            )
        for name, state in states.items():
            with _fitting(found, name):
                self._registered[name].load_state_dict(state)


def _is_bound(each: Any) -> bool:
    """Whether it moves with the model, so that ranks of common steps hold it alike."""
    module = type(each).__module__.split(".")[0]
    return (
        module == "torch"
        or hasattr(each, "parameters")
        or hasattr(each, "param_groups")
    )


def _without_common(
    averaging: dict[str, Any] | None, is_first: bool
) -> dict[str, Any] | None:
    """What only this rank holds of averaging; on the first one all of it."""
    if averaging is None or is_first:
        return averaging
    groups = [{**each, "momentum": None, "base": None} for each in averaging["groups"]]
    return {**averaging, "groups": groups}


def _joined(
    first: dict[str, Any] | None, own: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The first rank's state of averaging with a rank's own residuals, if any."""
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
def _fitting(found: Checkpoint, what: str) -> Iterator[None]:
    """Says which checkpoint does not fit what it is loaded into."""
    try:
        yield
    except ElcheError:
        raise
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"{found.path} does not fit the {what} of this script: {error}"
        ) from error
