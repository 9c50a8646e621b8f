"""Private names of torch: in one room, and all there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker

from elche.errors import ConfigError
from elche.torch_internals import lookup
from elche.torch_internals.batches import as_if_alone
from elche.torch_internals.lookup import INTERNALS

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "elche"
HOME = SRC / "torch_internals"
TORCHS = {"_buffers", "_modules", "_parameters", "_version"}
"""Names that are torch's even where elche has one of its own."""
NOT_TORCH = ("_fields", "_extra_state", "_elche_")
"""Of namedtuples, of state dicts' format, and what elche sets on a user's objects."""
ELSEWHERE = {
    "cli/main.py": {"_exit"},  # of os
    "integrations/lightning.py": {"_accelerator_connector"},  # of Lightning
    "integrations/transformers.py": {  # of transformers
        "_globalstep_last_logged",
        "_loss_shifts_labels",
        "_reset_state",  # of accelerate
        "_tr_loss",
    },
    "launching/function_rank.py": {"_clear", "_run_exitfuncs"},  # of atexit
    "pipeline/setup/meta_tensors.py": {"_init_weights"},  # of transformers
    "runtime/watch/model_sums.py": {"_replace"},  # of NamedTuple
    "runtime/data/own_iteration.py": {
        "_get_iterator",
        "_iterator",
    },  # users override it
    "runtime/coordinator_process/serving.py": {"_exit"},  # of os
    "runtime/process/launcher_watch.py": {"_exit"},  # of os
}


def test_every_name_is_here() -> None:
    for path in HOME.glob("*.py"):
        importlib.import_module(f"elche.torch_internals.{path.stem}")
    assert [name for name, is_there in INTERNALS.items() if not is_there] == []
    assert len(INTERNALS) > 15


def test_a_name_that_is_gone_is_refused_where_it_is_needed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "INTERNALS", {})
    gone = lookup.bind("torch._gone", "does everything")
    assert lookup.INTERNALS == {"torch._gone": False}
    assert f"torch {torch.__version__} has no torch._gone, which does" in caplog.text
    with pytest.raises(ConfigError, match=r"a torch that has torch\._gone, which does"):
        gone(1, a=2)


def test_a_stream_sees_no_loader_worker_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = object()
    monkeypatch.setattr(worker, "_worker_info", info)
    with as_if_alone():
        assert get_worker_info() is None
    assert get_worker_info() is info


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
    torchs = {name.rpartition(".")[2] for name in INTERNALS} | TORCHS
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
