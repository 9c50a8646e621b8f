"""Makes tensors equal on all ranks, sending only those that differ.

Most runs build the same model from the same seed or file on every rank. Over a slow
link, copying equal tensors would dominate the start (10 M parameters at 10 Mbit/s:
32 s), so digests are compared first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from elche.comm.transport.process_group import Group, gather_values


def digest_of(name: str, tensor: torch.Tensor) -> bytes:
    """Returns the BLAKE2b digest of a tensor's name, shape, dtype and values.

    Synchronizes the tensor's device.
    """
    digest = hashlib.blake2b(_form_of(name, tensor).encode(), digest_size=32)
    host = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _form_of(name: str, tensor: torch.Tensor) -> str:
    return f"{name}\n{list(tensor.shape)}\n{tensor.dtype}\n"


def differing(group: Group, named: Sequence[tuple[str, torch.Tensor]]) -> list[int]:
    """Returns indices of tensors that are not bit-identical on all ranks; collective.

    A tensor whose shape differs between ranks (e.g. a growing cache) is not included:
    it is local to each rank.

    Args:
        group: process group of all ranks.
        named: names and tensors, the same number on every rank.
    """
    if group.world_size == 1 or not named:
        return []
    own = [[_form_of(*each), digest_of(*each).hex()] for each in named]
    ranks = gather_values(group, own, "comparing tensors")
    found = []
    for at, of_ranks in enumerate(zip(*ranks, strict=True)):
        forms, values = map(set, zip(*of_ranks, strict=True))
        if len(forms) == 1 < len(values):
            found.append(at)
    return found


def make_equal(
    group: Group, named: Sequence[tuple[str, torch.Tensor]], what: str
) -> None:
    """Broadcasts rank 0's values of tensors that differ between ranks; collective.

    Args:
        group: process group of all ranks.
        named: names and tensors, in the same order and of the same shapes and dtypes on
            every rank.
        what: description of the call for errors.

    Raises:
        CommunicationError: the broadcast failed, or a rank timed out.
    """
    for index in differing(group, named):
        broadcast_bits(group, [named[index][1]], what)


@torch.no_grad()
def broadcast_bits(
    group: Group, tensors: Sequence[torch.Tensor], what: str, source: int = 0
) -> None:
    """Broadcasts one rank's tensors bit for bit in one message; a collective call."""
    if not tensors:
        return
    parts = [each.detach().to("cpu").contiguous().view(-1) for each in tensors]
    message = torch.cat([part.view(torch.uint8) for part in parts])
    group.broadcast(message, what, source)
    if group.rank == source:
        return
    sizes = [each.nbytes for each in tensors]
    for tensor, raw in zip(tensors, message.split(sizes), strict=True):
        # Via .data: autograd refuses changes to tensors saved by a pass in progress.
        tensor.data.copy_(raw.clone().view(tensor.dtype).view(tensor.shape))


@torch.no_grad()
def average(
    group: Group, tensors: Sequence[torch.Tensor], what: str, *, counts: bool = True
) -> None:
    """Replaces tensors by their mean over ranks whose ``counts`` is set; collective.

    Uses one float64 message; means of integers are rounded.
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
