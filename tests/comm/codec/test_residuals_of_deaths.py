"""Sums lose nothing where ranks die but what the dead ones had left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.comm.codec.codec import CODECS
from elche.comm.codec.coded_exchange import CodedExchange
from tests.comm.peers import Wire, exchanges, message, poll_all, summed
from tests.harness.reached import reach

NOBODY = -1


@dataclass(frozen=True)
class Window:
    """What happens in one window.

    Attributes:
        victim: who dies, counted among those who live; `NOBODY`.
        is_held: the sum has come to one of the others, with the victim's part.
        holder: which, counted among the others.
    """

    victim: int = NOBODY
    is_held: bool = False
    holder: int = 0


@dataclass
class Run:
    """The ranks that live, and the account of what all have sent; weights are 1.

    Attributes:
        given: all contributions to sums that count.
        sums: those sums.
        lost: what dead ranks had left out.
    """

    codec: str
    numel: int
    world_size: int
    wire: Wire = field(init=False)
    ends: list[CodedExchange] = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.sums, self.lost = torch.zeros(
            3, self.numel, dtype=torch.float64
        ).unbind()
        self._open()

    def _open(self) -> None:
        codec, numel = CODECS[self.codec], self.numel + 1
        self.wire, self.ends = exchanges(self.world_size, codec, numel)

    def window(self, window: Window, seed: int) -> None:
        """One message of all, or of those who live."""
        sent = [message(seed + rank, self.numel) for rank in range(len(self.ends))]
        if window.victim == NOBODY or len(self.ends) < 2:
            if len(self.ends) > 1:
                self._count(sent, summed(self.ends, sent))
            return
        victim = window.victim % len(self.ends)
        others = [rank for rank in range(len(self.ends)) if rank != victim]
        if window.is_held:
            self._hold(sent, victim, others[window.holder % len(others)])
        else:
            self._fail(sent, victim)
        dead = self.ends[victim]
        self.lost += dead.residual
        residuals = [self.ends[rank].residual for rank in others]
        if len(others) == 1:
            self.ends = [self.ends[others[0]]]
            return
        self.world_size = len(others)
        self._open()
        for end, residual in zip(self.ends, residuals, strict=True):
            end.load_residual(residual)
        if not window.is_held:
            again = [sent[rank] for rank in others]
            self._count(again, summed(self.ends, again))

    def _count(self, sent: Sequence[torch.Tensor], sums: list[torch.Tensor]) -> None:
        assert all(torch.equal(each, sums[0]) for each in sums)
        assert float(sums[0][-1]) == len(sent)
        self.given += sum(each[:-1].double() for each in sent)
        self.sums += sums[0][:-1].double()

    def _begin(self, sent: Sequence[torch.Tensor]) -> None:
        for end, each in zip(self.ends, sent, strict=True):
            end.contribution(0).copy_(each)
            end.begin(0)

    def _fail(self, sent: Sequence[torch.Tensor], victim: int) -> None:
        """Nothing of the victim comes; nobody has the sum."""
        before = [end.residual.clone() for end in self.ends]
        self.wire.late.add(victim)
        self._begin(sent)
        for _ in range(4):
            for end in self.ends:
                end.poll()
        for rank, end in enumerate(self.ends):
            assert rank == victim or not end.has_sum
            assert torch.equal(end.residual, before[rank])
        reach("redone")

    def _hold(self, sent: Sequence[torch.Tensor], victim: int, holder: int) -> None:
        """One rank has the sum; the others adopt it."""
        self._begin(sent)
        for rank, end in enumerate(self.ends):
            if rank != holder:
                end._step("a test")
        total = self.ends[holder].finish("a test").clone()
        self.ends[holder].release()
        for rank, end in enumerate(self.ends):
            if rank != holder:
                end.commit()
                if rank != victim:
                    reach("handed over")
        self._count(sent, [total])


windows = st.builds(
    Window,
    victim=st.sampled_from([NOBODY, NOBODY, 0, 1, 2, 3, 4]),
    is_held=st.booleans(),
    holder=st.integers(0, 3),
)


@pytest.mark.reaches("redone", "handed over", "alone")
@given(
    codec=st.sampled_from(["bf16", "int8", "int4"]),
    numel=st.sampled_from([1, 34, 300]),
    world_size=st.integers(2, 5),
    plan=st.lists(windows, min_size=1, max_size=6),
)
def test_nothing_is_lost_but_what_the_dead_had_left_out(
    codec: str, numel: int, world_size: int, plan: list[Window]
) -> None:
    run = Run(codec, numel, world_size)
    for number, window in enumerate(plan):
        run.window(window, 10 * number)
    reach("alone", len(run.ends) == 1)
    left_out = sum(end.residual.double() for end in run.ends)
    total = run.sums + left_out + run.lost
    torch.testing.assert_close(total, run.given, rtol=0.0, atol=1e-4)


def test_what_was_left_out_is_not_nothing() -> None:
    """As the property is of sums that lose something."""
    run = Run("int4", 300, 3)
    run.window(Window(), 0)
    assert float((run.sums - run.given).abs().max()) > 0.01
    run._begin([message(rank, 300) for rank in range(3)])
    poll_all(run.ends)
