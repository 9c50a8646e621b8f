"""Who may import whom: the pure parts stay pure, the shells below the surface."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import layers

SRC = Path(__file__).resolve().parents[1] / "src"
SOURCES = layers.read_sources(SRC)


def planted(module: str, source: str) -> list[str]:
    """Returns the violations in a small tree with one planted module."""
    tree = {
        "elche": "",
        "elche.cadence": "",
        "elche.cadence.el_che": "class ElChe: ...",
        "elche.comm": "",
        "elche.comm.gradients.reducer": "import torch",
        "elche.errors": "",
        "elche.session": "",
    }
    return layers.violations({**tree, module: source})


def test_sources_are_found() -> None:
    assert {"elche", "elche.errors", "elche.cadence", "elche.cadence.el_che"} <= set(
        SOURCES
    )


def test_layers_hold() -> None:
    assert layers.violations(SOURCES) == []


def test_no_import_cycles() -> None:
    assert layers.import_cycle(SOURCES) is None


def test_pure_modules_import_without_torch() -> None:
    modules = layers.pure_modules(SOURCES)
    assert "elche.cadence.el_che" in modules
    script = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "heavy = {'torch', 'numpy', 'rich', 'click', 'asyncio', 'socket'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (run.stdout.strip(), run.stderr) == ("[]", "")


@pytest.mark.parametrize(
    ("source", "is_refused"),
    [
        ("import torch.nn as nn", True),
        ("from time import monotonic", True),
        ("def f():\n    import socket", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os", True),
        ("__import__('torch')", True),
        ("from elche.comm import reducer", True),
        ("from ..session import setup", True),
        ("from elche import ElChe", True),
        ("import math\nfrom collections.abc import Sequence", False),
        ("from elche.cadence import el_che", False),
        ("from .el_che import ElChe", False),
    ],
)
def test_violation_in_pure_code_is_found(source: str, is_refused: bool) -> None:
    found = planted("elche.cadence.planted", source)
    line = source.count("\n") + 1
    where = f"elche.cadence.planted:{line}: "
    assert [each[: len(where)] for each in found] == [where] * is_refused


def test_shell_may_use_torch_and_pure_code_but_not_the_surface() -> None:
    shell = "elche.runtime.planted"
    assert planted(shell, "import torch, threading, elche.cadence.el_che") == []
    assert planted(shell, "from elche.session import setup") == [
        "elche.runtime.planted:1: shell imports surface elche.session"
    ]


def test_surface_may_use_all_but_the_lazy_names() -> None:
    assert (
        planted("elche.cli.main", "import elche.comm.gradients.reducer, elche.session")
        == []
    )
    assert planted("elche.cli.main", "from elche import __version__") == []
    assert planted("elche.cli.main", "import elche") == [
        "elche.cli.main:1: imports through elche/__init__; name the module itself"
    ]


def test_module_in_no_layer_is_found() -> None:
    assert planted("elche.attic", "") == [
        "elche.attic: in no layer; place it in tests/harness/layers.py"
    ]


def test_cycle_is_found() -> None:
    sources = {
        "elche": "",
        "elche.a": "import elche.b",
        "elche.b": "def f():\n    from elche import c",
        "elche.c": "from .a import x",
    }
    assert layers.import_cycle(sources) == ["elche.a", "elche.b", "elche.c", "elche.a"]
    assert layers.import_cycle({**sources, "elche.c": ""}) is None


def test_the_package_imports_nothing_that_is_beside_it() -> None:
    beside = {"benchmarks", "examples", "tests"}
    for module, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            assert not beside & {name.split(".")[0] for name in names}, module
