"""Calls that all ranks make together by hand, announced before they are carried out.

In a loop that the user writes, ranks can get out of step: one updates the discriminator
while another updates the generator. Every call therefore begins with a few numbers from
each rank, on gloo's sockets, so that a rank that has gone is noticed at once; what does
not fit is named on every rank alike, and nothing is reduced.
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
from elche.errors import MismatchError, ProtocolError

HEAD = 3
"""Numbers of a rank before the values: what it calls, on what, whether that is new."""

Signature = list[tuple[int, bool, torch.dtype, tuple[int, ...]]]


@final
class Structure:
    """Names, shapes, dtypes and freezing of a model's tensors, as of now.

    Args:
        model: the model; it may grow.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._signature: Signature | None = None
        self.text = ""
        self.digest = 0

    def refresh(self) -> bool:
        """Looks at the model again; returns whether it has changed.

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
        self.text = json.dumps(model_layout(model))
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
    """Makes sure that all ranks are about to do the same.

    Args:
        group: all ranks.
        what: the call, in words that are the same on every rank.
        structure: of the model it does it with.
        values: a number per rank, for the call's own use.
        is_stale: this rank must prepare for that structure first.

    Returns:
        Whether any rank must prepare first, so that all do, and each one's values.

    Raises:
        ProtocolError: ranks call different things.
        MismatchError: their models differ; the error names the tensors.
        CommunicationError: a rank has gone, or did not come in time.
    """
    world_size = group.world_size
    rows = torch.zeros(world_size, HEAD + world_size, dtype=torch.float64, device="cpu")
    own = [zlib.crc32(what.encode()), structure.digest, float(is_stale), *values]
    rows[group.rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
    group.all_reduce(rows, what)
    calls, digests = rows[:, 0].tolist(), rows[:, 1].tolist()
    if len(set(calls)) > 1:
        texts = gather_texts(group, what, "comparing calls")
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise ProtocolError(
            f"ranks call different things: rank 0 calls {texts[0]}, rank {other} calls "
            f"{texts[other]}; make the same calls in the same order on every rank"
        )
    if len(set(digests)) > 1:
        texts = gather_texts(group, structure.text, "comparing models")
        differing = difference([json.loads(text) for text in texts])
        raise MismatchError(
            f"{what}: the model differs between ranks: {differing}; build the same "
            "model on every rank"
        )
    others: list[list[float]] = rows[:, HEAD:].tolist()
    return bool(rows[:, 2].any()), others


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) else tuple(tensor.shape)
