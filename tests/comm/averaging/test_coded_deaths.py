"""Averages with a codec of which a rank dies: nothing is lost or counts twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn

from elche.comm.averaging import parameter_group
from elche.comm.averaging.overlap import OverlappedAverager
from elche.comm.codec.codec import CODECS
from elche.comm.transport.exchange import Exchange, open_exchange
from elche.comm.transport.process_group import Group
from elche.coordination.protocol.instructions import Reduce
from elche.errors import CommunicationError
from tests.comm.bus import Bus, Member
from tests.comm.peers import Peer, coded
from tests.comm.plans import plan

NUMEL = 300


def open_wired(
    group: Member, numel: int, dtype: torch.dtype, codec: str, *, is_overlapped: bool
) -> Exchange:
    """As `open_coded_exchange`, over the wire of a bus, on which nothing is awaited."""
    if group.world_size == 1 or dtype != torch.float32 or codec == "fp32":
        return open_exchange(cast(Group, group), numel, dtype, torch.device("cpu"))
    return coded(Peer(group.wire, group.rank), CODECS[codec], numel)


@pytest.fixture(autouse=True)
def _wired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_group, "open_coded_exchange", open_wired)


class Handing:
    """A group in which one rank after the other takes what the first one sent."""

    rank = world_size = 0

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.taken = 0

    def broadcast(self, tensor: torch.Tensor, what: str, source: int) -> None:
        if self.rank == source:
            self.sent.append(tensor.clone())
            return
        tensor.copy_(self.sent[self.taken])
        self.taken += 1


class Rank:
    """One rank's parameters and their average.

    Attributes:
        drift: what its last window's end sent of float32 parameters.
    """

    def __init__(self, group: Group, codec: str, has_wide: bool = False) -> None:
        kinds = [torch.float32, torch.float64][: 1 + has_wide]
        self.model = nn.ParameterList([torch.zeros(NUMEL, dtype=k) for k in kinds])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        parameters = list(self.model.parameters())
        self.averager = OverlappedAverager(
            parameters, self.model, lambda: [optimizer], group, codec=codec
        )
        self.averager.build()
        self.drift = torch.zeros(NUMEL, dtype=torch.float64)

    @property
    def exchange(self) -> Any:
        return self.averager._groups[0].exchange

    @property
    def base(self) -> torch.Tensor:
        return self.averager._groups[0]._base_memory.clone()

    @property
    def left_out(self) -> torch.Tensor:
        state = self.averager._groups[0]._residual()
        if state is None:
            return torch.zeros(NUMEL, dtype=torch.float64)
        return state.double()

    @torch.no_grad()
    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model:
            step = torch.rand(NUMEL, generator=generator) * 2 - 1
            parameter.add_(step.to(parameter.dtype))

    def close(self, seed: int) -> None:
        """A window ends."""
        self.train(seed)
        self.drift = (self.base - self.model[0].detach()).double()
        assert self.averager.snapshot(1.0)
        self.drive()

    def drive(self) -> None:
        self.exchange.poll()


class Account:
    """What was sent to averages that count, and how far these moved what is common."""

    def __init__(self) -> None:
        self.given = torch.zeros(NUMEL, dtype=torch.float64)
        self.moved = torch.zeros(NUMEL, dtype=torch.float64)
        self.lost = torch.zeros(NUMEL, dtype=torch.float64)

    def commit(self, sent: Sequence[Rank], before: torch.Tensor, now: Rank) -> None:
        self.given += sum(rank.drift for rank in sent)
        self.moved += len(sent) * (before - now.base).double()

    def check(self, ranks: Sequence[Rank]) -> None:
        left_out = sum(rank.left_out for rank in ranks)
        total = self.moved + left_out + self.lost
        torch.testing.assert_close(total, self.given, rtol=0.0, atol=1e-4)
        apart = (self.moved - self.given).abs().max()
        assert float(apart) > 1e-3 or not bool(left_out.any()), "nothing was left out"


def begin(ranks: Sequence[Rank], number: int, **changes: Any) -> Reduce:
    """The plan has come; all ranks do what can be done."""
    weight = 1.0 / len(ranks)
    step = plan(window=number, weight=weight, active_ranks=len(ranks), **changes)
    for rank in ranks:
        rank.averager.begin(step)
    for _ in range(3):
        for rank in ranks:
            rank.drive()
    return step


def window(ranks: Sequence[Rank], number: int, account: Account) -> None:
    """One that nobody dies in."""
    before = ranks[0].base
    for place, rank in enumerate(ranks):
        rank.close(100 * number + place)
    step = begin(ranks, number)
    for rank in ranks:
        assert rank.averager.poll()
        rank.averager.finish(step, is_drained=True)
    account.commit(ranks, before, ranks[0])
    check_equal(ranks)
    account.check(ranks)


def check_equal(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        assert torch.equal(rank.base, ranks[0].base)
        assert torch.equal(rank.model[0].detach(), ranks[0].model[0].detach())


def founded(codec: str, has_wide: bool = False) -> tuple[Bus, list[Rank], Account]:
    """Three ranks after two windows; something has been left out."""
    bus, account = Bus(3), Account()
    ranks = [Rank(group, codec, has_wide) for group in bus.groups()]
    for number in range(2):
        window(ranks, number, account)
    return bus, ranks, account


def connect(ranks: Sequence[Rank]) -> None:
    """They form the next group."""
    groups = Bus(len(ranks)).groups()
    for rank, group in zip(ranks, groups, strict=True):
        rank.averager.reconnect(group)


def redo(ranks: Sequence[Rank], before: torch.Tensor, account: Account) -> None:
    """Those who live form the next group, and average anew what nobody has."""
    connect(ranks)
    again = begin(ranks, 2, attempt=1)
    for rank in ranks:
        rank.averager.finish(again, is_drained=True)
    account.commit(ranks, before, ranks[0])
    check_equal(ranks)
    account.check(ranks)


def close_without_sums_for(late: Rank, ranks: Sequence[Rank]) -> None:
    """A window ends; one rank gets offers of the others, and not their sums."""
    wire, place = late.exchange._group.wire, late.exchange._group.rank
    wire.held |= {(other, place, 1) for other in range(3) if other != place}
    for place, rank in enumerate(ranks):
        rank.close(200 + place)


def copy_result(ranks: Sequence[Rank], step: Reduce, *, keeps: bool) -> None:
    """The second rank takes what the first one has."""
    group = cast(Any, Handing())
    for place, rank in enumerate(ranks):
        group.rank = place
        rank.averager.copy_result(group, 0, step, lacks=place == 1, keeps=keeps)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_an_average_that_nobody_has_is_redone_without_the_dead_ranks_part(
    codec: str,
) -> None:
    bus, ranks, account = founded(codec)
    account.lost += ranks[2].left_out
    bus.shared.wire.late.add(2)
    before = ranks[0].base
    for place, rank in enumerate(ranks):
        rank.close(200 + place)
    step = begin(ranks, 2)
    assert not ranks[0].averager.has_sum(step)
    with pytest.raises(CommunicationError, match="averaging parameters"):
        ranks[1].averager.finish(step)
    bus.shared.wire.late.clear()
    bus.shared.wire.deliver()  # too late
    for rank in ranks[:2]:
        rank.drive()
    redo(ranks[:2], before, account)
    window(ranks[:2], 3, account)


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("keeps", [False, True])
def test_who_lacks_an_average_takes_it_and_sends_nothing_of_it_again(
    codec: str, keeps: bool
) -> None:
    _, ranks, account = founded(codec)
    before = ranks[0].base
    close_without_sums_for(ranks[1], ranks)
    step = begin(ranks, 2)
    ended = ranks[1].model[0].detach().clone()
    if keeps:
        ranks[1].train(7)
    since = ranks[1].model[0].detach() - ended
    assert ranks[0].averager.has_sum(step)
    ranks[0].averager.finish(step, is_drained=not keeps)
    assert not ranks[1].averager.has_sum(step)
    ranks[2].exchange.commit()
    account.lost += ranks[2].left_out
    copy_result(ranks[:2], step, keeps=keeps)
    connect(ranks[:2])
    account.commit(ranks, before, ranks[0])
    account.check(ranks[:2])
    assert torch.equal(ranks[1].base, ranks[0].base)
    own = ranks[1].model[0].detach()
    torch.testing.assert_close(own, ranks[0].base + since, rtol=0.0, atol=1e-6)
    if not keeps:
        check_equal(ranks[:2])
        window(ranks[:2], 3, account)


def test_a_rank_that_is_left_alone_takes_what_it_had_left_out() -> None:
    _, ranks, account = founded("int4")
    account.lost += ranks[1].left_out + ranks[2].left_out
    before = ranks[0].base
    ranks[0].close(200)
    connect(ranks[:1])
    assert bool(ranks[0].left_out.any())
    account.check(ranks[:1])
    step = begin(ranks[:1], 2, attempt=1)
    ranks[0].averager.finish(step, is_drained=True)
    account.commit(ranks[:1], before, ranks[0])
    assert not bool(ranks[0].left_out.any())
    account.check(ranks[:1])
    window(ranks[:1], 3, account)


def test_what_a_lone_rank_has_not_sent_it_sends_with_those_that_join_it() -> None:
    _, ranks, account = founded("int4")
    account.lost += ranks[1].left_out + ranks[2].left_out
    connect(ranks[:1])
    state = ranks[0].averager.state_dict()
    assert bool(state["groups"][0]["residual"].any())
    state["groups"][0]["residual"] = None
    joins = Rank(Bus(1).group(0), "int4")
    with torch.no_grad():
        joins.model[0].copy_(ranks[0].model[0])
    joins.averager.load_state_dict(state)
    now = [ranks[0], joins]
    connect(now)
    account.check(now)
    window(now, 3, account)


def test_a_sum_is_given_up_while_another_one_is_missing() -> None:
    """Here that of float64 parameters, as of buffers: all of it may be sent again."""
    _, ranks, account = founded("int4", has_wide=True)
    account.lost += ranks[2].left_out
    before = ranks[0].base
    for place, rank in enumerate(ranks[:2]):
        rank.close(200 + place)
    held = ranks[2].averager._groups.pop()  # dies before it sends that
    ranks[2].close(202)
    ranks[2].averager._groups.append(held)
    step = begin(ranks[:2], 2)
    for rank in ranks[:2]:
        assert rank.exchange.has_sum
        assert not rank.averager.poll()
        assert not rank.averager.has_sum(step)
    held.fill(1.0)
    held.begin()
    for rank in ranks[:2]:  # it comes when they are about to leave the group
        assert rank.averager._groups[1].is_summed
        rank.drive()
        assert not rank.averager.has_sum(step), "others may go on without it"
    redo(ranks[:2], before, account)


def test_who_takes_an_average_takes_the_outer_momentum_as_it_is_then() -> None:
    _, ranks, _ = founded("int4")
    close_without_sums_for(ranks[1], ranks)
    step = begin(ranks, 2, outer="nesterov", outer_lr=0.7)
    ranks[0].averager.finish(step)
    copy_result(ranks[:2], step, keeps=True)
    check_common(ranks[:2])
    connect(ranks[:2])
    for place, rank in enumerate(ranks[:2]):
        rank.close(300 + place)
    step = begin(ranks[:2], 3, outer="nesterov", outer_lr=0.7)
    for rank in ranks[:2]:
        rank.averager.finish(step, is_drained=True)
    check_common(ranks[:2])


def check_common(ranks: Sequence[Rank]) -> None:
    """Common parameters and outer momentum, to the bit."""
    bases = [rank.base for rank in ranks]
    momenta = [rank.averager._groups[0]._outer.momentum for rank in ranks]
    assert momenta[0] is not None
    assert bool(momenta[0].any())
    for base, momentum in zip(bases, momenta, strict=True):
        assert momentum is not None
        assert torch.equal(base, bases[0])
        assert torch.equal(momentum, momenta[0])
