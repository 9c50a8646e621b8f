"""What is stored comes back as it was, and what cannot be is refused by its name."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elche.checkpoint.files import open_tensors, write_tensors
from elche.checkpoint.state_tree import KIND, decode, encode
from elche.checkpoint.weight_files import WeightFiles
from elche.errors import CheckpointError, ConfigError
from tests.harness.reached import reach

DTYPES = sorted(
    {
        dtype
        for name in dir(torch)
        if isinstance(dtype := getattr(torch, name), torch.dtype)
        # By its own name: torch.bit is uint1, which torch cannot copy.
        and not str(dtype).startswith(
            ("torch.q", "torch.bits", "torch.int", "torch.uint")
        )
    }
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint64},
    key=str,
)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Any bits of any dtype, NaN of every kind among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    items = math.prod(shape) * dtype.itemsize
    flat = torch.frombuffer(
        bytearray(draw(st.binary(min_size=items, max_size=items)) + b"\0" * 16),
        dtype=torch.uint8,
    )[:items].clone()
    if dtype == torch.bool:
        flat &= 1
    if not items:
        return torch.empty(shape, dtype=dtype)
    tensor = flat.view(dtype).reshape(shape)
    if len(shape) > 1 and draw(st.booleans()):
        return tensor.transpose(0, 1)
    return tensor


ARRAYS = st.sampled_from(["<f8", ">f4", "<i2", "|b1", "<c16", "<U3", "|S2"]).flatmap(
    lambda dtype: SHAPES.map(
        lambda shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape)
    )
)
KEYS = st.one_of(
    st.text(max_size=5), st.integers(), st.floats(allow_nan=False), st.none()
)


@st.composite
def leaves(draw: Any) -> Any:
    """A composite, as the strategy written out would have a name of 100 kB."""
    return draw(
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(),
            st.complex_numbers(),
            st.text(),
            st.binary(),
            st.sampled_from(
                [torch.float16, torch.Size([2, 3]), torch.device("cuda:1")]
            ),
            st.sampled_from([np.float64(0.1), np.int32(3), np.bool_(True)]),
            tensors(),
            ARRAYS,
        )
    )


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner,
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from([KIND, "value"]), inner),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    )


TREES = nested(nested(nested(leaves())))


def stored(tree: Any, folder: Path) -> Any:
    """Through JSON and a file of safetensors."""
    node, found = encode(tree)
    write_tensors(folder / "t.safetensors", found)
    read = open_tensors(folder / "t.safetensors")
    return decode(json.loads(json.dumps(node)), lambda name, _: read.get_tensor(name))


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def same(a: Any, b: Any) -> bool:
    """Equal in kind, order, sign and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        reach("tensor")
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, np.ndarray | np.generic):
        reach("array")
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        keys = list(a) == list(b) and list(map(type, a)) == list(map(type, b))
        return keys and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


# Said once in a process, as an error inside hypothesis' draws: it found them flaky.
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.reaches("tensor", "array")
@given(tree=TREES)
def test_trees_come_back_exactly(
    tree: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert same(stored(tree, tmp_path_factory.mktemp("tree")), tree)


def test_states_of_optimizers_and_schedulers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler
    states: list[Any] = [
        model.state_dict(),
        schedule.MultiStepLR(scheduled, [1, 2]).state_dict(),
        schedule.OneCycleLR(scheduled, 1.0, total_steps=9).state_dict(),
        schedule.ReduceLROnPlateau(scheduled).state_dict(),
        schedule.SequentialLR(
            scheduled, [schedule.ConstantLR(scheduled)], milestones=[]
        ).state_dict(),
    ]
    for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS):
        optimizer: Any = kind(model.parameters(), lr=0.1)
        for _ in range(2):

            def loss() -> torch.Tensor:
                model.zero_grad()
                value = model(torch.ones(4, 3)).square().sum()
                value.backward()
                return value

            optimizer.step(loss)
        states.append(optimizer.state_dict())
    assert same(stored(states, tmp_path), states)


def test_what_shares_memory_is_stored_once(tmp_path: Path) -> None:
    table = torch.arange(9.0).reshape(3, 3)
    tree = {"a": table, "b": table.detach(), "turned": table.t(), "row": table[0]}
    _, found = encode(tree)
    assert sorted(found) == ["state.a", "state.row", "state.turned"]
    back = stored(tree, tmp_path)
    assert same(back, tree)
    assert back["a"].data_ptr() == back["b"].data_ptr()


class _Own(nn.Parameter):
    """A parameter of somebody's own."""


def test_other_mappings_and_parameters_come_back_as_plain_ones(tmp_path: Path) -> None:
    counts = defaultdict(int, a=1)
    tree = {"counts": counts, "w": _Own(torch.ones(2))}  # type: ignore[no-untyped-call]
    assert same(stored(tree, tmp_path), {"counts": {"a": 1}, "w": torch.ones(2)})


def test_names_of_tensors_do_not_collide() -> None:
    _, found = encode({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    assert sorted(found) == ["state.a.b", "state.a.b#2"]


class Colour(enum.IntEnum):
    RED = 1


def _endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": [object()]}, r"state\.a\[0\]: expected .* got a object; let state_dict"),
        ({"a": Colour.RED}, r"state\.a: expected .* got a Colour"),
        ({"a": {1}}, r"state\.a: expected .* got a set"),
        ({"a": UserDict(b=1)}, r"state\.a: expected .* got a UserDict"),
        ({(1, 2): 3}, r"state: expected keys .* got the key \(1, 2\), a tuple"),
        ([torch.eye(2).to_sparse()], r"state\[0\]: expected a dense tensor"),
        ([torch.empty(2, device="meta")], r"state\[0\]: .* with values"),
        ([np.array([object()])], r"state\[0\]: expected .* got a ndarray"),
        (_endless(), r"of at most 100 levels"),
    ],
)
def test_anything_else_is_refused_by_its_place(tree: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        encode(tree)


@pytest.mark.parametrize(
    "node", [{KIND: "tuple"}, {KIND: "what", "value": 1}, {KIND: "dtype", "value": "x"}]
)
def test_foreign_nodes_are_refused(node: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a state as elche writes it"):
        decode(node, lambda name, _: torch.zeros(1))


ONES, TWOS = torch.ones(3), torch.full((2, 2), 2.0)


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ONES})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": TWOS})
    write_tensors(tmp_path / "optimizer.safetensors", {"c": TWOS})
    found = WeightFiles.found_at(tmp_path)
    assert sorted(found) == ["a", "b"]
    assert torch.equal(found["b"], TWOS)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(found["a"], ONES), "a file is opened for its own tensors only"
    alone = WeightFiles.found_at(tmp_path / "optimizer.safetensors")
    assert list(alone) == ["c"]


def test_files_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"expected model.*got \['pytorch_model"):
        WeightFiles.found_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"absent cannot be read: "):
        WeightFiles.found_at(tmp_path / "absent")
    write_tensors(tmp_path / "model.safetensors", {"a": ONES})
    write_tensors(tmp_path / "model-1.safetensors", {"a": ONES})
    with pytest.raises(CheckpointError, match=r"a is in .*model.* and in mod.*; give"):
        WeightFiles.found_at(tmp_path)


def test_ranks_that_have_saved_a_tensor_of_both(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model-rank0.safetensors", {"tied": ONES, "a": TWOS})
    write_tensors(tmp_path / "model-rank1.safetensors", {"tied": ONES})
    assert sorted(WeightFiles.found_at(tmp_path)) == ["a", "tied"]
