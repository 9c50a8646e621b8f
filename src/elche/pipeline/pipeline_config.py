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
        replicas: number of pipelines that train the model together, each on equally
            many consecutive ranks and with its own batches; or the ranks of each. See
            `elche.pipeline.replicas.replicas`.
        split_batches: whether every rank gives `step` and `evaluate` the batch and the
            target of all replicas, which then cut them among themselves. A run under
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
        weight_of: weight of a microbatch's target, if not its samples: the count that
            the loss is a mean over, such as
            ``lambda target: (target != -100).sum()``. With ``loss_fn=None`` a function
            of the microbatch, whose labels are counted without it.
        whole: names of the values that every microbatch receives as they are: keywords
            of `step`, keys or positions of the batch, and ``"target.KEY"``. All others
            are cut where their first dimension is the batch's. With None, the trace of
            a cut model decides, or for layers by hand the first call; a value that may
            have a row per sample or not is refused.
        memory_bytes: bytes per rank of the run for parameters, their state (as large as
            Adam's) and activations, for ``costs="measure"``; infinity for no limit.
            None means nine tenths of a CUDA device's free memory at the start, and no
            limit on the CPU. With given costs their `memory` is the limit.
        split_backward: defer weight gradients where the schedule splits backward;
            otherwise they are all computed with the input gradient.
        guard: check every parameter's contributions, see
            `elche.pipeline.split_backward.guard`.
        seed: seed of the initialisation of layers built here, and of dropout,
            independent of the placement. None uses the script's torch.manual_seed,
            which gives the same result if all ranks use the same seed; one process then
            draws as plain torch does. With several ranks torch's generators are not
            changed.
        init: initialises a layer that was built on the meta device. None calls its
            modules' `reset_parameters`, or transformers' own initialisation; ``"load"``
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
