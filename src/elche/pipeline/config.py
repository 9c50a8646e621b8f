"""Settings of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elche.errors import ConfigError
from elche.schedule.costs import PipelineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How a pipeline is cut, checked and waited for.

    Attributes:
        loss_reduction: what loss_fn does over the samples of a microbatch. Gradients
            are those of the same reduction over the whole batch.
        partition: layers of each stage; None divides them evenly by number.
        stages_per_rank: of schedules that allow several; None takes their usual number.
        costs: measured costs of the stages, for schedules that depend on them. With
            ``"measure"`` each rank times the layers on its device at the start, and
            partition and schedule are made for these times.
        sample: one microbatch of the input, for ``costs="measure"``; on every rank.
        split_backward: defer weight gradients where the schedule splits backward;
            otherwise they are all computed with the input gradient.
        guard: check every parameter's contributions, see `elche.pipeline.guard`.
        seed: makes initialisation of layers that are built here, and dropout, the same
            for every placement; None leaves torch's generators alone.
        init: initialises a layer that was built on the meta device; None calls
            `reset_parameters` of its modules.
        timeout_s: deadline of waits at the start, in the first steps (which may
            compile), and between steps.
        patience_factor: later, a wait inside a step may last this many times the
            longest of the last steps...
        min_patience_s: ...and at least this long.
    """

    loss_reduction: Literal["mean", "sum"] = "mean"
    partition: tuple[int, ...] | None = None
    stages_per_rank: int | None = None
    costs: PipelineCosts | Literal["measure"] | None = None
    sample: Any = None
    split_backward: bool = True
    guard: bool = True
    seed: int | None = None
    init: Callable[[Any], object] | None = None
    timeout_s: float = 300.0
    patience_factor: float = 10.0
    min_patience_s: float = 5.0

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigError(
                f"expected loss_reduction 'mean' or 'sum', got {self.loss_reduction!r}"
            )
        if isinstance(self.costs, str) and self.costs != "measure":
            raise ConfigError(
                f"expected costs of the stages or 'measure', got {self.costs!r}"
            )
        if self.partition is not None and any(n < 1 for n in self.partition):
            raise ConfigError(
                "expected at least one layer in each stage of the partition, got "
                f"{list(self.partition)}"
            )
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise ConfigError(
                f"expected stages_per_rank of at least 1, got {self.stages_per_rank}"
            )
        for name in ("timeout_s", "patience_factor", "min_patience_s"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"expected a positive {name}, got {value!r}")


def pipeline_config(
    config: PipelineConfig | None, options: Mapping[str, Any]
) -> PipelineConfig:
    """The settings: as one value, or made of single options.

    Raises:
        ConfigError: both are given, or an option is unknown or wrong.
    """
    if config is not None and options:
        raise ConfigError(
            f"expected config= or single options, got both ({', '.join(options)})"
        )
    if config is not None:
        return config
    try:
        return PipelineConfig(**options)
    except TypeError as error:
        known = ", ".join(PipelineConfig.__dataclass_fields__)
        raise ConfigError(f"{error}; the options are {known}") from error
