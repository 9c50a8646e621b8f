"""Private names of torch: in one room, and each can be missing."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.utils import rnn

from elche.torch_internals import batches
from elche.torch_internals.batches import tree_map
from elche.torch_internals.groups import SCALER_FLAG
from elche.torch_internals.lookup import INTERNALS
from tests.torch_without import CHECKS, REFUSED

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "elche"
HOME = SRC / "torch_internals"
for path in HOME.glob("*.py"):  # which looks all names up
    import_module(f"elche.torch_internals.{path.stem}")
NOT_TORCH = ("_fields", "_extra_state", "_elche_")
"""Of namedtuples, of state dicts' format, and what elche sets on a user's objects."""
ELSEWHERE = {
    "integrations/lightning.py": {"_accelerator_connector"},  # of Lightning
    "integrations/transformers.py": {  # of transformers
        "_globalstep_last_logged",
        "_loss_shifts_labels",
        "_tr_loss",
    },
    "integrations/transformers_arguments.py": {"_reset_state"},  # of accelerate
    "launching/function_rank.py": {"_clear", "_run_exitfuncs"},  # of atexit
    "runtime/watch/model_sums.py": {"_replace"},  # of NamedTuple
    "runtime/data/own_iteration.py": {
        "_get_iterator",
        "_iterator",
    },  # users override it
    "runtime/coordinator_process/serving.py": {"_exit"},  # of os
    "runtime/process/launcher_watch.py": {"_exit"},  # of os
}


def test_every_name_is_here_and_has_a_check() -> None:
    names = [each.name for each in INTERNALS]
    assert set(names) == CHECKS.keys()
    assert len(set(names)) == len(names)
    assert [each.name for each in INTERNALS if not each.is_there] == []
    assert CHECKS.keys() >= REFUSED


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
    """Outcomes of the checks that are tested, by the missing name; "" for none."""
    selected = [item.name for item in request.session.items]
    names = [name for name in CHECKS if f"test_without_a_name[{name}]" in selected]
    run = subprocess.run(
        [sys.executable, "-m", "tests.torch_without", "", *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    said = run.stdout.splitlines()  # torch 2.9's gloo writes lines of its own there
    lines = [json.loads(line) for line in said if line.startswith("{")]
    return {each["name"]: each for each in lines}


def test_with_all_names_all_is_right(outcomes: dict[str, dict[str, str]]) -> None:
    assert outcomes[""] == {"name": "", "warnings": [], "error": ""}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in REFUSED))
        for name in CHECKS
    ],
)
def test_without_a_name(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    found = outcomes[name]
    (warning,) = found["warnings"]
    assert warning.startswith(f"torch {torch.__version__} has no {name} (")
    if name in REFUSED:
        expected = f"expected a torch that has {name}"
        assert found["error"].startswith(f"elche.errors.ConfigError: {expected}")
    else:
        assert found["error"] == ""


def test_nested_values_are_mapped_as_torch_does() -> None:
    packed = rnn.pack_sequence([torch.ones(2)])
    tree = {"a": [1, (2, packed)], "b": ()}
    leaf = rnn.PackedSequence

    def is_leaf(item: object) -> bool:
        return isinstance(item, leaf)

    def call(item: object) -> object:
        return item if is_leaf(item) else -1

    own = batches._map(call, tree, is_leaf)
    assert own == tree_map(call, tree, is_leaf=is_leaf)
    assert own == {"a": [-1, (-1, packed)], "b": ()}


def _private(text: str) -> bool:
    return text.startswith("_") and not text.startswith(("__", *NOT_TORCH))


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Names with an underscore that elche defines itself."""
    own: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            own.add(node.attr)
    return own


def _foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names in a module that are not elche's: lines and names."""
    torchs = {each.name.rpartition(".")[2] for each in INTERNALS} | {SCALER_FLAG}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if node.attr not in own or (node.attr in torchs and not is_self):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            names = [*module.split("."), *(a.name for a in node.names)]
            parts = [part for name in names for part in name.split(".")]
            if not module.startswith("elche"):
                yield from ((node.lineno, part) for part in parts if _private(part))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.isidentifier()
            and _private(node.value)
            and node.value not in own
        ):
            yield node.lineno, node.value


def test_no_other_module_names_what_is_private_to_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}
    own = _own_names([tree for path, tree in trees.items() if path.parent != HOME])
    found = [
        f"{path.relative_to(SRC)}:{line}: {name}"
        for path, tree in trees.items()
        if path.parent != HOME
        for line, name in _foreign(tree, own)
        if name not in ELSEWHERE.get(str(path.relative_to(SRC)), ())
    ]
    assert found == []
