"""Cut of a plain module into layers, by names or around its blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from elche.errors import ConfigError
from elche.pipeline.cutting.segments import segments_of
from elche.pipeline.cutting.tracing import trace_calls
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
    choice = at_blocks(model) if points is None else at_points(model, points)
    whole = {id(model.get_submodule(name)): name for name in choice.whole}
    trace = trace_calls(model, whole, sample)
    layers = segments_of(model, trace, choice)
    if points is not None and len(layers) <= len(points):
        raise ConfigError(
            f"the split points {list(points)} cut the model into {len(layers)} layers; "
            "expected names of submodules that forward calls, with others before or "
            "between them"
        )
    return layers
