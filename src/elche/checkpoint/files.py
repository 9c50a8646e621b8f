"""Files of a checkpoint: written atomically, with checksums.

Calls that change the disk are spelled ``os.function``, so tests can replace ``os``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elche.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES: Final = 1 << 22
PARTIAL: Final = ".partial"
_CODES: Final = {
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "complex64": "C64",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""safetensors' names of dtypes; other dtypes are stored as bytes."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Length and digest of one file.

    Attributes:
        num_bytes: file length.
        sha256: hexadecimal checksum of the file.
    """

    num_bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[memoryview]) -> FileRecord:
    """Writes a partial file and renames it when complete.

    Raises:
        OSError: the file cannot be written; a file that had the name before stays.
    """
    digest, length = hashlib.sha256(), 0
    partial = path.with_name(path.name + PARTIAL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    descriptor = os.open(partial, flags, 0o666)
    try:
        for chunk in chunks:
            for start in range(0, len(chunk), CHUNK_BYTES):
                piece = chunk[start : start + CHUNK_BYTES]
                digest.update(piece)
                length += len(piece)
                while piece:
                    piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)  # a full disk needs the room
        raise
    finally:
        os.close(descriptor)
    os.replace(partial, path)
    sync_folder(path.parent)
    return FileRecord(length, digest.hexdigest())


def make_folder(path: Path) -> None:
    """Makes a folder durably: it survives a power failure."""
    if not path.is_dir():
        os.makedirs(path, exist_ok=True)
        sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, or an empty folder."""
    if path.is_dir() and not path.is_symlink():
        os.rmdir(path)
    else:
        os.unlink(path)


def sync_folder(path: Path) -> None:
    """Flushes the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> FileRecord:
    """Writes a JSON file; see :func:`write_file`."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return write_file(path, [memoryview(data)])


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Writes a safetensors file one tensor at a time, without copying all.

    Tensors of dtypes that the format lacks are stored as bytes.
    """
    return write_file(path, _tensor_chunks(tensors))


def packed_tensors(tensors: Mapping[str, Tensor]) -> bytearray:
    """Returns the bytes that `write_tensors` would write."""
    return bytearray().join(_tensor_chunks(tensors))


def unpacked_tensors(raw: bytearray) -> dict[str, Tensor]:
    """Returns the tensors in bytes from `packed_tensors`."""
    from safetensors.torch import load

    return load(bytes(raw))


def _tensor_chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Largest item size first, so that each tensor is aligned to its own item size.
    codes = {name: _CODES.get(name_of(t.dtype)) for name, t in tensors.items()}
    items = {n: t.element_size() if codes[n] else 1 for n, t in tensors.items()}
    names = sorted(tensors, key=lambda name: (-items[name], name))
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        native = codes[name]
        header[name] = {
            "dtype": native or "U8",
            "shape": list(tensor.shape) if native else [end - begin],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield _bytes_of(tensors[name])


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # type: ignore[arg-type]  # numpy's stubs before 3.12


def name_of(dtype: Any) -> str:
    """Name of a dtype without the prefix ``torch.``."""
    return str(dtype).removeprefix("torch.")


def record_of(path: Path) -> FileRecord:
    """Reads a whole file and returns its length and checksum.

    Raises:
        CheckpointError: the file is missing or unreadable.
    """
    digest, length = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                length += len(chunk)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    return FileRecord(length, digest.hexdigest())


def check_file(path: Path, expected: FileRecord) -> None:
    """Compares a file with its recorded length and checksum.

    Raises:
        CheckpointError: the file is missing, truncated or changed.
    """
    found = record_of(path)
    if found.num_bytes != expected.num_bytes:
        raise CheckpointError(
            f"{path.name} has {found.num_bytes} bytes instead of {expected.num_bytes}"
        )
    if found.sha256 != expected.sha256:
        raise CheckpointError(f"{path.name} does not match its recorded checksum")


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        CheckpointError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name} is truncated or not JSON") from None


def open_tensors(path: Path) -> Any:
    """Opens a safetensors file, whose `get_tensor` reads tensors on demand.

    Raises:
        CheckpointError: the file is missing, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
