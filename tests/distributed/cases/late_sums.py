"""A rank without a sum that others hold, or that has not taken it, when one dies.

As with gloo, where a rank's death leaves some with a sum and others without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any, final

import torch

from elche.comm.averaging.averaging import Averager
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.averaging.parameter_group import ParameterGroup
from elche.comm.codec.coded_hops import CodedHops
from elche.comm.gradients.gradient_window import GradientWindow
from elche.comm.gradients.reducer import GradientReducer
from elche.comm.transport.exchange import GlooExchange
from elche.coordination.protocol.instructions import Regroup
from elche.runtime.windows.gradient_sync import GradientSync
from elche.session.process import current_run
from tests.harness.waiting import until

REDUCTION = 3
PATIENCE_S = 50.0
WAITS = "waits"
"""It waits for the sum, or comes to it when it has been told of the death."""
TRAINS = "trains"
"""It has not the sum, and is in a batch until it is told."""
HOLDS = "holds"
"""It has the sum, and is in a batch until it is told."""


def mark_third_sum(folder: str, rank: int) -> None:
    """From when this rank holds the sum of its third reduction others see it."""
    sums = 0

    def waited(wait: Callable[..., Any], owner: Any) -> Any:
        nonlocal sums
        result = wait(owner)
        sums += 1
        if sums == REDUCTION:
            _sum_of(folder, rank).touch()
        return result

    replace(Averager, "_wait", waited)
    replace(GradientWindow, "finish", waited)


def replace(owner: type, name: str, call: Callable[..., Any]) -> None:
    """In place of a method: what it was comes first."""
    setattr(owner, name, partialmethod(_called, getattr(owner, name), call))


def _called(
    owner: Any,
    original: Callable[..., Any],
    call: Callable[..., Any],
    *args: Any,
    **named: Any,
) -> Any:
    return call(original, owner, *args, **named)


def _sum_of(folder: str, rank: int) -> Path:
    return Path(folder, f"sum{rank}")


def await_sums(folder: str, ranks: tuple[int, ...]) -> None:
    """Waits until these ranks hold it."""
    until(lambda: all(_sum_of(folder, rank).exists() for rank in ranks))


def lack_sums(at: int) -> None:
    """This rank does not get what the others have, in one pass of ``sync``."""
    passes = 0

    def close_pass(original: Any, reducer: GradientReducer) -> Any:
        nonlocal passes
        passes += 1
        before = [buffer.clone() for buffer in buffers_of(reducer)]
        factor = original(reducer)
        if passes == at:
            for buffer, value in zip(buffers_of(reducer), before, strict=True):
                buffer.copy_(value)
            reducer._group.wait_until(lambda: False, "a rank's death")
        return factor

    replace(GradientReducer, "close_pass", close_pass)


def buffers_of(reducer: GradientReducer) -> list[torch.Tensor]:
    """Of the model whose gradients it reduces."""
    averager = reducer._buffers
    assert averager is not None
    return list(averager._model.buffers())


@final
class LateSum:
    """Makes this rank late with its third reduction.

    Args:
        folder: where ranks say that they hold the sum.
        rank: this one.
        how: `WAITS`, `TRAINS` or `HOLDS`.

    Attributes:
        handed: how often it was handed a result.
    """

    def __init__(self, folder: str, rank: int, how: str) -> None:
        self.handed = 0
        self._folder, self._rank, self._how = folder, rank, how
        self._begun, self._has_stayed = 0, False
        self._has_sum = GlooExchange.has_sum
        self._is_ready = CodedHops.is_ready
        for owner in (ParameterGroup, GradientWindow):
            replace(owner, "begin", self._begins)
        replace(Averager, "_wait", self._waits)
        replace(GradientWindow, "finish", self._waits)
        for owner in (Averager, GradientSync):
            replace(owner, "copy_result", self._is_handed)

        def polled(averager: OverlappedAverager) -> bool:
            return not self._is_in_batch and poll(averager)

        poll = OverlappedAverager.poll
        OverlappedAverager.poll = polled  # type: ignore[method-assign]

    def _begins(self, begin: Callable[..., Any], *args: Any, **named: Any) -> None:
        self._begun += 1
        if self._lacks:
            GlooExchange.has_sum = property(lambda _: False)  # type: ignore
            CodedHops.is_ready = property(self._has_offers)  # type: ignore
        begin(*args, **named)

    def _has_offers(self, hops: CodedHops) -> bool:
        """With a codec: the others get what this rank sums, and it no more."""
        return not hops.has_summed and bool(self._is_ready.fget(hops))  # type: ignore

    def _waits(self, wait: Callable[..., Any], owner: Any, *args: Any) -> Any:
        if self._lacks:
            groups = getattr(owner, "_groups", ())

            def never() -> bool:
                return all([each.exchange.poll() for each in groups]) and False

            group = owner.group if isinstance(owner, GradientWindow) else owner._group
            group.wait_until(never, "a rank's death")
        return wait(owner, *args)

    def _is_handed(self, hand: Callable[..., Any], *args: Any, **named: Any) -> None:
        hand(*args, **named)
        self.handed += bool(named["lacks"])
        GlooExchange.has_sum = self._has_sum  # type: ignore[method-assign]
        CodedHops.is_ready = self._is_ready  # type: ignore[method-assign]

    @property
    def _lacks(self) -> bool:
        is_now = self._begun == REDUCTION and not self.handed
        return is_now and self._how != HOLDS

    @property
    def _is_in_batch(self) -> bool:
        is_now = self._begun == REDUCTION and not self._has_stayed
        return is_now and self._how != WAITS

    def stay(self) -> None:
        """In a batch: stays there until the word of the death is in line."""
        if self._is_in_batch:
            until(self._is_told)
            self._has_stayed = True

    def check(self) -> None:
        """It was where it should be."""
        assert self._has_stayed == (self._how != WAITS), "a fault did not happen"

    def _is_told(self) -> bool:
        run = current_run()
        assert run is not None
        windows = run._synchroniser.windows
        for group in getattr(windows, "_groups", ()):
            group.exchange.poll()  # as at the end of a batch before this one
        if self._how == HOLDS and windows.is_summed:  # type: ignore
            _sum_of(self._folder, self._rank).touch()
        run.worker._channel.wait_for_values(0.001)
        return bool(run.worker._channel.waiting(Regroup))
