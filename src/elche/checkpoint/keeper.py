"""Checkpoints of a run on one process: schedule, contents and resumption.

A checkpoint inside an epoch pauses it (`elche.runtime.training.Pauses`). Rank 0
requests the cut; at the pause each rank queues copies of its state for its writer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from elche.checkpoint.contents import Contents, SavedContents, SavedRun
from elche.checkpoint.state_transfer import packed, refused, send, unpacked
from elche.checkpoint.store import Checkpoint, CheckpointStore
from elche.checkpoint.writer import CheckpointWriter
from elche.comm.transport.process_group import Group
from elche.config_checks import check_fields
from elche.errors import CheckpointError, ConfigError, DeadlineError, MismatchError
from elche.runtime.process.stop_signals import SignalStops, StopRequest
from elche.runtime.run import Run
from elche.runtime.single import SingleRun
from elche.runtime.training import Pauses

logger = logging.getLogger(__name__)

AT_EXIT_S: Final = 60.0
FAILED_S: Final = 3.0
"""Grace period (s) for a checkpoint being written at a failure; at exit, AT_EXIT_S."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Settings of periodic checkpoints.

    Attributes:
        folder: folder of the checkpoints.
        every_s: seconds between checkpoints.
        keep: number of newest checkpoints to keep.
    """

    folder: Path
    every_s: float = 600.0
    keep: int = 2

    def __post_init__(self) -> None:
        check_fields(self, whole={"keep": 1}, positive=("every_s",))

    @staticmethod
    def from_environment() -> CheckpointConfig | None:
        """Reads the configuration set by the launcher; None if there is none.

        Raises:
            ConfigError: a variable is not a number.
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
    """Makes checkpoints of the current run, and resumes from one."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._registered: dict[str, Any] = {}
        self._config: CheckpointConfig | None = None
        self._stores: dict[Path, CheckpointStore] = {}
        self._writers: dict[Path, CheckpointWriter] = {}
        self._run: SavedRun | None = None
        self._contents_of: Callable[[Mapping[str, Any]], SavedContents] | None = None
        self._schedulers: list[LRScheduler] = []
        self._run_id = ""
        self._asked: list[Path] = []
        self._due_at_s = math.inf
        self._stops: StopRequest | None = None
        self._signals: SignalStops | None = None
        self._has_ended = False
        self._epoch = self._passes = self._passes_done = self._count = 0
        self.is_active = self.counts_epochs = self._is_resumed = False

    def begin_run(
        self,
        run: Run | SingleRun,
        schedulers: Sequence[LRScheduler],
        stops: StopRequest | None = None,
    ) -> None:
        """Sets up checkpoints for a new run.

        Args:
            run: the run on this rank.
            schedulers: learning rate schedulers that follow the run.
            stops: stop request of a loop that ends by itself; None for the user's
                loop, which a signal ends after a last checkpoint.
        """

        def contents_of(registered: Mapping[str, Any]) -> Contents:
            return Contents(
                rank=run.rank,
                parts=run.parts(),
                schedulers=self._schedulers,
                registered=registered,
            )

        self._schedulers, self._stops = list(schedulers), stops
        self.begin_saved(run, contents_of)

    def begin_saved(
        self, run: SavedRun, contents_of: Callable[[Mapping[str, Any]], SavedContents]
    ) -> None:
        """Sets up checkpoints for any kind of run; `begin_run` is for `elche.setup`.

        Args:
            run: the run on this rank.
            contents_of: returns the contents to save, given the registered objects.
        """
        self._run, self._contents_of = run, contents_of
        self.configure(CheckpointConfig.from_environment())

    def end_run(self, has_failed: bool = False) -> None:
        """Waits a limited time for pending checkpoints, and resets the keeper."""
        for writer in self._writers.values():
            writer.close(FAILED_S if has_failed else AT_EXIT_S)
        if self._asked:
            logger.warning("no checkpoint was made: the run ended before the epoch did")
        if self._signals is not None:
            self._signals.close()
        self._clear()

    def configure(self, config: CheckpointConfig | None) -> None:
        """Enables periodic checkpoints; None disables them."""
        self._config = config
        if config is not None:
            self._stores[config.folder] = CheckpointStore(config.folder, config.keep)
            self.is_active = True
            if self._stops is None:
                self._stops = StopRequest()
                self._signals = SignalStops(self._stops)
                self._current.heeds_signals(self._signals.open())
            self._plan_next()

    def register(self, objects: Mapping[str, Any]) -> None:
        """Registers objects whose state belongs to the run.

        Raises:
            ConfigError: a name is taken, or an object lacks state_dict methods.
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
        """Number of registered objects."""
        return len(self._registered)

    def follow(self, scheduler: LRScheduler) -> None:
        """Adds a scheduler that follows the run."""
        if not any(scheduler is each for each in self._schedulers):
            self._schedulers.append(scheduler)

    @override
    def wants_cut(self, *, is_first: bool = True) -> bool:
        is_wanted = is_first and (bool(self._asked) or self._is_due)
        return is_wanted or self.wants_end()

    @override
    def wants_end(self) -> bool:
        is_asked = self._stops is not None and bool(self._stops.reason)
        return is_asked and self._config is not None

    @property
    def ends_by_cut(self) -> bool:
        """True if a stop request cuts the current epoch."""
        return self._config is not None and not self._current.why_no_cut

    @property
    def _is_due(self) -> bool:
        if time.monotonic() < self._due_at_s or self._config is None:
            return False
        writer = self._writers.get(self._config.folder)
        return writer is None or not writer.is_busy

    def begin_pass(self) -> bool:
        """Counts a pass over the loader; returns False if a resumed run has done it."""
        self._passes += 1
        self._has_ended = False
        folder = os.environ.get("ELCHE_RESUME") if self._passes == 1 else None
        if folder and not self._is_resumed and self._current.rank == 0:
            logger.warning(
                "this run does not resume from %s and starts from scratch; loop over "
                "elche.epochs(), or call elche.resume() before the first epoch",
                folder,
            )
        return self._passes > self._passes_done

    def cut(self, *, is_end: bool) -> None:
        """Makes the requested checkpoints inside an epoch."""
        wanted = self._agreed("a checkpoint", is_end=is_end)
        self._save(self._epoch, self._passes_before, wanted)
        self._has_ended = is_end  # a stop requested meanwhile takes effect afterwards

    @property
    def _passes_before(self) -> int:
        """Number of this epoch's earlier passes over the loader."""
        return self._passes - 1 if self.counts_epochs else 0

    @override
    def send_state(self, group: Group, source: int, is_new: bool) -> None:
        run, messages = self._run, None
        assert isinstance(run, Run), "ranks join a run of several"
        if group.rank == source:
            loop = {"epoch": self._epoch, "passes": self._passes_before}
            loop["count"] = self._count
            try:
                if not self.counts_epochs:
                    raise ConfigError("the other ranks do not loop over elche.epochs()")
                epochs = run.epochs.joining_state()
                messages = packed(self._contents().capture(loop), epochs)
            except Exception as error:  # ends the joining rank only
                logger.exception("a rank cannot join the run")
                messages = refused(str(error))
        received = send(group, source, messages, keeps=is_new)
        if is_new:
            found = unpacked(received)
            contents = self._contents()
            assert isinstance(contents, Contents), "of a run on several ranks"
            shared = contents.load(found)
            run.adopt_state(shared["run"], shared["epochs"], found.manifest.info)
            loop = shared["loop"]
            if loop["count"] != self._count:  # the first to finish would end the run
                raise MismatchError(
                    f"this rank cannot join the run: its loop has {self._count} "
                    f"epochs, the other ranks' loops have {loop['count']}: give "
                    "elche.epochs the same number on every rank"
                )
            self._continue_loop(loop)

    def _continue_loop(self, loop: Mapping[str, int]) -> None:
        """Continues the user's loop at another rank's position."""
        self.is_active = self._is_resumed = True
        self._epoch, self._passes = loop["epoch"], 0
        self._passes_done = loop["passes"]

    def end(self) -> None:
        """Makes the last checkpoint after a stopped loop, if none was made yet."""
        if self._config is not None and not self._has_ended:
            self.save(self._config.folder)

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the remaining epochs; see `elche.epochs`."""
        self.is_active = self.counts_epochs = True
        self._count = count
        if isinstance(self._run, Run) and self._run.worker.is_new:
            self._run.epochs.opening.join()
        folder = os.environ.get("ELCHE_RESUME")
        if folder and not self._is_resumed:
            self.resume(Path(folder))
        for epoch in range(self._epoch, count):
            self._epoch = epoch
            yield epoch
            self._epoch, self._passes, self._passes_done = epoch + 1, 0, 0
            wanted = self._agreed("the end of an epoch", asks=True)
            if wanted:
                self._save(epoch + 1, 0, wanted)

    def _agreed(self, where: str, *, asks: bool = False, is_end: bool = False) -> str:
        """Broadcasts rank 0's plan of checkpoints; "" if ``asks`` and none are due."""

        def made() -> str:
            if asks and not self.wants_cut():
                return ""
            self._run_id = self._run_id or uuid.uuid4().hex
            ends = is_end or self.wants_end()
            return json.dumps([self._run_id, self._names(is_end=ends), ends])

        return self._current.agree(made, where)

    def save(self, folder: Path) -> None:
        """Makes a checkpoint now; inside a loop, once all ranks have paused."""
        run, self.is_active = self._current, True
        if run.is_in_epoch:
            if why := run.why_no_cut:
                raise ConfigError(why)
            if run.rank == 0 and folder not in self._asked:
                self._asked.append(folder)
            return
        self._asked.append(folder)
        wanted = self._agreed("elche.save")
        self._save(self._epoch + bool(self._passes), 0, wanted)

    @property
    def _current(self) -> SavedRun:
        if self._run is None:
            raise ConfigError(
                "expected a run to save or resume: call elche.setup first"
            )
        return self._run

    def _plan_next(self) -> None:
        if self._config is not None:
            self._due_at_s = time.monotonic() + self._config.every_s

    def _save(self, epoch: int, passes: int, wanted: str) -> None:
        run = self._current
        self._asked.clear()
        self._run_id, names, self._has_ended = json.loads(wanted)
        if names:  # else the epoch is cut because ranks have died or join
            held = self._contents().capture({"epoch": epoch, "passes": passes})
            info = run.described() | {"epoch": epoch}
            self._plan_next()
        for folder, name in names:
            self._writer(Path(folder)).begin(name, held, info)
        if self._has_ended and names and run.rank == 0:
            run.notifications.emit(f"elche: last checkpoint: {'/'.join(names[-1])}")
        if self._has_ended and self._signals is not None:
            self._end_process()

    def _contents(self) -> SavedContents:
        assert self._contents_of is not None, "there is a run"
        return self._contents_of(self._registered)

    def _names(self, *, is_end: bool) -> list[tuple[str, str]]:
        """Returns folders and names of the checkpoints to make now; on rank 0.

        Folders whose last checkpoint is still being written are skipped.
        """
        folders = list(dict.fromkeys(self._asked))
        if (self._is_due or is_end) and self._config is not None:
            folders.append(self._config.folder)
        names = []
        for folder in folders:
            try:
                with contextlib.suppress(CheckpointError):  # logged already
                    if folder in self._writers:
                        self._writers[folder].wait(self._current.timeout_s / 2)
            except DeadlineError as error:
                logger.warning("no checkpoint: %s", error)
                continue
            names.append((str(folder), self._store(folder).next_name()))
        return names

    def _end_process(self) -> None:
        """Writes the last checkpoint and exits with the code of the signal."""
        for writer in self._writers.values():
            writer.close(AT_EXIT_S)
        name = self._stops.reason if self._stops is not None else ""
        raise SystemExit(128 + signal.Signals[name or "SIGTERM"])  # or another rank's

    def _store(self, folder: Path) -> CheckpointStore:
        return self._stores.setdefault(folder, CheckpointStore(folder))

    def _writer(self, folder: Path) -> CheckpointWriter:
        run, writer = self._current, self._writers.get(folder)
        place = run.rank, run.world_size
        if writer is None or (writer.rank, writer.world_size) != place:
            if writer is not None:
                writer.close(FAILED_S)
            id_, limit_s, store = self._run_id, run.timeout_s, self._store(folder)
            writer = CheckpointWriter(
                store, *place, id_, limit_s, lambda: run.world_size
            )
            writer.on_saved = lambda name, info: run.report_saved(
                f"{folder.resolve().name}/{name}: {_position(info)}"
            )
            self._writers[folder] = writer
        return writer

    def resume(self, folder: Path) -> bool:
        """Resumes from the newest checkpoint; see `elche.resume`."""
        run, self.is_active, self._is_resumed = self._current, True, True
        if isinstance(run, Run) and run.worker.is_new:
            return False  # its loop starts from the other ranks' position
        found = self._newest(folder)
        if found is None:
            return False
        shared = self._contents().load(found)
        run.resume(shared["run"], shared["epochs"])
        self._continue_loop(shared["loop"])
        if run.rank == 0:
            at = _position(run.described() | {"epoch": self._epoch})
            run.notifications.emit(f"elche: resuming from {found.path}: {at}")
        return True

    def _newest(self, folder: Path) -> Checkpoint | None:
        """Opens the newest checkpoint that rank 0 finds, on every rank."""
        run = self._current
        found: Checkpoint | None = None
        if run.is_in_epoch:
            raise ConfigError("elche.resume() inside a loop; call it before the first")

        def choose() -> str:
            nonlocal found
            found = self._store(folder).newest()
            if not found and (folder.is_file() or any(folder.glob("checkpoint-*"))):
                logger.warning(
                    "%s has no complete checkpoint: the run starts from scratch", folder
                )
            return "" if found is None else found.name

        name = run.agree(choose, "elche.resume")
        if not name:
            return None
        return found or self._store(folder).open(name)


def _position(info: Mapping[str, Any]) -> str:
    """Returns the progress in a manifest's ``info`` as text."""
    unit = "samples" if "samples" in info else "steps"
    return f"epoch {info['epoch']}, after {round(info[unit]):,} {unit}"
