"""What of a batch is moved to a device, and what of it can be seen."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from elche.runtime.data.transfer import tensors_in

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
