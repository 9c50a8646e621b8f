"""Tensors that cannot be made equal on all ranks, by reason."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy


def why_unshareable(tensor: torch.Tensor) -> str:
    """What is wrong with a parameter or buffer, to stand after its name; "" if nothing.

    Anything that would fail on the ranks that receive values, and leave the others
    waiting for them.
    """
    if is_lazy(tensor):
        return "is lazy and has no shape yet; run one batch through the model first"
    if type(tensor.data).__name__ == "DTensor":
        return "is a DTensor, which is already distributed"
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}; expected a dense tensor"
    if tensor.is_meta:
        return "is on the meta device and has no values; use to_empty() and fill it"
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and not step for size, step in strides):
        return "has elements that share memory, as expand() makes them; clone() it"
    return ""
