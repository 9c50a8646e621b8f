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
from dataclasses import dataclass
from typing import final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from elche.comm.tensors.unshareable import why_unshareable
from elche.comm.transport.process_group import Group, gather_texts
from elche.coordination.agreement import what_differs
from elche.coordination.protocol.events import Join
from elche.errors import ConfigError, MismatchError, ProtocolError

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
        self.text = json.dumps(_described(model))
        self.digest = zlib.crc32(self.text.encode())
        self._signature = signature
        return True


@dataclass(frozen=True, slots=True)
class Announcement:
    """Next call of a rank, announced to the others.

    Attributes:
        what: in words, the same on every rank.
        structure: of the model it does it with.
        is_stale: whether this rank must prepare for that structure first.
        values: a number per rank, for the call's own use.
    """

    what: str
    structure: Structure
    is_stale: bool
    values: Sequence[float]


def announce(
    group: Group, announcement: Announcement
) -> tuple[bool, list[list[float]]]:
    """Makes sure that all ranks are about to do the same.

    Returns:
        Whether any rank must prepare first, so that all do, and each one's values.

    Raises:
        ProtocolError: ranks call different things.
        MismatchError: their models differ; the error names the tensors.
        CommunicationError: a rank has gone, or did not come in time.
    """
    world_size, what = group.world_size, announcement.what
    rows = torch.zeros(world_size, HEAD + world_size, dtype=torch.float64, device="cpu")
    is_stale = float(announcement.is_stale)
    own = [zlib.crc32(what.encode()), announcement.structure.digest, is_stale]
    rows[group.rank] = torch.tensor(
        [*own, *announcement.values], dtype=torch.float64, device="cpu"
    )
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
        texts = gather_texts(group, announcement.structure.text, "comparing models")
        raise MismatchError(f"{what}: {structure_difference(texts)}")
    values: list[list[float]] = rows[:, HEAD:].tolist()
    return bool(rows[:, 2].any()), values


def structure_difference(texts: Sequence[str]) -> str:
    """Names the tensors in which models differ; "" if they are equal.

    Args:
        texts: `Structure.text` of each replica.
    """
    joins = [
        Join(
            rank=rank,
            version=0,
            world_size=len(texts),
            settings=(),
            tensors=tuple(
                (name, shape, kind) for name, shape, kind in json.loads(text)
            ),
            device="",
            horizon_batches=0,
        )
        for rank, text in enumerate(texts)
    ]
    return what_differs(joins)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if is_lazy(tensor) else tuple(tensor.shape)


def _described(model: nn.Module) -> list[tuple[str, str, str]]:
    """(name, shape, dtype and role) of parameters and buffers, in order."""
    described = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if why := why_unshareable(tensor):
            raise ConfigError(f"{name} {why}")
        kind = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter):
            kind += "" if tensor.requires_grad else " (frozen)"
        else:
            kind += " (buffer)"
        described.append((name, str(list(tensor.shape)), kind))
    return described
