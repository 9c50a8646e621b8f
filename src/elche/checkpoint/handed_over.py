"""In-memory checkpoint, sent to ranks that join."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from elche.checkpoint.capture import Captured
from elche.checkpoint.files import packed_tensors, unpacked_tensors
from elche.checkpoint.manifest import Manifest
from elche.checkpoint.state_tree import MODEL, StateTree, decode, encode
from elche.comm.transport.process_group import Group
from elche.errors import MismatchError

WHAT: Final = "handing the run's state over"
PIECE_BYTES: Final = 1 << 24
"""Also those that need nothing receive it, piece by piece, and keep none."""


@final
@dataclass(frozen=True, slots=True)
class HandedOver:
    """A checkpoint of one rank that was received; see `Checkpoint`.

    Attributes:
        path: its name in errors.
        manifest: what it holds.
        state: this rank's part, the shared one, and the model.
    """

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]

    def shared(self) -> StateTree:
        """State that is common to all ranks."""
        return self.state["shared"]

    def of_rank(self, rank: int) -> StateTree:
        """State of the rank that sent it."""
        return self.state["own"]

    @property
    def model(self) -> dict[str, Tensor]:
        """The model alone."""
        return dict(self.state["model"])


def packed(held: Captured, info: Mapping[str, Any]) -> list[bytearray]:
    """Messages that carry one rank's captured state."""
    parts = {"own": held.own, "shared": held.shared, MODEL: encode(held.model, MODEL)}
    trees = {name: tree for name, (tree, _) in parts.items()}
    tensors = {name: one for _, own in parts.values() for name, one in own.items()}
    said = {"state": trees, "info": dict(info), "error": ""}
    return [bytearray(json.dumps(said).encode()), packed_tensors(tensors)]


def refused(why: str) -> list[bytearray]:
    """The messages of a rank that cannot send its state."""
    return [bytearray(json.dumps({"error": why}).encode()), bytearray()]


def unpacked(messages: list[bytearray]) -> HandedOver:
    """A checkpoint made of received messages.

    Raises:
        MismatchError: the rank that was to send it could not.
    """
    said = json.loads(messages[0])
    if said["error"]:
        raise MismatchError(f"this rank cannot join the run: {said['error']}")
    tensors = unpacked_tensors(messages[1])

    def tensor(name: str, in_model: bool) -> Tensor:
        return tensors[f"{MODEL}.{name}" if in_model else name]

    return HandedOver(
        Path("the state of the ranks that train"),
        Manifest(name="", run_id="", world_size=1, info=said["info"], files={}),
        decode(said["state"], tensor),
    )


def send(
    group: Group, source: int, messages: list[bytearray] | None, *, keeps: bool
) -> list[bytearray]:
    """Sends messages of one rank to all; with all ranks.

    Args:
        group: of all.
        source: rank that sends.
        messages: on that rank.
        keeps: what comes is wanted here.

    Returns:
        The messages, where they are wanted.
    """
    lengths = [0] * 2 if messages is None else [len(each) for each in messages]
    sizes = torch.tensor(lengths, device="cpu")
    group.broadcast(sizes, WHAT, source)
    lengths = sizes.tolist()
    if messages is None and keeps:
        messages = [bytearray(length) for length in lengths]
    for at, length in enumerate(lengths):
        for start in range(0, length, PIECE_BYTES):
            count = min(PIECE_BYTES, length - start)
            if messages is None:
                piece = torch.empty(count, dtype=torch.uint8, device="cpu")
            else:
                piece = torch.frombuffer(
                    messages[at], dtype=torch.uint8, count=count, offset=start
                )
            group.broadcast(piece, WHAT, source)
    return messages if messages is not None and keeps else []
