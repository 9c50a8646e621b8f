"""How a feature's run compares with plain PyTorch, and with what was declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.features.feature import Feature

BOUNDS = {"E": 1e-5, "R": 2e-3, "D": 1e-5}
"""Largest distance of parameters under ``sync``, where it is bounded."""


@dataclass(frozen=True)
class Verdict:
    """A feature under one policy.

    Attributes:
        refused: the error's first line, or "".
        distance: norm of the difference from the plain parameters, over theirs.
        ranks_equal: whether all ranks end with the same bits.
        samples: that all ranks have trained on, and those of plain PyTorch.
        lr: learning rate at the end on each rank, and plain.
        said: what the run wrote to stderr meanwhile.
    """

    refused: str = ""
    distance: float = 0.0
    ranks_equal: bool = True
    samples: tuple[int, int] = (0, 0)
    lr: tuple[tuple[float, ...], float] = ((), 0.0)
    said: tuple[str, ...] = ()

    @property
    def differs(self) -> set[str]:
        """What of ranks, samples and learning rate is not as plain."""
        rates, rate = self.lr
        is_same = {
            "ranks": self.ranks_equal,
            "samples": self.samples[0] == self.samples[1],
            "lr": all(abs(each - rate) <= 1e-6 * rate + 1e-9 for each in rates),
        }
        return {name for name, same in is_same.items() if not same}

    def is_declared(self, feature: Feature, policy: str) -> bool:
        """Whether a policy does what is declared of it; ``auto``: one of both."""
        under_sync = self._fits(feature.sync, BOUNDS)
        in_windows = self._fits(feature.windows, {})
        if policy == "auto":
            return under_sync or in_windows
        return under_sync if policy == "sync" else in_windows

    def _fits(self, declared: str, bounds: dict[str, float]) -> bool:
        kind, _, named = declared.partition(" ")
        if kind == "N" or self.refused:
            return kind == "N" and bool(self.refused) and named in self.refused
        found, expected = self.differs, {*named.split()}
        if not self.distance <= bounds.get(kind, float("inf")):
            found.add("parameters")
        return found <= expected if kind == "L" else found == expected

    @property
    def text(self) -> str:
        """A cell of the table."""
        if self.refused:
            return "refused"
        return " ".join([f"{self.distance:.0e}", *sorted(self.differs)])


def compare(ranks: Sequence[dict[str, Any]], plain: dict[str, Any]) -> Verdict:
    """How ranks' results compare with the plain one."""
    first, want = ranks[0]["state"], _vector(plain)
    return Verdict(
        distance=float((_vector(ranks[0]) - want).norm() / want.norm()),
        ranks_equal=all(
            torch.equal(first[name], each["state"][name])
            for each in ranks[1:]
            for name in first
        ),
        samples=(_samples(ranks), _samples([plain])),
        lr=(tuple(each["lr"][0] for each in ranks), plain["lr"][0]),
    )


def _vector(result: dict[str, Any]) -> torch.Tensor:
    return torch.cat([each.double().flatten() for each in result["state"].values()])


def _samples(ranks: Sequence[dict[str, Any]]) -> int:
    return sum(samples for each in ranks for _, samples in each["losses"])
