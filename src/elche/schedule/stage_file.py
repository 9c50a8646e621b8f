"""Stages and links from a TOML file; the help of `elche schedule` shows its format."""

from __future__ import annotations

from collections.abc import Mapping
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


def read_stages(
    raw: Mapping[str, Any],
    num_ranks: int | None,
    times: tuple[float, float, float] | None,
    communication: float,
    memory: float | None,
) -> PipelineCosts:
    """Reads the parsed TOML of a stage file; the other arguments are defaults.

    Without `num_ranks` it is the highest named rank plus one.

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
        parts = three_times(table.get("times", times), where, "times")
        stages.append(
            read_table(
                StageCost,
                where,
                table,
                also={"rank", "times", "link"},
                hidden={"forward", "input_gradient", "weight_gradient"},
                forward=parts[0],
                input_gradient=parts[1],
                weight_gradient=parts[2],
            )
        )
        links.append(number(table, "link", where, communication))
    if not stages:
        raise ConfigError("expected at least one [[stage]]")
    num_ranks = num_ranks or max(placement) + 1
    limits = raw.get("memory", [] if memory is None else [memory] * num_ranks)
    if not isinstance(limits, list) or not all(map(is_number, limits)):
        raise ConfigError(f"expected memory = [units of rank 0, ...], got {limits!r}")
    return PipelineCosts(
        stages=tuple(stages),
        placement=tuple(placement),
        num_ranks=num_ranks,
        links=tuple(links[:-1]),
        memory=tuple(limits),
    )
