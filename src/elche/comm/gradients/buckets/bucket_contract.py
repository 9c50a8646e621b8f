"""Inputs of a pass over buckets, and the interface of its owner."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from elche.errors import ConfigError

Strategy = Literal["overlapped", "synchronous"]


@dataclass(slots=True)
class Reduced:
    """Record of the gradients that are sums of ranks, by ids of parameters.

    Attributes:
        given: what the last pass that was reduced left each parameter with.
        passes: such passes so far.
        strays: parameters that another pass has come to since.
    """

    given: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    passes: int = 0
    strays: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Options of packing, sending and returning gradients.

    Attributes:
        cap_bytes: most bytes of gradients in a bucket.
        strategy: ``"overlapped"`` sends a bucket as soon as it is full,
            ``"synchronous"`` all of them at the end of backward.
        as_views: ``p.grad`` becomes a view of the reduced bucket; else the sum is
            copied into the gradient's own memory.
        keeps_strides: in a message a parameter lies as in memory; False: as its shape
            says, for ranks of other memory formats. Then ``as_views`` must be False.
        codec: how float32 and half precision gradients travel, with error feedback.
        delayed: sums are handed out at the end of the next pass, so that a message is
            filled before all ranks have taken the last one; strategy "synchronous".
        keeps_sums: a sum is kept as it came until the next one has, for ranks that lack
            it when another has died.
        reduced: records which gradients are sums.

    Raises:
        ConfigError: a value is not one of these.
    """

    cap_bytes: int
    strategy: Strategy = "overlapped"
    as_views: bool = True
    keeps_strides: bool = True
    codec: str = "fp32"
    delayed: bool = False
    keeps_sums: bool = False
    reduced: Reduced = field(default_factory=Reduced)

    def __post_init__(self) -> None:
        if self.cap_bytes < 1:
            raise ConfigError(f"expected cap_bytes of at least 1, got {self.cap_bytes}")
        if self.strategy not in ("overlapped", "synchronous"):
            raise ConfigError(
                f"expected strategy 'overlapped' or 'synchronous', got {self.strategy}"
            )
        if self.as_views and not self.keeps_strides:
            raise ConfigError(
                "expected as_views=False with keeps_strides=False: a view of a message "
                "would not lie as its parameter does"
            )


@dataclass(frozen=True, slots=True)
class Closed:
    """Values that the ranks agreed on in a pass.

    Attributes:
        source: the lowest rank whose gradients counted; None: no rank's did.
        factor: what the sums are multiplied by to be what the owner promises.
    """

    source: int | None = 0
    factor: float = 1.0


class Owner(Protocol):
    """Decides when gradients are reduced and how they weigh."""

    def takes(self, parameter: torch.Tensor) -> bool:
        """A gradient has been accumulated: whether it belongs to a reduction."""

    def open_pass(self, side: int) -> float:
        """A pass begins; returns what this rank's gradients are multiplied by."""

    def close_pass(self, side: int) -> Closed:
        """All buckets have arrived; agrees on the rest with all ranks."""
