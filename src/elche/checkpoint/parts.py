"""The parts of a checkpoint: one per rank, the shared one, and the model alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elche.checkpoint.files import (
    Disk,
    FileRecord,
    read_json,
    record_of,
    write_json,
    write_tensors,
)
from elche.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SHARED: Final = "shared"
MODEL_FILE: Final = "model.safetensors"
MODEL_PART: Final = "model-rank"
"""Prefix of the model files that ranks write in parts."""

Records = dict[str, FileRecord]
"""Written files, by name."""


def part_of_rank(rank: int) -> str:
    """Name of a rank's files, without suffix."""
    return f"rank{rank}"


def write_part(
    disk: Disk,
    path: Path,
    run_id: str,
    tree: Any,
    tensors: Mapping[str, Tensor],
    before: Mapping[str, FileRecord] | None = None,
) -> Records:
    """Writes one part: its tensors, and then the rest, which says that it is there.

    Args:
        disk: what changes the disk.
        path: of the part, without its files' endings.
        run_id: to know by whether it belongs to this checkpoint.
        tree: the state without its tensors, as JSON has it.
        tensors: those.
        before: what the rank has written besides, which the part is to name.

    Raises:
        OSError: it cannot be written.
    """
    name = f"{path.name}.safetensors"
    files: Records = dict(before or {})
    files[name] = write_tensors(disk, path.with_name(name), tensors)
    named = {name: asdict(each) for name, each in files.items()}
    content = {"run_id": run_id, "files": named, "tree": tree}
    rest = f"{path.name}.json"
    return {**files, rest: write_json(disk, path.with_name(rest), content)}


def written_part(folder: Path, rank: int, run_id: str) -> Records | None:
    """Records of the files that a rank has written; None until it has.

    Raises:
        CheckpointError: it says that it cannot, or what it wrote cannot be read.
    """
    part = part_of_rank(rank)
    refusal, rest = folder / f"{part}.failed", folder / f"{part}.json"
    if refusal.exists():
        why = refusal.read_text(encoding="utf-8") or "no room even for the reason"
        raise CheckpointError(f"rank {rank} could not write its part: {why}")
    content = read_json(rest) if rest.exists() else {}
    if content.get("run_id") != run_id:
        return None
    records = {name: FileRecord(**each) for name, each in content["files"].items()}
    return {**records, rest.name: record_of(rest)}


def refuse_part(disk: Disk, folder: Path, rank: int, why: str) -> None:
    """Says to rank 0 that a part will not come, as far as the disk lets it."""
    with contextlib.suppress(OSError):
        descriptor = disk.create(folder / f"{part_of_rank(rank)}.failed")
        try:
            disk.write(descriptor, memoryview(why.encode()))
        finally:
            os.close(descriptor)
