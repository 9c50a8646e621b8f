"""A thread that writes a rank's part of each checkpoint in the background.

It works on copies, so the training thread waits neither for the disk nor for other
ranks. A checkpoint that cannot be written causes a warning, not a failure.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from elche.checkpoint.capture import Captured
from elche.checkpoint.files import (
    FileRecord,
    make_folder,
    read_json,
    record_of,
    write_json,
    write_tensors,
)
from elche.checkpoint.manifest import SHARED, Manifest, part_of_rank
from elche.checkpoint.store import CheckpointStore
from elche.errors import CheckpointError, DeadlineError, ElcheError

logger = logging.getLogger(__name__)

POLL_S = 0.05
Records = dict[str, FileRecord]
"""Written files, by name."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One checkpoint to be written; ``info`` is for rank 0's manifest."""

    name: str
    held: Captured
    info: Mapping[str, Any] | None


@final
class CheckpointWriter:
    """Writes one rank's parts, and on rank 0 also the manifest.

    Args:
        store: store to write to; the same folder on all ranks.
        rank: index of this rank.
        world_size: number of ranks that write parts.
        run_id: ID of this start of the run, the same on all ranks.
        deadline_s: time limit of rank 0's wait for another rank's part.
        living: returns the number of live ranks; None: all ranks stay alive.

    Attributes:
        on_saved: called in rank 0's thread with a complete checkpoint's name and info.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rank: int,
        world_size: int,
        run_id: str,
        deadline_s: float,
        living: Callable[[], int] | None = None,
    ) -> None:
        self.on_saved: Callable[[str, Any], None] = lambda name, info: None
        self._living = living
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._run_id = run_id
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # the first is being written
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._failure: str | None = None

    @property
    def is_busy(self) -> bool:
        """True if a checkpoint is queued or being written."""
        with self._changed:
            return bool(self._jobs)

    def begin(self, name: str, held: Captured, info: Mapping[str, Any]) -> None:
        """Queues a checkpoint for the writer thread and returns at once.

        Args:
            name: name of the checkpoint, from rank 0's `CheckpointStore.next_name`.
            held: captured state to write.
            info: plain JSON for rank 0's manifest, read before the tensors.
        """
        job = _Job(name, held, None if self.rank else dict(info))
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._write_all, name="elche-checkpoints", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Waits until all queued checkpoints are written; on rank 0, by all ranks.

        Raises:
            CheckpointError: the last checkpoint could not be written.
            DeadlineError: writing takes longer than `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._jobs, timeout_s):
                raise DeadlineError(
                    f"rank {self.rank} waited {timeout_s:g} s for {self._jobs[0].name}"
                    f" to be written to {self._store.folder}"
                )
            if self._failure is not None:
                raise CheckpointError(self._failure)

    def close(self, timeout_s: float) -> None:
        """Ends the thread once all checkpoints are written or the time is over."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._jobs, timeout_s):
                name = self._jobs[0].name
                logger.warning("gave up %s: not written within %g s", name, timeout_s)
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(POLL_S * 20)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs[0]
            failure = self._try(job)
            if failure is None and job.info is not None:
                with contextlib.suppress(ElcheError):  # the training thread notices
                    self.on_saved(job.name, job.info)
            with self._changed:
                self._failure = failure
                self._jobs.popleft()
                self._changed.notify_all()

    def _try(self, job: _Job) -> str | None:
        try:
            self._write(job)
        except (OSError, TypeError, ValueError, ElcheError) as error:
            failure = f"rank {self.rank} could not write {job.name} to "
            failure += f"{self._store.folder}: {error}"
            logger.warning("%s; training continues without it", failure)
            if self.rank == 0:
                self._store.drop(job.name)
            else:  # tell rank 0, if the disk allows it
                name = f"{part_of_rank(self.rank)}.failed"
                with contextlib.suppress(OSError):
                    path = self._store.folder / job.name / name
                    path.write_text(str(error), encoding="utf-8")
            return failure
        return None

    def _write(self, job: _Job) -> None:
        begun_s = time.monotonic()
        store, folder = self._store, self._store.folder / job.name
        if job.info is None:
            make_folder(folder)
        else:
            store.begin(job.name)
        files: Records = {}
        if job.held.model:
            name = job.held.model_file
            files[name] = write_tensors(folder / name, job.held.model)
        before = dict(files)
        parts = {part_of_rank(self.rank): job.held.own}
        parts |= {} if self.rank else {SHARED: job.held.shared}
        for part, (tree, tensors) in parts.items():
            files |= _write_part(folder / part, self._run_id, tree, tensors, before)
        if job.info is None:
            return
        for rank in range(1, self.world_size):
            files |= self._part_of(rank, job.name)
        store.complete(
            Manifest(
                name=job.name,
                run_id=self._run_id,
                world_size=self.world_size,
                info=job.info,
                files=files,
            )
        )
        took_s = time.monotonic() - begun_s
        megabytes = sum(record.num_bytes for record in files.values()) / 1e6
        logger.info("%s is complete: %.1f MB in %.1f s", folder, megabytes, took_s)

    def _part_of(self, rank: int, name: str) -> Records:
        folder = self._store.folder / name
        until_s = time.monotonic() + self._deadline_s
        while (found := _written_part(folder, rank, self._run_id)) is None:
            if self._living is not None and self._living() < self.world_size:
                raise CheckpointError("a rank has died before all parts were written")
            with self._changed:
                if self._is_closed or time.monotonic() > until_s:
                    raise DeadlineError(
                        f"rank {rank}'s part did not arrive within "
                        f"{self._deadline_s:g} s; do all ranks see the same folder?"
                    )
                self._changed.wait_for(lambda: self._is_closed, POLL_S)
        return found


def _write_part(
    path: Path, run_id: str, tree: Any, tensors: Mapping[str, Tensor], before: Records
) -> Records:
    """Writes one part: first its tensors, then the JSON file that marks it complete.

    Args:
        path: path of the part without file extension.
        run_id: ID that marks the part as belonging to this start of the run.
        tree: state as JSON, without its tensors.
        tensors: tensors of the state by name.
        before: records of the rank's earlier files, which the part lists too.

    Raises:
        OSError: a file cannot be written.
    """
    name = f"{path.name}.safetensors"
    files = {**before, name: write_tensors(path.with_name(name), tensors)}
    named = {name: asdict(each) for name, each in files.items()}
    content = {"run_id": run_id, "files": named, "tree": tree}
    rest = f"{path.name}.json"
    return {**files, rest: write_json(path.with_name(rest), content)}


def _written_part(folder: Path, rank: int, run_id: str) -> Records | None:
    """Returns records of the files that a rank has written; None until they exist.

    Raises:
        CheckpointError: the rank reported a failure, or its files are unreadable.
    """
    part = part_of_rank(rank)
    refusal, rest = folder / f"{part}.failed", folder / f"{part}.json"
    if refusal.exists():
        why = refusal.read_text(encoding="utf-8") or ("no disk space for the reason")
        raise CheckpointError(f"rank {rank} could not write its part: {why}")
    content = read_json(rest) if rest.exists() else {}
    if content.get("run_id") != run_id:
        return None
    records = {name: FileRecord(**each) for name, each in content["files"].items()}
    return {**records, rest.name: record_of(rest)}
