"""In-memory checkpoint, broadcast to ranks that join."""

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
from elche.comm.transport.process_group import Group, gather_values
from elche.errors import MismatchError

WHAT: Final = "copying the run's state"
PIECE_BYTES: Final = 1 << 24
"""Bytes per broadcast; ranks that need no state receive and discard the pieces."""


@final
@dataclass(frozen=True, slots=True)
class ReceivedState:
    """A received checkpoint of one rank; see `Checkpoint`.

    Attributes:
        path: name of the checkpoint in errors.
        manifest: description of the contents.
        state: the sending rank's own part, the shared part, and the model.
    """

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]

    def shared(self) -> StateTree:
        """Returns the state that is common to all ranks."""
        return self.state["shared"]

    def of_rank(self, rank: int) -> StateTree:
        """Returns the own state of the rank that sent the checkpoint."""
        return self.state["own"]

    @property
    def model(self) -> dict[str, Tensor]:
        """Tensors of the model by name."""
        return dict(self.state["model"])


def packed(held: Captured, info: Mapping[str, Any]) -> list[bytearray]:
    """Encodes one rank's captured state as messages."""
    parts = {"own": held.own, "shared": held.shared, MODEL: encode(held.model, MODEL)}
    trees = {name: tree for name, (tree, _) in parts.items()}
    tensors = {name: one for _, own in parts.values() for name, one in own.items()}
    content = {"state": trees, "info": dict(info), "error": ""}
    return [bytearray(json.dumps(content).encode()), packed_tensors(tensors)]


def refused(why: str) -> list[bytearray]:
    """Encodes the reason why a rank cannot send its state."""
    return [bytearray(json.dumps({"error": why}).encode()), bytearray()]


def unpacked(messages: list[bytearray]) -> ReceivedState:
    """Decodes a checkpoint from received messages.

    Raises:
        MismatchError: the source rank could not send its state.
    """
    content = json.loads(messages[0])
    if content["error"]:
        raise MismatchError(f"this rank cannot join the run: {content['error']}")
    tensors = unpacked_tensors(messages[1])

    def tensor(name: str, in_model: bool) -> Tensor:
        return tensors[f"{MODEL}.{name}" if in_model else name]

    return ReceivedState(
        Path("the state of the ranks that train"),
        Manifest(name="", run_id="", world_size=1, info=content["info"], files={}),
        decode(content["state"], tensor),
    )


def send(
    group: Group, source: int, messages: list[bytearray] | None, *, keeps: bool
) -> list[bytearray]:
    """Broadcasts messages of one rank; a collective call.

    Args:
        group: process group of all ranks.
        source: rank that sends.
        messages: messages to send; None except on `source`.
        keeps: True if this rank keeps the received messages.

    Returns:
        The messages if `keeps`, else an empty list.
    """
    lengths = [0] * 2 if messages is None else [len(each) for each in messages]
    lengths = gather_values(group, lengths, WHAT)[source]
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
