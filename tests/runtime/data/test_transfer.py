"""What of a batch is moved to a device, and what of it can be seen."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from elche.runtime.data.transfer import tensors_in, to_device

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


def test_which_tensors_can_be_seen() -> None:
    a, b = torch.ones(2), torch.zeros(3)

    class Moves:
        def to(self, device: Any) -> Any:
            raise AssertionError("not to be moved here")

    assert tensors_in({"a": a, "b": ["text", (b, 3)], "c": None}) == [a, b]
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    found = tensors_in([packed])
    assert found is not None
    assert found[0] is packed.data
    assert tensors_in([a, Moves()]) is None
    assert tensors_in({"a": torch.eye(2).to_sparse()}) is None
    assert tensors_in("text") == []


def test_containers_survive_a_move() -> None:
    batch = Pair(
        {"a": torch.ones(2)}, [torch.zeros(1), ("text", UserDict(n=torch.ones(1)))]
    )
    moved = to_device(batch, CPU)
    assert isinstance(moved, Pair)
    assert moved.x["a"] is batch.x["a"]
    assert moved.y[1][0] == "text"
    assert isinstance(moved.y[1][1], UserDict)
    assert moved.y[1][1]["n"].item() == 1.0
