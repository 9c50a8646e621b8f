"""Stages and links from a TOML file, as `elche schedule --stages` reads it.

::

    memory = [4, 4]              # units per rank; optional

    [[stage]]                    # in the model's order
    rank = 0
    times = [1.0, 1.0, 1.0]      # F, I, W of one microbatch
    backward = 1.9               # B, where it is cheaper than I + W; optional
    activation = 1.0             # units of memory of one microbatch; optional
    link = 0.1                   # time of a message to the next stage; optional

    [[stage]]
    rank = 1
    times = [2.0, 2.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elche.errors import ConfigError
from elche.schedule.costs import PipelineCosts, StageCost
from elche.schedule.table_values import (
    check_keys,
    is_number,
    number,
    read_table,
    tables,
    three_times,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDefaults:
    """Defaults of a stage file.

    Attributes:
        num_ranks: ranks; None takes the highest that a stage names, plus one.
        times: F, I, W of a stage without `times`.
        communication: time of a message, where there is no `link`.
        memory: units of each rank, where there is no `memory`.
    """

    num_ranks: int | None = None
    times: tuple[float, float, float] | None = None
    communication: float = 0.0
    memory: float | None = None


def read_stages(raw: Mapping[str, Any], defaults: StageDefaults) -> PipelineCosts:
    """Reads the parsed TOML of a stage file.

    Args:
        raw: the document.
        defaults: for what it leaves out.

    Raises:
        ConfigError: a key is unknown, missing, or has an impossible value.
    """
    check_keys(raw, {"stage", "memory"}, "the file")
    stages, placement, links = [], [], []
    for index, table in enumerate(tables(raw, "stage")):
        where = f"[[stage]] {index}"
        rank = table.get("rank")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise ConfigError(f"{where}: expected rank = 0 or above, got {rank!r}")
        placement.append(rank)
        times = three_times(table.get("times", defaults.times), where, "times")
        stages.append(
            read_table(
                StageCost,
                where,
                table,
                also={"rank", "times", "link"},
                hidden={"forward", "input_gradient", "weight_gradient"},
                forward=times[0],
                input_gradient=times[1],
                weight_gradient=times[2],
            )
        )
        links.append(number(table, "link", where, defaults.communication))
    if not stages:
        raise ConfigError("expected at least one [[stage]]")
    num_ranks = defaults.num_ranks or max(placement) + 1
    memory = raw.get("memory")
    if memory is None:
        memory = [] if defaults.memory is None else [defaults.memory] * num_ranks
    if not isinstance(memory, list) or not all(map(is_number, memory)):
        raise ConfigError(f"expected memory = [units of rank 0, ...], got {memory!r}")
    return PipelineCosts(
        stages=tuple(stages),
        placement=tuple(placement),
        num_ranks=num_ranks,
        links=tuple(links[:-1]),
        memory=tuple(memory),
    )
