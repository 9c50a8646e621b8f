"""What is compared: how ranks share the work and bring their parameters together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

STATES = ("local", "average", "reset", "late", "second")
EARLY = 0.2
"""Part of a run that is its beginning, and that is its end."""
LONGEST = 20
"""The most times by which windows grow."""
OUTERS = ("average", "nesterov", "slowmo")
FLEETS: dict[str, tuple[float, ...]] = {
    "1": (1.0,),
    "1:4": (1.0, 0.25),
    "1:1:2:4": (1.0, 1.0, 0.5, 0.25),
    "8 mixed": (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25),
    "4 unequal": (1.0, 0.67, 0.4, 0.25),
}
"""Relative speeds, fastest first; named by the times of a batch."""
OPTIMIZERS = ("adamw", "sgd", "muon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train.

    Attributes:
        fleet: a name in ``FLEETS``.
        batches_per_step: of one device only: batches in a step's gradient. As many as
            there are ranks is DDP, as many as fit in a window a gradient window.
        cut: local batches that a batch of the task is cut into. With as many as there
            are ranks the global batch is that of one device: elche's windows.
        delay: of one device only: steps that a gradient is late.
        extrapolated: such a gradient is taken where the parameters will be if the last
            step is repeated as often.
        anchor: batches of the slowest rank in a window.
        first_anchor: a shorter anchor for the first fifth of the run; 0 for none.
        last_anchor: a shorter anchor for the last fifth; 0 for none.
        growth: after the warm-up windows are longer by the learning rate's factor to
            the power of minus this, at most 20 times.
        first_sync: first part of the run in which all ranks take common steps with the
            mean gradient of a batch of each.
        first_batches: batches in such a step, if not one of each rank. With 1 they are
            the steps of one device, and of elche's ``sync``.
        last_sync: such a part at the end; it begins with the mean of the ranks' states.
        lag: ticks (batches of the fastest rank) from the snapshot to the adoption of a
            mean; −1 for a whole window.
        weights: of the drifts: ``"equal"``, ``"samples"`` or ``"sqrt"``.
        state: of the optimizer at a synchronisation: ``"local"``, ``"average"``,
            ``"reset"``, ``"second"`` (Adam's second moment is averaged, the first
            stays), or ``"late"`` (averaged, and adopted as a correction, with the
            parameters).
        outer: ``"average"``, ``"nesterov"`` or ``"slowmo"``.
        outer_lr: rate of the outer step.
        outer_momentum: its momentum.
        fade: last part of the run in which the outer momentum falls linearly to zero.
        warm_up: first part of the run in which the learning rate rises.
        rewarm: ticks after a synchronisation over which the learning rate rises
            linearly to the schedule's; 0 for none.
        anticipate: the momentum's part of an outer step, which every rank knows, is
            taken when the snapshot is, and only the rest when the mean is there.
        top: part of a drift that is sent, the largest elements of each rank; what is
            not sent stays in the rank's own parameters. Of one device: part of every
            batch's gradient, and what is not sent is added to the next one.
        mix: part of the way to the mean that a rank goes; the outer step beyond the
            mean it takes whole, so that the ranks' mean is the consensus.
        codec: how drifts travel, with error feedback; of one device: gradients.
        optimizer: ``"adamw"``, ``"sgd"`` (momentum 0.9) or ``"muon"`` (for hidden
            matrices, with AdamW for the rest).

    Raises:
        ValueError: a value is unknown, or two do not go together.
    """

    fleet: str = "1"
    batches_per_step: int = 1
    cut: int = 1
    delay: int = 0
    extrapolated: bool = False
    anchor: int = 1
    first_anchor: int = 0
    last_anchor: int = 0
    growth: float = 0.0
    first_sync: float = 0.0
    first_batches: int = 0
    last_sync: float = 0.0
    lag: int = 0
    weights: str = "equal"
    state: str = "average"
    outer: str = "average"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    fade: float = 0.0
    warm_up: float = 0.05
    rewarm: int = 0
    anticipate: bool = False
    top: float = 1.0
    mix: float = 1.0
    codec: str = "fp32"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("fleet", self.fleet, tuple(FLEETS)),
            ("weights", self.weights, ("equal", "samples", "sqrt")),
            ("state", self.state, STATES),
            ("outer", self.outer, OUTERS),
            ("optimizer", self.optimizer, OPTIMIZERS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known are {known}")
        if self.outer == "average" and (self.outer_lr, self.outer_momentum) != (1, 0):
            raise ValueError("plain averaging has rate 1 and no momentum")
        for name, anchor in (("first", self.first_anchor), ("last", self.last_anchor)):
            if anchor > self.anchor:
                raise ValueError(f"{name} anchor {anchor} is longer than {self.anchor}")
        if self.first_sync + self.last_sync >= 1.0:
            raise ValueError("between the common steps no part of the run is left")
        if self.first_batches and (self.first_sync == 0.0 or self.last_sync > 0.0):
            raise ValueError("first_batches needs common steps at the beginning only")
        if self.extrapolated and self.delay == 0:
            raise ValueError("only gradients that are late are extrapolated")
        if self.state == "late" and self.lag == 0:
            raise ValueError("state 'late' needs a lag")
        if self.state in ("average", "second") and self.lag != 0:
            raise ValueError("averaged state cannot come late; use state 'late'")
        if self.mix != 1.0 and (self.weights, self.top) != ("equal", 1.0):
            raise ValueError("going part of the way needs equal weights, whole drifts")

    @property
    def speeds(self) -> tuple[float, ...]:
        """Relative speeds of the ranks, fastest first."""
        return FLEETS[self.fleet]

    def rate_at(self, progress: float) -> float:
        """Factor on the learning rate: linear warm-up, then half a cosine to zero.

        Args:
            progress: samples trained on over samples of the run.
        """
        if progress < self.warm_up:
            return progress / self.warm_up
        along = (progress - self.warm_up) / (1.0 - self.warm_up)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, along)))

    def anchor_at(self, progress: float) -> int:
        """Batches of the slowest rank in a window, after a part of the run."""
        if self.first_anchor and progress < EARLY:
            return self.first_anchor
        if self.last_anchor and progress >= 1.0 - EARLY:
            return self.last_anchor
        if self.growth and progress > self.warm_up:
            factor: float = self.rate_at(progress) ** self.growth
            return round(self.anchor / max(factor, 1.0 / LONGEST))
        return self.anchor

    def momentum_at(self, progress: float) -> float:
        """Momentum of an outer step after a part of the run."""
        left = 1.0 - progress
        return self.outer_momentum * (left / self.fade if left < self.fade else 1.0)

    def active_at(self, tick: int) -> list[int]:
        """Ranks that end a batch at a tick, counted from 1."""
        return [
            rank
            for rank, speed in enumerate(self.speeds)
            if math.floor(tick * speed + 1e-9) > math.floor((tick - 1) * speed + 1e-9)
        ]

    def window_ticks(self, anchor: int) -> int:
        """Batches of the fastest rank in a window."""
        return round(anchor / self.speeds[-1])

    def as_dict(self) -> dict[str, Any]:
        """Those settings that are not the defaults: a result's key."""
        defaults = asdict(Method())
        return {k: v for k, v in asdict(self).items() if v != defaults[k]}
