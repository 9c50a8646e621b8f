"""Settings of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from elche.config_checks import check_fields
from elche.errors import ConfigError
from elche.runtime.data.batch_weights import WeightOf, check_weight_of
from elche.schedule.costs import PipelineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Cut, checks and deadlines of a pipeline.

    Attributes:
        loss_reduction: loss_fn's reduction over the samples of a microbatch. Gradients
            use the same reduction over the whole batch.
        partition: number of layers of each stage; None divides layers evenly.
        stages_per_rank: stages per rank, where the schedule allows several; None means
            its usual number.
        replicas: number of pipelines that train the model together, each with its own
            batches, on equally many consecutive ranks; or a list of each one's ranks.
            See `elche.pipeline.replicas.replicas`.
        split_batches: whether every rank passes the batch and target of all replicas to
            `step` and `evaluate`, which split them over the replicas. A run under
            `elche run` then continues when a rank dies: the ranks of its replica end,
            and the others repeat the step.
        costs: measured costs of the stages, for schedules that depend on them. With
            ``"measure"`` each rank times the layers on its device at the start, and
            partition and schedule are planned from these times.
        sample: one microbatch of the input, for ``costs="measure"`` and to cut a
            module; on every rank.
        split_points: names of submodules before which to cut a module, or torch's
            ``{"layer2": SplitPoint.BEGINNING}``. With None, a module that is not a
            Sequential and has no `split` is cut around the members of its ModuleLists
            and Sequentials. See `elche.pipeline.cutting`.
        weight_of: function from a microbatch's target to its weight: the number of
            elements in the loss's mean, such as
            ``lambda target: (target != -100).sum()``. None means samples. With
            ``loss_fn=None`` it receives the microbatch; None then counts the labels.
        whole: names of values that every microbatch receives uncut: keywords of `step`,
            keys or positions of the batch, and ``"target.KEY"``. All others are cut if
            their first dimension is the batch's. With None, the trace of a cut model
            decides, or else the first call. A value is refused if neither shows whether
            it has a row per sample.
        memory_bytes: bytes per rank of the run for parameters, their state (as large as
            Adam's) and activations, for ``costs="measure"``; infinity for no limit.
            None means nine tenths of a CUDA device's free memory at the start, and no
            limit on the CPU. If costs are given, their `memory` is the limit.
        split_backward: defer weight gradients where the schedule splits backward;
            otherwise they are all computed with the input gradient.
        guard: check every parameter's contributions, see
            `elche.pipeline.split_backward.guard`.
        seed: seed of dropout and of the initialisation of layers built here; the result
            does not depend on the placement. None uses the script's torch.manual_seed,
            with the same result if all ranks use the same seed. A single process then
            draws like plain torch. With several ranks torch's generators are not
            changed.
        init: function that initialises a layer built on the meta device. None calls its
            modules' `reset_parameters`, or transformers' own initialisation. ``"load"``
            leaves the weights to `Pipeline.load` or `load_state_dict`.
        transport: ``"auto"`` sends activations and gradients from device to device by
            NCCL if all ranks are on one host with a CUDA device each, else through host
            memory. ``"gloo"`` always uses host memory.
        timeout_s: deadline (s) of each wait for another rank.
    """

    loss_reduction: Literal["mean", "sum"] = "mean"
    partition: tuple[int, ...] | None = None
    stages_per_rank: int | None = None
    replicas: int | Sequence[Sequence[int]] = 1
    split_batches: bool = False
    costs: PipelineCosts | Literal["measure"] | None = None
    sample: Any = None
    split_points: Sequence[str] | Mapping[str, Any] | None = None
    weight_of: WeightOf | None = None
    whole: Sequence[str] | None = None
    memory_bytes: Sequence[float] | None = None
    split_backward: bool = True
    guard: bool = True
    seed: int | None = None
    init: Callable[[Any], object] | Literal["load"] | None = None
    transport: Literal["auto", "gloo"] = "auto"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_fields(self, whole={"stages_per_rank": 1}, positive=("timeout_s",))
        replicas, limits = self.replicas, self.memory_bytes
        if self.weight_of is not None and self.loss_reduction == "sum":
            raise ConfigError(
                "weight_of= is for loss_reduction='mean'; leave it out with 'sum'"
            )
        if limits is not None and self.costs != "measure":
            raise ConfigError(
                'memory_bytes= is for costs="measure"; given costs have their memory'
            )
        are_bytes = isinstance(limits, (tuple, list)) and all(
            isinstance(one, (int, float)) and one > 0 for one in limits
        )
        checks = {
            "whole": not isinstance(self.whole, str),
            "replicas": not isinstance(replicas, (bool, str))
            and (not isinstance(replicas, int) or replicas >= 1),
            "costs": not isinstance(self.costs, str) or self.costs == "measure",
            "memory_bytes": limits is None or are_bytes,
            "partition": self.partition is None or min(self.partition, default=1) >= 1,
            "init": self.init in (None, "load") or callable(self.init),
        }
        for name, is_right in checks.items():
            if not is_right:
                value = getattr(self, name)
                raise ConfigError(f"expected {_EXPECTED[name]}, got {value!r}")
        if self.weight_of is not None:
            check_weight_of(self.weight_of)


_EXPECTED = {
    "whole": "names such as whole=('mask',)",
    "replicas": "replicas of at least 1, or the ranks of each replica such as "
    "[[0, 1], [2, 3]]",
    "costs": "costs of the stages or 'measure'",
    "memory_bytes": "bytes above 0 for each rank as memory_bytes",
    "partition": "at least one layer in each stage as partition",
    "init": "a function of a layer or 'load' as init",
}


def pipeline_config(
    config: PipelineConfig | None, options: Mapping[str, Any]
) -> PipelineConfig:
    """Returns `config`, or a config made of single options.

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
