"""Randomness of samples, by epoch and position, and of ranks."""

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
    return _seed_of(f"{seed}/{epoch}/{position}")


def rank_seed(seed: int, rank: int) -> int:
    """A seed for one rank, unrelated between ranks and seeds."""
    return _seed_of(f"{seed}/rank {rank}")


def _seed_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


@contextlib.contextmanager
def untraced_generators() -> Iterator[None]:
    """Restores the global generators of the training process at the end.

    A loader's process does not restore its own: nothing else draws from them.
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


def seed_process(seed: int | None, rank: int, feed: torch.Generator) -> None:
    """Seeds this process's generators, and that of its data.

    Without a seed only ranks above 0 get randomness of their own. A script that calls
    ``torch.manual_seed(0)`` would otherwise draw the same dropout masks on every rank.
    """
    if seed is not None:
        random.seed(rank_seed(seed, rank))
        torch.manual_seed(rank_seed(seed, rank))
    elif rank > 0:
        torch.manual_seed(rank_seed(torch.initial_seed(), rank))
    feed.manual_seed(rank_seed(torch.initial_seed(), rank))
