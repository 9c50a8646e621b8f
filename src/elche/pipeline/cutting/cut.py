"""Cut of a plain module into layers, by names or around its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from elche.errors import ConfigError
from elche.pipeline.cutting.segments import segments_of
from elche.pipeline.cutting.tracing import CallTrace, trace_cached, trace_calls
from elche.pipeline.cutting.whole_modules import SplitPoints, at_blocks, at_points


def cut_model(
    model: nn.Module, points: SplitPoints | None, sample: Any
) -> list[nn.Module]:
    """Cuts a model into layers that hold its own modules.

    Args:
        model: any module; it is left as it was.
        points: see `elche.pipeline.pipeline_config.PipelineConfig.split_points`; None
            cuts around the members of its chains of blocks.
        sample: one microbatch of its input.

    Raises:
        ConfigError: there is no such submodule, or the code between those that stay
            whole cannot be cut.
    """
    if sample is None:
        raise ConfigError(
            f"a {type(model).__name__} is cut by tracing it: give sample=, one "
            "microbatch of its input; or the layers with split=lambda model: [...]"
        )
    layers = _cut(model, points, sample, trace_calls)
    if points is not None and len(layers) <= len(points):
        raise ConfigError(
            f"the split points {list(points)} cut the model into {len(layers)} layers; "
            "expected names of submodules that forward calls, with others before or "
            "between them"
        )
    return layers


def cut_cached(
    model: nn.Module, points: SplitPoints | None, sample: Any
) -> list[nn.Module]:
    """The same layers as those of `cut_model`, for generation with a cache.

    Args:
        model: as it was cut; with a cache, see `elche.pipeline.cutting.caching`.
        points: likewise.
        sample: likewise.

    Raises:
        ConfigError: its forward cannot be traced with a cache.
    """
    return _cut(model, points, sample, trace_cached)


def _cut(
    model: nn.Module,
    points: SplitPoints | None,
    sample: Any,
    trace: Callable[[nn.Module, Mapping[int, str], Any], CallTrace],
) -> list[nn.Module]:
    choice = at_blocks(model) if points is None else at_points(model, points)
    whole = {id(model.get_submodule(name)): name for name in choice.whole}
    return segments_of(model, trace(model, whole, sample), choice)
