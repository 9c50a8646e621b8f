"""Tensors that elche makes say where, and one room knows the types of devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torch.utils._device import _device_constructors

from tests.test_layers import SOURCES

CONSTRUCTORS = {each.__name__ for each in _device_constructors()}
OWN_PROCESSES = ("elche.demo.",)
"""Runs of elche's own scripts, which set no default."""
AS_TORCH_DOES = {("elche.runtime.data.positions", "torch.empty((), dtype=torch.int64)")}
"""A seed drawn where a DataLoader draws its own, from the same generator."""


def without_device(module: str, source: str) -> Iterator[str]:
    """Calls of torch's constructors that leave the device to a default."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        is_torch = ast.unparse(node.func.value) == "torch"
        if is_torch and node.func.attr in CONSTRUCTORS:
            named = any(keyword.arg == "device" for keyword in node.keywords)
            if not named and (module, ast.unparse(node)) not in AS_TORCH_DOES:
                yield f"{module}:{node.lineno}: {ast.unparse(node)}"


def named_vendors(module: str, source: str) -> Iterator[str]:
    """Names of CUDA: its module of torch, its flag of tensors, its type of device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name == "torch.cuda" or node.attr == "is_cuda":
                yield f"{module}:{node.lineno}: {name}"
        elif isinstance(node, ast.Constant) and str(node.value).startswith("cuda"):
            yield f"{module}:{node.lineno}: {node.value!r}"


def test_one_room_names_vendors() -> None:
    planted = "import torch\nx = torch.cuda.Stream() if y.is_cuda else 'cuda:0'\n"
    assert len({*named_vendors("planted", planted)}) == 3
    assert not [
        line
        for module, source in SOURCES.items()
        if not module.startswith("elche.devices")
        for line in named_vendors(module, source)
    ]


def test_every_tensor_names_its_device() -> None:
    assert {"empty", "zeros", "tensor", "arange", "as_tensor"} <= CONSTRUCTORS
    found = [
        line
        for module, source in SOURCES.items()
        if not module.startswith(OWN_PROCESSES)
        for line in without_device(module, source)
    ]
    assert found == []
