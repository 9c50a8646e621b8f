"""What is compared: how ranks share the work and bring their parameters together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

OUTERS = ("average", "nesterov")
OPTIMIZERS = ("adamw", "sgd", "muon")
WARM_UP = 0.05
"""First part of a run in which the learning rate rises."""
FLEETS: dict[str, tuple[float, ...]] = {
    "1": (1.0,),
    "2": (1.0, 0.25),
    "4": (1.0, 0.67, 0.4, 0.25),
    "8": (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25),
    "8 equal": (1.0,) * 8,
}
"""Relative speeds, fastest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        fleet: a name in ``FLEETS``.
        cut: local batches that a batch of the task is cut into. With as many as there
            are ranks the global batch is that of one device: elche's windows.
        anchor: local batches of the slowest rank in a window.
        lag: ticks (local batches of the fastest rank) from the snapshot to the adoption
            of a mean; −1 for a whole window.
        outer: ``"average"`` or ``"nesterov"``.
        outer_lr: rate of the outer step.
        outer_momentum: its momentum.
        codec: how drifts travel, with error feedback.
        optimizer: ``"adamw"``, ``"sgd"`` (momentum 0.9) or ``"muon"`` (for hidden
            matrices, with AdamW for the rest).

    Raises:
        ValueError: a value is unknown, or two do not go together.
    """

    fleet: str = "1"
    cut: int = 1
    anchor: int = 1
    lag: int = 0
    outer: str = "average"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    codec: str = "fp32"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("fleet", self.fleet, tuple(FLEETS)),
            ("outer", self.outer, OUTERS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known are {known}")
        if self.outer == "average" and (self.outer_lr, self.outer_momentum) != (1, 0):
            raise ValueError("plain averaging has rate 1 and no momentum")

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speeds of the ranks, fastest first."""
        return FLEETS[self.fleet]

    def rate_at(self, progress: float) -> float:
        """Factor on the learning rate: linear warm-up, then half a cosine to zero.

        Args:
            progress: samples trained on over samples of the run.
        """
        if progress < WARM_UP:
            return progress / WARM_UP
        along = (progress - WARM_UP) / (1.0 - WARM_UP)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, along)))

    def active_at(self, tick: int) -> list[int]:
        """Ranks that end a batch at a tick, counted from 1."""
        return [
            rank
            for rank, speed in enumerate(self.speeds)
            if math.floor(tick * speed + 1e-9) > math.floor((tick - 1) * speed + 1e-9)
        ]

    @property
    def window_ticks(self) -> int:
        """Batches of the fastest rank in a window."""
        return round(self.anchor / self.speeds[-1])

    def as_dict(self) -> dict[str, Any]:
        """Those settings that are not the defaults: a result's key."""
        defaults = asdict(Method())
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}
