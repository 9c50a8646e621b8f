"""Tensors made equal on all ranks, sending only those that differ.

Most runs build the same model from the same seed or file on every rank. Behind a slow
link the copy of what everybody has already would be the longest part of the start (10 M
parameters behind 10 Mbit/s: 32 s), so digests are compared first.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import torch

from elche.comm.transport.process_group import Group

DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """BLAKE2b of a name, a shape, a dtype and every byte of the values.

    Waits for the tensor's device.
    """
    digest = hashlib.blake2b(_form_of(name, tensor), digest_size=DIGEST_BYTES)
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _form_of(name: str, tensor: torch.Tensor) -> bytes:
    return f"{name}\n{list(tensor.shape)}\n{tensor.dtype}\n".encode()


def differing(group: Group, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
    """Indices of the tensors that are not equal to the bit on all ranks.

    One that has another shape somewhere (a cache that grows) is not among them: it is
    each rank's own.

    Args:
        group: the process group; all ranks call this.
        named: names and tensors, as many on every rank.
    """
    if group.world_size == 1 or not named:
        return []
    shape = (group.world_size, len(named), 2, DIGEST_BYTES)
    rows = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    for index, (name, tensor) in enumerate(named):
        form = hashlib.blake2b(_form_of(name, tensor), digest_size=DIGEST_BYTES)
        both = bytearray(form.digest() + digest_of(name, tensor))
        rows[group.rank, index] = torch.frombuffer(both, dtype=torch.uint8).view(2, -1)
    group.all_reduce(rows, "comparing tensors")
    is_same = (rows == rows[0]).all(dim=3).all(dim=0)
    return [at for at, (form, values) in enumerate(is_same.tolist()) if form > values]


@torch.no_grad()
def make_equal(
    group: Group, named: Sequence[tuple[str, torch.Tensor]], what: str
) -> int:
    """Gives every rank rank 0's values; what is equal on all does not travel.

    Args:
        group: the process group; all ranks call this.
        named: names and tensors, in the same order and of the same shapes and dtypes on
            every rank.
        what: what this is, for errors.

    Returns:
        Bytes of the tensors that travelled.

    Raises:
        CommunicationError: it failed, or a rank did not come in time.
    """
    chosen = [named[index][1].detach() for index in differing(group, named)]
    for tensor in chosen:
        host = tensor.to("cpu").contiguous()
        group.broadcast(host, what)
        tensor.copy_(host)
    sent_bytes = sum(tensor.numel() * tensor.element_size() for tensor in chosen)
    if group.rank == 0:
        _log.debug(
            "%s: %d of %d tensors differed between ranks, %d bytes sent",
            what,
            len(chosen),
            len(named),
            sent_bytes,
        )
    return sent_bytes


@torch.no_grad()
def broadcast_bits(
    group: Group, tensors: Sequence[torch.Tensor], what: str, source: int = 0
) -> None:
    """Copies one rank's tensors to all ranks bit for bit, in one message."""
    if not tensors:
        return
    parts = [each.detach().to("cpu").contiguous().view(-1) for each in tensors]
    message = torch.cat([part.view(torch.uint8) for part in parts])
    group.broadcast(message, what, source)
    if group.rank == source:
        return
    sizes = [each.nbytes for each in tensors]
    for tensor, raw in zip(tensors, message.split(sizes), strict=True):
        # Autograd would refuse a change of what a pass under way has saved.
        tensor.data.copy_(raw.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def average(
    group: Group, tensors: Sequence[torch.Tensor], what: str, *, counts: bool = True
) -> None:
    """Makes tensors their mean over the ranks that count, with all ranks.

    In one message of float64; integers are rounded.
    """
    if not tensors:
        return
    values = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    parts = [each.detach().to("cpu", torch.float64).reshape(-1) for each in values]
    message = torch.cat([*parts, torch.ones(1, dtype=torch.float64, device="cpu")])
    if not counts:
        message.zero_()  # and not 0 times what may be NaN
    group.all_reduce(message, what)
    means = (message[:-1] / message[-1]).split([part.numel() for part in parts])
    if message[-1]:
        for each, mean in zip(values, means, strict=True):
            mean = mean if each.is_floating_point() else mean.round()
            each.copy_(mean.view(each.shape))
