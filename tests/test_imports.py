"""`import elche` costs nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import elche
from elche.errors import ConfigError

ROOT = Path(__file__).parent.parent
MOST_MODULES = 60
"""Beyond an empty program's; about 30 are loaded, torch alone would be 2000."""


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    loaded = set(run("import sys, elche; print(*sys.modules)").split())
    empty = set(run("import sys; print(*sys.modules)").split())
    assert "elche" in loaded
    assert len(loaded - empty) <= MOST_MODULES
    assert not {"torch", "numpy", "rich", "click", "msgpack"} & loaded


def test_public_names_resolve() -> None:
    assert list(elche.__all__) == sorted(set(elche.__all__))
    missing = [name for name in elche.__all__ if not hasattr(elche, name)]
    assert missing == []


def test_a_name_of_a_public_module_is_answered_with_its_place() -> None:
    for module, names in elche.MODULES.items():
        for name in names:
            place = rf"elche\.{name} is now elche\.{module}\.{name}"
            with pytest.raises(AttributeError, match=place):
                getattr(elche, name)
            assert hasattr(getattr(elche, module), name)


def test_public_names_are_few() -> None:
    assert len(dir(elche)) - len(elche.MODULES) <= 45


def test_a_name_that_was_removed_is_answered_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"elche\.Guard was removed: .*guard=False"):
        elche.Guard  # noqa: B018
    with pytest.raises(ConfigError, match=r"elche\.Verdict was removed"):
        from elche import Verdict  # noqa: F401
    with pytest.raises(ConfigError, match=r"LocalReplicas was .*elche\.Replica"):
        elche.LocalReplicas  # noqa: B018


def test_a_name_of_a_reference_library_is_answered_with_its_counterpart() -> None:
    page = (ROOT / "docs" / "from_references.md").read_text()
    for name, place in elche._REFERENCES.items():
        with pytest.raises(AttributeError, match=re.escape(f"elche.{name} is {place}")):
            getattr(elche, name)
        assert name in page
        path = re.match(r"elche\.([A-Za-z_.]*\w)", place)
        assert path is not None
        assert attrgetter(path[1])(elche)
    assert not hasattr(elche, "GpuWorker")
