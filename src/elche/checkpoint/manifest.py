"""Manifest of a checkpoint: written last, lists all files with their checksums."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from elche.checkpoint.files import FileRecord, read_json, write_json
from elche.errors import CheckpointError

FORMAT: Final = 2
"""Format version; incremented when older files become unreadable."""
MANIFEST: Final = "manifest.json"
SHARED: Final = "shared"
"""Name, without suffix, of the files of the state common to all ranks."""
MODEL_FILE: Final = "model.safetensors"
MODEL_PART: Final = "model-rank"
"""Prefix of the model files that ranks write in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a complete checkpoint.

    Attributes:
        name: name of the checkpoint and of its folder.
        run_id: ID of the run's start that wrote the checkpoint.
        world_size: number of ranks that wrote a part.
        info: plain JSON that a run needs before it reads the rest.
        files: length and checksum by file name.
        versions: versions of elche, torch and Python.
        format: format version of the files.
    """

    name: str
    run_id: str
    world_size: int
    info: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str] = field(default_factory=lambda: _versions())
    format: int = FORMAT


def part_of_rank(rank: int) -> str:
    """Name of a rank's files, without suffix."""
    return f"rank{rank}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, which completes a checkpoint.

    Raises:
        OSError: the manifest cannot be written.
    """
    body = asdict(manifest)
    write_json(folder / MANIFEST, {"manifest": body, "sha256": _digest(body)})


class OtherFormatError(CheckpointError):
    """Raised for a checkpoint written by another version of elche."""


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint.

    Raises:
        OtherFormatError: another version of elche wrote the checkpoint.
        CheckpointError: the manifest is damaged.
    """
    whole = read_json(folder / MANIFEST)
    if not isinstance(whole, dict) or not isinstance(whole.get("manifest"), dict):
        raise CheckpointError(f"{MANIFEST} was not written by elche")
    body = whole["manifest"]
    if whole.get("sha256") != _digest(body):
        raise CheckpointError(f"{MANIFEST} does not match its checksum")
    try:
        if body.get("format") != FORMAT:
            own = metadata.version("elche")
            raise OtherFormatError(
                f"expected a checkpoint of format {FORMAT}, which elche {own} reads, "
                f"got format {body.get('format')} by elche "
                f"{body.get('versions', {}).get('elche', 'of unknown version')} in "
                f"{folder}; resume with that version, or from another folder"
            )
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        manifest = Manifest(**{**body, "files": files})
        texts = manifest.run_id, *(each.sha256 for each in files.values())
        numbers = manifest.world_size, *(each.num_bytes for each in files.values())
        is_own = manifest.name == folder.name and type(manifest.info) is dict
        is_own &= {*map(type, texts)} == {str} and {*map(type, numbers)} == {int}
    except (AttributeError, KeyError, TypeError):
        is_own = False
    if not is_own:
        raise CheckpointError(f"{MANIFEST} has fields that elche does not write there")
    return manifest


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    return {
        **{name: metadata.version(name) for name in ("elche", "torch")},
        "python": platform.python_version(),
    }
