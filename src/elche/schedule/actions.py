"""Actions of a pipeline and schedules made of them, in torch's vocabulary.

Source of the vocabulary: torch.distributed.pipelining (``_Action`` and
``_ComputationType``); ``2F0`` is the forward of stage 2 on microbatch 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from elche.config_checks import check_whole
from elche.errors import ConfigError


class Kind(str, Enum):
    """Kind of an action; the order gives the numbers of `codes`.

    ``SEND_F`` and ``SEND_B`` name the sending stage (for its output, or the gradient of
    its input), ``RECV_F`` and ``RECV_B`` the receiving stage.
    """

    FORWARD = "F"
    FULL_BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    def __str__(self) -> str:
        return self.value


COMPUTE_KINDS = frozenset(
    {Kind.FORWARD, Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
)

_ACTION = re.compile(r"(\d+)(F|I|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class StageAction:
    """One action of one rank.

    Attributes:
        stage: index of the stage; stage 0 reads the input.
        kind: kind of the action.
        microbatch: index of the microbatch.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def is_compute(self) -> bool:
        """True if the action computes, False for a send or receive."""
        return self.kind in COMPUTE_KINDS


def parse_action(text: str) -> StageAction:
    """Reads one action such as ``2F0`` or ``1SEND_B3``.

    Raises:
        ConfigError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"expected an action such as 2F0, 2I0, 2W0, 2B0 or 1SEND_F0 (stage, kind, "
            f"microbatch), got {text.strip()!r}"
        )
    stage, kind, microbatch = match.groups()
    return StageAction(int(stage), Kind(kind), int(microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions of each rank in one step, in order.

    Attributes:
        name: name of the generator, or of the file it was read from.
        num_microbatches: microbatches per step.
        placement: the rank of each stage, by stage index.
        actions: actions of each rank in execution order: compute only, or lowered
            (with sends and receives).
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[StageAction, ...], ...]

    def __post_init__(self) -> None:
        check_microbatches(self.num_microbatches)
        if not self.placement:
            raise ConfigError("a schedule needs at least one stage, got none")
        if not all(0 <= rank < self.num_ranks for rank in self.placement):
            raise ConfigError(
                f"the placement {list(self.placement)} names a rank outside "
                f"0 to {self.num_ranks - 1}, the ranks that have an action list"
            )

    @property
    def num_ranks(self) -> int:
        """Number of ranks; a rank may hold several stages, or none."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return len(self.placement)

    @property
    def is_lowered(self) -> bool:
        """True if the lists contain sends and receives."""
        return any(not one.is_compute for row in self.actions for one in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(
            stage for stage, holder in enumerate(self.placement) if holder == rank
        )

    def renumbered(self, number: Mapping[int, int], num_ranks: int) -> Schedule:
        """Maps ranks to new numbers; other new ranks get no actions."""
        rows: list[tuple[StageAction, ...]] = [()] * num_ranks
        for rank, new in number.items():
            rows[new] = self.actions[rank]
        placement = tuple(number[rank] for rank in self.placement)
        return replace(self, placement=placement, actions=tuple(rows))


def check_microbatches(num_microbatches: int) -> None:
    """Raises ConfigError for a schedule without microbatches."""
    check_whole("the number of microbatches", num_microbatches, 1)


def loop_placement(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod p, as in interleaved schedules."""
    return tuple(stage % num_ranks for stage in range(num_ranks * stages_per_rank))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, in a V: rank 0 holds the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
