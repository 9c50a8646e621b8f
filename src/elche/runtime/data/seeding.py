"""Randomness of ranks: no two draw the same dropout mask."""

from __future__ import annotations

import hashlib
import random

import torch


def rank_seed(seed: int, rank: int) -> int:
    """A seed for one rank, unrelated between ranks and seeds."""
    digest = hashlib.blake2b(f"{seed}/rank {rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def seed_rank(seed: int, rank: int) -> None:
    """Seeds Python's and torch's generators of this process."""
    random.seed(rank_seed(seed, rank))
    torch.manual_seed(rank_seed(seed, rank))


def separate_rank(rank: int) -> None:
    """Gives ranks above 0 randomness of their own when no seed was asked for.

    A script that calls ``torch.manual_seed(0)`` would otherwise draw the same dropout
    masks on every rank. Rank 0 keeps the script's own.
    """
    if rank > 0:
        torch.manual_seed(rank_seed(torch.initial_seed(), rank))
