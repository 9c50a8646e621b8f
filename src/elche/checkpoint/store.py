"""A folder of checkpoints: finds complete ones, adds new ones, removes old ones.

::

    FOLDER/checkpoint-00000007/rank0.safetensors    tensors that only rank 0 holds
                               rank0.json           the rest of its state, checksums
                               shared.safetensors   state common to all ranks
                               shared.json
                               model.safetensors    the model alone; of a pipeline
                               model-rank0.safetensors    each rank's layers
                               manifest.json        written last, marks completeness

Opening a folder does not import torch; only reading or writing tensors does.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from elche.checkpoint.files import (
    check_file,
    make_folder,
    open_tensors,
    read_json,
    remove,
    sync_folder,
)
from elche.checkpoint.manifest import (
    MANIFEST,
    MODEL_FILE,
    MODEL_PART,
    SHARED,
    Manifest,
    OtherFormatError,
    part_of_rank,
    read_manifest,
    write_manifest,
)
from elche.checkpoint.weight_files import WeightFiles
from elche.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from elche.checkpoint.state_tree import StateTree

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"checkpoint-(\d{8,})")
_FILE: Final = re.compile(
    r"(rank\d+|shared|model(-rank\d+)?|manifest)\.(json|safetensors|failed)(\.partial)?"
)
"""Names of the files in a checkpoint's folder."""


@final
class Checkpoint:
    """A complete checkpoint. Files are verified by checksum before they are read.

    Args:
        path: folder of the checkpoint.
        manifest: manifest of the checkpoint.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._checked: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the folder; later checkpoints have higher numbers."""
        return self.manifest.name

    def check(self) -> None:
        """Verifies the checksum of every file.

        Raises:
            CheckpointError: a file is missing or damaged; the message names it.
        """
        for name in self.manifest.files:
            self._check(name)

    @cached_property
    def model(self) -> dict[str, Tensor]:
        """Tensors of the model by the uncompiled module's names."""
        stored = self._stored(MODEL_FILE)
        return {name: stored.get_tensor(name) for name in sorted(stored.keys())}

    def model_parts(self) -> Mapping[str, Tensor]:
        """Model that ranks wrote in parts; each tensor is read when asked for."""
        parts = [one for one in self.manifest.files if one.startswith(MODEL_PART)]
        for name in parts:
            self._check(name)
        return WeightFiles(self.path / name for name in sorted(parts))

    def shared(self) -> StateTree:
        """Reads the state that is common to all ranks."""
        return self._part(SHARED)

    def of_rank(
        self, rank: int, pick: Callable[[Any], Any] = lambda tree: tree
    ) -> StateTree:
        """Reads the state of one rank.

        Args:
            rank: rank below the manifest's world size.
            pick: selects the part of the tree to decode; other tensors are not read.

        Raises:
            CheckpointError: a file of the rank is damaged.
        """
        return self._part(part_of_rank(rank), pick)

    def _part(
        self, part: str, pick: Callable[[Any], Any] = lambda tree: tree
    ) -> StateTree:
        from elche.checkpoint.state_tree import decode

        self._check(f"{part}.json")
        content = read_json(self.path / f"{part}.json")
        own = self._stored(f"{part}.safetensors")

        def tensor(name: str, in_model: bool) -> Tensor:
            return self.model[name] if in_model else own.get_tensor(name)

        return decode(pick(content["tree"]), tensor)

    def _stored(self, name: str) -> Any:
        self._check(name)
        return open_tensors(self.path / name)

    def _check(self, name: str) -> None:
        if name not in self._checked:
            check_file(self.path / name, self.manifest.files[name])
            self._checked.add(name)


@final
class CheckpointStore:
    """Checkpoints of one run in a folder.

    Ranks write their parts, and rank 0 completes the checkpoint. Incomplete checkpoints
    are ignored, and removed when a later one is begun.

    Args:
        folder: folder of the checkpoints; need not exist.
        keep: number of newest complete checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep
        self._damaged: set[int] = set()

    def newest(self) -> Checkpoint | None:
        """Returns the newest complete checkpoint whose checksums match, or None.

        Damaged checkpoints are skipped with a log line.

        Raises:
            CheckpointError: another version of elche wrote the checkpoint.
        """
        for number in sorted(self._numbers(), reverse=True):
            path = self._path(number)
            if not (path / MANIFEST).exists():
                logger.info("%s is incomplete: skipped", path)
                continue
            try:
                checkpoint = Checkpoint(path, read_manifest(path))
                checkpoint.check()
            except OtherFormatError:
                raise
            except CheckpointError as error:
                logger.warning("%s is damaged: skipped: %s", path, error)
                self._damaged.add(number)
            else:
                return checkpoint
        return None

    def open(self, name: str) -> Checkpoint:
        """Opens a checkpoint by name, as chosen by another rank.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, or of another version.
        """
        try:
            return Checkpoint(self.folder / name, read_manifest(self.folder / name))
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from error

    def newest_name(self) -> str | None:
        """Name of the newest complete checkpoint, without verifying its files."""
        complete = self._complete()
        return self._path(complete[-1]).name if complete else None

    def next_name(self) -> str:
        """Name after all existing checkpoints, complete or not; called on rank 0."""
        return self._path(max(self._numbers(), default=0) + 1).name

    def begin(self, name: str) -> None:
        """Makes a checkpoint's folder, and removes earlier incomplete checkpoints.

        Raises:
            OSError: the folder cannot be made.
        """
        for number in self._numbers():
            path = self._path(number)
            if number < _number(name) and not (path / MANIFEST).exists():
                self._remove(path)
        make_folder(self.folder / name)

    def complete(self, manifest: Manifest) -> None:
        """Completes a checkpoint, and removes those beyond the number to keep.

        Raises:
            OSError: the manifest cannot be written; the checkpoint stays incomplete.
        """
        write_manifest(self.folder / manifest.name, manifest)
        self._damaged.discard(_number(manifest.name))
        kept = [n for n in self._complete() if n not in self._damaged][-self._keep :]
        for number in self._numbers():
            if number < kept[0]:
                self._remove(self._path(number))

    def drop(self, name: str) -> None:
        """Removes an incomplete checkpoint to free disk space."""
        if not (self.folder / name / MANIFEST).exists():
            self._remove(self.folder / name)

    def _remove(self, path: Path) -> None:
        """Removes a checkpoint, manifest first, so a half-removed one is incomplete.

        For a symbolic link, removes only the link. Foreign files and their folder stay.
        """
        with contextlib.suppress(OSError):
            if path.is_symlink():
                remove(path)
                return
            if (path / MANIFEST).exists():
                remove(path / MANIFEST)
                sync_folder(path)
            for file in path.iterdir():
                if _FILE.fullmatch(file.name):
                    remove(file)
            remove(path)

    def _complete(self) -> list[int]:
        """Numbers of the complete checkpoints in ascending order."""
        return sorted(n for n in self._numbers() if (self._path(n) / MANIFEST).exists())

    def _numbers(self) -> list[int]:
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError:
            return []
        return [int(found[1]) for found in map(_NAME.fullmatch, names) if found]

    def _path(self, number: int) -> Path:
        return self.folder / f"checkpoint-{number:08d}"


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])
