"""Choice of the codec for a measured link: ``codec="auto"``.

Encoding costs the training core time that a fast link does not give back, and takes
something off every message. A less exact codec is therefore chosen only where every
more exact one is clearly beaten, on the link as it was measured.
"""

from __future__ import annotations

import logging

import torch

from elche.comm.codec.codec import CODECS
from elche.comm.codec.codec_routes import sent_bytes
from elche.comm.transport.probe import probe_reduction_s
from elche.comm.transport.process_group import Group

PROBED_ELEMENTS = 1 << 16
CLEAR_GAIN = 1.4
"""How many times shorter a sum must become for a less exact codec."""

WORTH_S = 0.02
"""By how much, at least."""

CODING_S = {"fp32": 0.0, "bf16": 10e-9, "int8": 20e-9}
"""Seconds per element of a sum for encoding, decoding and keeping residuals, on one
core (docs/benchmarks.md). ``auto`` does not go as far as int4: what that costs in
learning is not measured yet."""

_log = logging.getLogger(__name__)


def predicted_s(codec: str, transfer_s: float, numel: int, world_size: int) -> float:
    """Seconds of a sum in a codec, without the link's latency.

    Args:
        codec: ``"fp32"``, ``"bf16"`` or ``"int8"``.
        transfer_s: seconds that a plain float32 sum of these elements spends in moving
            bytes.
        numel: elements.
        world_size: ranks; at least 2.
    """
    encoded, plain = (
        sent_bytes(CODECS[name], numel, world_size, 0) for name in (codec, "fp32")
    )
    return transfer_s * encoded / plain + CODING_S[codec] * numel


def choose_codec(transfer_s: float, numel: int, world_size: int) -> str:
    """The most exact codec that no less exact one clearly beats.

    Args:
        transfer_s: seconds that a plain float32 sum of these elements spends in moving
            bytes.
        numel: elements.
        world_size: ranks.
    """
    if world_size == 1 or numel == 0:
        return "fp32"
    times = {
        name: predicted_s(name, transfer_s, numel, world_size) for name in CODING_S
    }
    names = list(times)
    return next(
        name
        for at, name in enumerate(names)
        if not any(clearly_beats(times[less], times[name]) for less in names[at + 1 :])
    )


def clearly_beats(less_exact_s: float, more_exact_s: float) -> bool:
    """Whether a less exact codec is worth what it takes off.

    Args:
        less_exact_s: seconds of a sum in it.
        more_exact_s: seconds in the one that it is compared with.
    """
    return less_exact_s * CLEAR_GAIN <= more_exact_s - WORTH_S


def codec_in(group: Group, codec: str, numel: int) -> str:
    """The codec of sums in a group; ``"auto"`` by its link, measured by all its ranks.

    Args:
        group: the process group.
        codec: as set.
        numel: elements of the sums to come.
    """
    return measured_codec(group, numel) if codec == "auto" else codec


def measured_codec(group: Group, numel: int) -> str:
    """Measures the link and chooses, together with all ranks and equal on all.

    Args:
        group: the process group.
        numel: elements of the sums to come.
    """
    if group.world_size == 1 or numel == 0:
        return "fp32"
    latency_s = probe_reduction_s(group, 1)
    element_s = (probe_reduction_s(group, PROBED_ELEMENTS) - latency_s) / (
        PROBED_ELEMENTS - 1
    )
    times = torch.zeros(group.world_size, dtype=torch.float64, device="cpu")
    times[group.rank] = max(0.0, element_s) * numel
    group.all_reduce(times, "choosing a codec")
    transfer_s = float(times.max())
    chosen = choose_codec(transfer_s, numel, group.world_size)
    if group.rank == 0:
        _log.info(
            "codec %s: moving %d float32 elements takes about %.3g s on this link",
            chosen,
            numel,
            transfer_s,
        )
    return chosen
