"""Randomness of samples: drawn by epoch and position, whatever process loads them."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import get_worker_info


def position_seed(seed: int, epoch: int, position: int) -> int:
    """The seed of a sample's augmentation, the same whatever rank loads it."""
    text = f"{seed}/{epoch}/{position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


@contextlib.contextmanager
def untraced_generators() -> Iterator[None]:
    """Leaves the global generators of the training process as they were.

    Those of a process that only loads are not put back: nothing else draws from them.
    """
    if get_worker_info() is not None:
        yield
        return
    numpy = _numpy_random()
    kept = random.getstate(), torch.get_rng_state()
    kept_numpy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        torch.set_rng_state(kept[1])
        if numpy is not None:
            numpy.set_state(kept_numpy)


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, torch's CPU and, if in use, numpy."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)


def _numpy_random() -> Any:
    """Numpy's global generator, if the program uses numpy at all."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random
