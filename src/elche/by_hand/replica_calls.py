"""Collective calls made by hand: announced first, then executed.

In a user's own loop, ranks can get out of step: one updates the discriminator while
another updates the generator. Every call therefore first exchanges a few numbers over
gloo's sockets, which also detects a dead rank at once. On a mismatch every rank raises
the same error and nothing is reduced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elche.comm.tensors.unshareable import difference, model_layout
from elche.comm.transport.process_group import Group, gather_texts
from elche.errors import ConfigError, MismatchError, ProtocolError

HEAD = 3
"""Numbers before a rank's values: digests of call and model, and a stale flag."""

Signature = list[tuple[int, bool, torch.dtype, tuple[int, ...]]]


@final
class Structure:
    """Current names, shapes, dtypes and freezing of a model's tensors.

    Args:
        model: model to describe; it may grow.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._signature: Signature | None = None
        self.text = ""
        self.digest = 0

    def refresh(self) -> bool:
        """Rereads the model; returns True if it has changed.

        Raises:
            ConfigError: a tensor cannot be shared between ranks.
        """
        model = self._model
        signature = [
            (id(p), p.requires_grad, p.dtype, _shape_of(p)) for p in model.parameters()
        ]
        # A buffer may be another object after every forward.
        signature += [(0, False, b.dtype, _shape_of(b)) for b in model.buffers()]
        if signature == self._signature:
            return False
        self.text = json.dumps(model_layout(model, has_strides=False))
        self.digest = zlib.crc32(self.text.encode())
        self._signature = signature
        return True


def announce(
    group: Group,
    what: str,
    structure: Structure,
    values: Sequence[float],
    *,
    is_stale: bool,
) -> tuple[bool, list[list[float]]]:
    """Checks that all ranks are about to make the same call; collective.

    Args:
        group: process group of all ranks.
        what: description of the call, the same on every rank.
        structure: structure of the call's model.
        values: numbers for the call's own use, equally many on every rank.
        is_stale: True if this rank must first rebuild for the structure.

    Returns:
        Whether any rank is stale, so that all must rebuild; and every rank's values.

    Raises:
        ProtocolError: ranks make different calls.
        MismatchError: their models differ; the error names the tensors.
        CommunicationError: a rank has died or timed out.
    """
    world_size = group.world_size
    own = [zlib.crc32(what.encode()), structure.digest, float(is_stale), *values]
    rows = torch.zeros(world_size, len(own), dtype=torch.float64, device="cpu")
    rows[group.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
    group.all_reduce(rows, what)
    calls, digests = rows[:, 0].tolist(), rows[:, 1].tolist()
    if len(set(calls)) > 1:
        texts = gather_texts(group, what, "comparing calls")
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise ProtocolError(
            f"ranks make different calls: rank 0 calls {texts[0]}, rank {other} calls "
            f"{texts[other]}; make the same calls in the same order on every rank"
        )
    if len(set(digests)) > 1:
        texts = gather_texts(group, structure.text, "comparing models")
        differing = difference([json.loads(text) for text in texts])
        raise MismatchError(
            f"{what}: the model differs between ranks: {differing}; build the same "
            "model on every rank"
        )
    given: list[list[float]] = rows[:, HEAD:].tolist()
    return bool(rows[:, 2].any()), given


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) else tuple(tensor.shape)


def check_gradients(model: nn.Module) -> None:
    """Raises ConfigError for gradients that cannot be summed in a flat message."""
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None and grad.layout != torch.strided:
            raise ConfigError(
                f"{name}: sparse gradients cannot be reduced; use sparse=False"
            )
