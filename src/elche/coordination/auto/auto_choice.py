"""``auto``: the choice in force, with what it rests on. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from elche.cadence.chooser import Choice, Chooser
from elche.coordination.auto.auto_gauge import Gauge

USUAL_EPOCHS = 10
"""Assumed number of epochs when ``epochs=`` is not given."""


@final
class MeasuredChoice:
    """A first choice by what was measured, which may become another one.

    Args:
        gauge: what measures.
        chooser: chooses.
        batch_size: samples of a batch.

    Attributes:
        gauge: what measures.
        now: the choice as it is now.
        averages_gradients: the update rule, which the first choice fixes: gradients of
            every step, or parameters after windows. One device alone takes steps.
    """

    def __init__(self, gauge: Gauge, chooser: Chooser, batch_size: int) -> None:
        self.gauge = gauge
        self._chooser = chooser
        self.now: Choice = chooser.observe(gauge.cluster(batch_size))
        self.averages_gradients = self.now.is_alone or not self.wants_windows

    @property
    def wants_windows(self) -> bool:
        """Whether windows carry it out, as they do for a rank that trains alone."""
        return self.now.carried_out_by != "sync"

    def begin(self) -> None:
        """It is in force from now on."""
        self.gauge.finish_learning()
        self._chooser.fix_update(
            "gradients" if self.averages_gradients else "parameters"
        )

    def observe(self, batch_size: int) -> bool:
        """Evaluates it again with what was measured since; whether that changed it."""
        before = self.now
        self.gauge.follow()
        self.now = self._chooser.observe(self.gauge.cluster(batch_size))
        return not before.is_carried_out_as(self.now)


@dataclass(frozen=True, slots=True)
class RunLength:
    """Batches of a whole run, if epochs stay as long as the one under way.

    Args:
        given_epochs: value of ``epochs=``, if it was given.
        begun_epochs: epochs that have begun.
        epoch_batches: batches of the one under way.
    """

    given_epochs: int | None
    begun_epochs: int = 0
    epoch_batches: int = 0

    @property
    def epochs(self) -> int:
        """The given number while it holds; or as many again as have begun."""
        if self.given_epochs is not None and self.given_epochs >= self.begun_epochs:
            return self.given_epochs
        return max(USUAL_EPOCHS, 2 * self.begun_epochs)

    @property
    def batches(self) -> int:
        """Of all epochs."""
        return self.epochs * self.epoch_batches

    def __str__(self) -> str:
        said = f"in a run of {self.batches} batches"
        if self.given_epochs is None:
            said += f", assuming {self.epochs} epochs (set epochs= to change it)"
        return said
