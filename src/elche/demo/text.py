"""Characters of real text: the standard library's sources, or the user's own."""

from __future__ import annotations

import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from elche.errors import ConfigError

VOCABULARY_SIZE = 97
"""Newline, the 95 printable ASCII characters, and one symbol for all others."""

_OTHERS = re.compile(r"[^\n -~]")
_SKIPPED_DIRECTORIES = frozenset(
    (
        *("__pycache__", "dist-packages", "site-packages", "test", "tests"),
        *("encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "turtledemo"),
    )
)
_HELD_OUT_EVERY = 10


@dataclass(frozen=True)
class Corpus:
    """Encoded text in two disjoint parts, int64 (characters,), and its source."""

    train: Tensor
    held_out: Tensor
    source: str


def load_corpus(path: Path | None = None, max_chars: int = 4_000_000) -> Corpus:
    """Reads a text and splits it into a training and a held-out part.

    Holds out the last tenth of a file, or every tenth file of a directory. None reads
    the running interpreter's standard library, without tests and bundled packages.

    Raises:
        ConfigError: there is no text, or it cannot be read.
    """
    if path is not None and not path.is_dir():
        text = _read(path, max_chars)
        if not text.strip():
            raise ConfigError(f"the text {path} is empty; give a file with some text")
        cut = len(text) - len(text) // _HELD_OUT_EVERY
        return Corpus(encode(text[:cut]), encode(text[cut:]), str(path))
    root = Path(sysconfig.get_path("stdlib")) if path is None else path
    texts = list(_texts(_files(root, ".py" if path is None else ""), max_chars))
    held_out = "\n".join(texts[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])
    del texts[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    train = "\n".join(texts)
    if not train.strip() or not held_out.strip():
        raise ConfigError(
            f"found {len(texts)} text files in {root}, expected {_HELD_OUT_EVERY} or"
            " more that are not empty; name a text file or a directory with --text"
        )
    source = f"the files of {root}"
    if path is None:
        source = f"the sources of Python {platform.python_version()}'s standard library"
    return Corpus(encode(train), encode(held_out), source)


def encode(text: str) -> Tensor:
    """Encodes `text`, one symbol per character: int64 in [0, VOCABULARY_SIZE)."""
    if not text:
        return torch.empty(0, dtype=torch.int64)
    raw = bytearray(_OTHERS.sub("\x7f", text).encode("ascii"))
    return (torch.frombuffer(raw, dtype=torch.uint8).long() - 31).clamp(min=0)


@final
class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text at fixed, evenly spaced offsets.

    Item i is (x, y): `context` symbols and the symbol after each of them, both int64 of
    shape (context,). Windows overlap if `num_samples` exceeds the number of disjoint
    windows.

    Raises:
        ConfigError: the text has fewer than `num_samples` windows.
    """

    def __init__(self, symbols: Tensor, context: int, num_samples: int) -> None:
        offsets = symbols.numel() - context
        if not 0 < num_samples <= offsets:
            raise ConfigError(
                f"{num_samples} windows of {context} characters do not fit into a"
                f" text of {symbols.numel()} characters; give a longer text or ask"
                " for fewer samples (at least one)"
            )
        self.symbols = symbols
        self.context = context
        self.num_samples = num_samples
        self._spacing = offsets / num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        begin = int(index * self._spacing)
        end = begin + self.context
        return self.symbols[begin:end], self.symbols[begin + 1 : end + 1]


def _files(root: Path, suffix: str) -> list[Path]:
    """Files below `root` in a shuffled order that is the same everywhere."""
    found: list[Path] = []
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_DIRECTORIES]
        found += [Path(directory, name) for name in files if name.endswith(suffix)]
    names = {path.relative_to(root).as_posix(): path for path in found}
    shown = [name for name in names if "/." not in f"/{name}"]
    shown.sort(key=lambda name: (zlib.crc32(name.encode()), name))
    return [names[name] for name in shown]


def _texts(files: list[Path], max_chars: int) -> Iterator[str]:
    left = max_chars
    for path in files:
        if left <= 0:
            return
        text = _read(path, left)
        if "\0" not in text:  # skip binary files
            left -= len(text)
            yield text


def _read(path: Path, max_chars: int) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(max_chars)
    except OSError as error:
        raise ConfigError(f"cannot read the text {path}: {error}") from error
