"""Sums of gradients over replicas, with a group that answers as an equal replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elche.comm.gradients import gradient_messages
from elche.errors import CommunicationError, ConfigError
from elche.pipeline.replicas.reduction import GradientReduction
from elche.pipeline.replicas.replica_units import Unit
from elche.pipeline.step.executor import StepInput, StepResults

RANKS = (0, 1)


class Work:
    """A sum that is there at once."""

    def is_completed(self) -> bool:
        return True


class Doubling:
    """The other replica has the same gradients."""

    rank, world_size = 0, 2
    shares_host = False

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        self.sent.append(tensor.clone())
        tensor.mul_(2)
        return Work()

    def wait(self, work: Work, what: str) -> None:
        """It is there."""


class Broken(Doubling):
    def all_reduce_async(self, tensor: torch.Tensor) -> Work:
        raise RuntimeError("connection reset")


class Nobody:
    rank = 0

    def wait(
        self,
        poll: Callable[[], bool],
        end: Callable[[], object],
        ranks: tuple[int, ...],
        what: str,
        timeout_s: float,
    ) -> None:
        assert poll()
        end()


def learning(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


def reducing(
    stages: dict[int, dict[str, nn.Parameter]], group: Doubling
) -> GradientReduction:
    """Units in the order of the stages that are given."""
    units = [
        Unit(RANKS, ((stage,), (stage,)), tuple(named))
        for stage, named in stages.items()
    ]
    parameters = {name: one for named in stages.values() for name, one in named.items()}
    return GradientReduction(units, parameters, {RANKS: group}, Nobody())  # type: ignore[arg-type, dict-item]


def run(made: GradientReduction, *actions: Callable[[], object]) -> StepResults:
    def carry_out(given: StepInput) -> StepResults:
        for action in actions:
            action()
        return StepResults()

    return made.run(carry_out, StepInput(timeout_s=5.0), True)


def gives(parameter: nn.Parameter, value: float) -> Callable[[], None]:
    def give() -> None:
        parameter.grad = torch.full_like(parameter, value).detach()

    return give


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex128],
)
def test_every_type_of_gradient_is_summed(dtype: torch.dtype) -> None:
    one, group = learning(3, 2, dtype=dtype), Doubling()
    made = reducing({0: {"one": one}}, group)
    value: Any = 1.5 + 2j if dtype.is_complex else 1.5
    run(made, gives(one, value), lambda: made.stage_is_through(0))
    assert one.grad is not None
    assert one.grad.dtype is dtype
    assert torch.equal(one.grad, torch.full_like(one, 2 * value).detach())
    wide = dtype in (torch.float64, torch.complex128)
    assert group.sent[0].dtype is (torch.float64 if wide else torch.float32)


def test_complex_gradients_share_a_message_with_real_ones() -> None:
    """At any offset, as after an odd number of real ones."""
    real, paired = learning(3), learning(2, dtype=torch.complex64)
    group = Doubling()
    made = reducing({0: {"real": real, "paired": paired}}, group)
    value: Any = 1.0 + 2j
    done = gives(real, 3.0), gives(paired, value), lambda: made.stage_is_through(0)
    run(made, *done)
    assert real.grad is not None
    assert real.grad.tolist() == [6.0] * 3
    assert paired.grad is not None
    assert paired.grad.tolist() == [2.0 * value] * 2
    assert len(group.sent) == 1


def test_a_parameter_without_a_gradient_anywhere_stays_without() -> None:
    one, other, group = learning(2), learning(2), Doubling()
    made = reducing({0: {"one": one, "other": other}}, group)
    run(made, gives(one, 1.0), lambda: made.stage_is_through(0))
    assert other.grad is None
    assert one.grad is not None
    assert group.sent[0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_earlier_gradients_are_added_and_not_summed_again() -> None:
    one, other = learning(2), learning(2)
    made = reducing({0: {"one": one, "other": other}}, Doubling())
    gives(one, 10.0)()
    gives(other, 7.0)()
    run(made, gives(one, 1.0), lambda: made.stage_is_through(0))
    assert one.grad is not None
    assert one.grad.tolist() == [12.0, 12.0]
    assert other.grad is not None
    assert other.grad.tolist() == [7.0, 7.0]


def test_sums_begin_in_the_common_order() -> None:
    one, other, group = learning(2), learning(3), Doubling()
    made = reducing({5: {"one": one}, 1: {"other": other}}, group)
    sizes: list[list[int]] = []

    def look() -> None:
        sizes.append([len(sent) for sent in group.sent])

    run(
        made,
        lambda: made.stage_is_through(1),
        look,
        lambda: made.stage_is_through(5),
        look,
    )
    assert sizes == [[], [3, 4]]


def test_large_gradients_travel_in_several_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_messages, "MESSAGE_BYTES", 40)
    group = Doubling()
    named = {str(index): learning(6) for index in range(3)}
    named["large"] = learning(30)
    named["double"] = learning(2, dtype=torch.float64)
    made = reducing({0: named}, group)
    giving = [gives(one, 1.0) for one in named.values()]
    run(made, *giving, lambda: made.stage_is_through(0))
    assert [len(sent) for sent in group.sent] == [7, 7, 7, 31, 3]
    for one in named.values():
        assert one.grad is not None
        assert one.grad.tolist() == [2.0] * one.numel()


def test_a_replica_without_a_batch_gives_zeros_and_takes_the_sum() -> None:
    one, group = learning(2), Doubling()
    made = reducing({0: {"one": one}}, group)

    def never(given: StepInput) -> StepResults:
        raise AssertionError("there is no batch")

    made.run(never, StepInput(timeout_s=5.0), False)
    assert group.sent[0].tolist() == [0.0, 0.0, 0.0]
    assert one.grad is None


def test_sparse_gradients_are_refused() -> None:
    one, group = learning(3, 2), Doubling()
    made = reducing({0: {"one": one}}, group)

    def sparse() -> None:
        one.grad = torch.zeros(3, 2).to_sparse()

    with pytest.raises(ConfigError, match=r"shape \[3, 2\] is sparse.*sparse=False"):
        run(made, sparse, lambda: made.stage_is_through(0))


def test_a_broken_connection_is_a_communication_error() -> None:
    one = learning(2)
    made = reducing({0: {"one": one}}, Broken())
    with pytest.raises(CommunicationError, match="connection reset"):
        run(made, gives(one, 1.0), lambda: made.stage_is_through(0))


def test_copies_are_those_that_a_lower_rank_counts() -> None:
    mine, theirs = learning(2), learning(2)
    units = [Unit((0, 2), ((0,), (0,)), ("mine",)), Unit((1, 2), ((0,), (1,)), ("x",))]
    peers = Nobody()
    peers.rank = 2
    groups: Any = {(0, 2): Doubling(), (1, 2): Doubling(), (0, 1): Doubling()}
    made = GradientReduction(units, {"mine": mine, "x": theirs}, groups, peers)  # type: ignore[arg-type]
    assert made.copies == {id(mine), id(theirs)}
    peers.rank = 0
    made = GradientReduction(units[:1], {"mine": mine}, groups, peers)  # type: ignore[arg-type]
    assert made.copies == set()
