"""Memory limit per device for plans from measured times."""

from __future__ import annotations

import math

import torch
from torch import nn

from elche.errors import ConfigError
from elche.pipeline.pipeline_config import PipelineConfig
from elche.pipeline.setup.building import LayerList
from elche.runtime.process.environment import Placement

USABLE_SHARE = 0.9
"""Usable fraction of a device's free memory: the rest is fragmentation and workspace of
kernels.
"""


def memory_limit(
    config: PipelineConfig,
    placement: Placement,
    device: torch.device,
    layers: LayerList,
) -> float:
    """Bytes for parameters, their state and activations on this rank.

    Args:
        config: may give it.
        placement: which rank this is.
        device: its device.
        layers: those that stand on it already count as free, they are part of the plan.

    Returns:
        What the settings give; else a share of what a CUDA device has free; infinite on
        the CPU, whose memory ranks and other programs share, and which can be swapped.

    Raises:
        ConfigError: the settings do not give one for each rank.
    """
    if config.memory_bytes is not None:
        if len(config.memory_bytes) != placement.world_size:
            raise ConfigError(
                f"expected memory_bytes for each of {placement.world_size} ranks, got "
                f"{list(config.memory_bytes)}"
            )
        return float(config.memory_bytes[placement.rank])
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    here = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for source in layers.sources
        if isinstance(source, nn.Module)
        for one in (*source.parameters(), *source.buffers())
        if one.device == device
    }
    return USABLE_SHARE * (free + cached + sum(here.values()))
