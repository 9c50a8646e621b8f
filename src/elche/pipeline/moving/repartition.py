"""Repartition: transfer of layers, their values and optimizer state.

Every step that can fail is agreed on by all ranks before anything changes: what leaves
is packed and what comes is built first, then it travels, and only when every rank has
put itself together are the old parts given up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from elche.errors import MismatchError
from elche.pipeline.moving.moving_optimizers import Moving, OptimizerGroups, check_alike
from elche.pipeline.moving.relocation import (
    Baggage,
    check_forms,
    form_of,
    moves_between,
    owners,
    release,
    unload,
)
from elche.pipeline.peers.communicator import PipelineCommunicator
from elche.pipeline.setup.assembly import Parts, assemble
from elche.pipeline.setup.building import join_ties
from elche.pipeline.setup.planning import PipelinePlan
from elche.pipeline.stage import Layer
from elche.schedule.formats import to_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """Of a repartition.

    Attributes:
        timeout_s: deadline of each wait.
        most_bytes: that any rank may send; where it is more, nothing happens.
    """

    timeout_s: float
    most_bytes: float = float("inf")


@final
class Repartition:
    """One rank's part in it.

    Args:
        parts: what the rank has.
        plan: what is to run.
        groups: its optimizers.
        communicator: all ranks.
        members: those of this replica.
    """

    def __init__(
        self,
        parts: Parts,
        plan: PipelinePlan,
        groups: OptimizerGroups,
        communicator: PipelineCommunicator,
        members: Sequence[int],
    ) -> None:
        self._parts, self._plan = parts, plan
        self._groups, self._communicator, self._members = groups, communicator, members
        self._own = parts.built
        self._moves = moves_between(_owners(parts.plan), _owners(plan))
        self._leaving: dict[int, Baggage] = {}
        self._arriving: dict[int, Layer] = {}
        self._come: list[tuple[nn.Module, str, Moving]] = []

    def carry_out(self, terms: Terms) -> Parts | None:
        """Moves the layers; all ranks call it together.

        Returns:
            What the rank has then; None where too much would have to move.

        Raises:
            ConfigError: something is wrong here or on another rank; nothing changed.
            MismatchError: ranks disagree; nothing changed.
            CommunicationError: a rank is gone or late; the pipeline has ended.
        """
        try:
            told = self._communicator.agree(lambda: self._prepare(terms), "repartition")
            self._communicator.agree(lambda: self._check(told), "repartition")
            if max(one[0] for one in told) > min(one[1] for one in told):
                self._give_up()
                return None
        except Exception:
            self._give_up()
            raise
        if self._communicator.peers is not None:
            with self._communicator.ending_on_failure():
                self._travel(terms.timeout_s)
        made: list[Parts] = []
        try:
            self._communicator.agree(
                lambda: made.append(self._put_together()), "moving layers"
            )
        except Exception:
            for one in made:
                one.detach()
            self._give_up()
            raise
        self._hand_over(made[0])
        logger.info(
            "rank %d: %d of %d layers have moved; it has %s, stages are %s on ranks %s",
            self._communicator.rank,
            len(self._moves),
            sum(self._plan.partition),
            sorted(made[0].built),
            list(self._plan.partition),
            list(self._plan.schedule.placement),
        )
        return made[0]

    def _prepare(self, terms: Terms) -> list[Any]:
        """Packs what leaves, builds what comes; reports both to the others."""
        rank, given = self._communicator.rank, self._parts.given
        self._groups.check_holds(_named(self._own), rank)
        for one in self._moves:
            if one.source == rank:
                self._leaving[one.layer] = Baggage(self._own[one.layer], self._groups)
            elif one.target == rank:
                made = given.layers.build_empty(one.layer, given.device)
                self._arriving[one.layer] = made
        join_ties(given.ties, {**self._staying(), **self._arriving}, self._arriving)
        moving = {**{i: self._own[i] for i in self._leaving}, **self._arriving}
        forms = {str(index): form_of(layer) for index, layer in moving.items()}
        return [
            sum(one.size_bytes for one in self._leaving.values()),
            terms.most_bytes,
            [to_text(self._plan.schedule), list(self._plan.partition)],
            self._groups.describe(),
            forms,
        ]

    def _check(self, told: list[Any]) -> None:
        """Compares what the ranks of this replica have told."""
        mine = {rank: told[rank][2:] for rank in self._members}
        first, (plan, _, _) = next(iter(mine.items()))
        for rank, (other, _, _) in mine.items():
            if other != plan:
                raise MismatchError(
                    f"ranks ask for different partitions: {plan[1]} on rank {first}, "
                    f"{other[1]} on rank {rank}, or other schedules for them"
                )
        check_alike({rank: one[1] for rank, one in mine.items()})
        check_forms(self._moves, {rank: one[2] for rank, one in mine.items()})

    def _travel(self, timeout_s: float) -> None:
        """Sends and receives in the model's order, which cannot deadlock."""
        peers = self._communicator.peers
        assert peers is not None
        keep = {id(one) for one in _parameters(self._staying())}
        for one in self._moves:
            if one.source == peers.rank:
                message = self._leaving[one.layer].message
                peers.send_layer(one.target, message, timeout_s)
            elif one.target == peers.rank:
                message = peers.receive_layer(one.source, timeout_s)
                layer = self._arriving[one.layer]
                self._come += [
                    (layer.module, name, moving)
                    for name, moving in unload(message, layer, keep)
                ]
        peers.transport.flush(timeout_s)

    def _put_together(self) -> Parts:
        built = {**self._staying(), **self._arriving}
        return assemble(self._parts.given, self._plan, built, self._communicator.peers)

    def _hand_over(self, made: Parts) -> None:
        """The old parts go, the optimizers follow, memory is freed."""
        self._parts.detach()
        before, after = _parameters(self._own), _parameters(made.built)
        had = {id(one) for one in before}
        has = {id(one) for one in after}
        new: dict[int, tuple[nn.Parameter, Moving]] = {}
        for module, name, moving in self._come:
            parameter = module.get_parameter(name)
            if id(parameter) not in had:
                new.setdefault(id(parameter), (parameter, moving))
        self._groups.exchange(
            [one for one in before if id(one) not in has],
            list(new.values()),
            after,
        )
        for index in self._leaving:
            self._release(index, self._own[index], has)

    def _give_up(self) -> None:
        live = {id(one) for one in _parameters(self._own)}
        for index, layer in self._arriving.items():
            self._release(index, layer, live)

    def _release(self, index: int, layer: Layer, live: set[int]) -> None:
        given = self._parts.given
        release(layer, given.device, index in given.meta, live)

    def _staying(self) -> dict[int, Layer]:
        gone = {
            one.layer for one in self._moves if one.source == self._communicator.rank
        }
        return {i: layer for i, layer in self._own.items() if i not in gone}


def _owners(plan: PipelinePlan) -> list[int]:
    return owners(plan.schedule.placement, plan.partition)


def _named(layers: Mapping[int, Layer]) -> list[tuple[str, nn.Parameter]]:
    """Parameters in the model's order; shared ones under each of their names."""
    return [
        (layer.prefixed(name), one)
        for _, layer in sorted(layers.items())
        for name, one in layer.module.named_parameters()
    ]


def _parameters(layers: Mapping[int, Layer]) -> list[nn.Parameter]:
    """In the model's order."""
    return [one for _, one in _named(layers)]
