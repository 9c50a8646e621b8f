"""All-finite check over tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elche.torch_internals.held import foreach_norm


@torch.no_grad()
def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """True if every element is finite (one pass, one synchronization per device)."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(
        bool(torch.stack([n.float() for n in foreach_norm(some)]).isfinite().all())
        for some in by_device.values()
    )
