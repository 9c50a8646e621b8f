"""`import elche` costs nothing, and every public name is there when it is asked for."""

from __future__ import annotations

import resource
import subprocess
import sys

import elche

LIMIT_S = 0.5


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def fastest_s(code: str) -> float:
    """Processor time, the best of three: what else runs only ever makes it slower."""
    times_s = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        times_s.append(spent_s)
    return min(times_s)


def test_import_loads_nothing_heavy() -> None:
    loaded = run("import sys, elche; print(*sys.modules)").split()
    assert "elche" in loaded
    assert not {"torch", "numpy", "rich", "click", "msgpack"} & set(loaded)


def test_import_is_fast() -> None:
    assert fastest_s("import elche") < fastest_s("pass") + LIMIT_S


def test_public_names_resolve() -> None:
    assert list(elche.__all__) == sorted(set(elche.__all__))
    missing = [name for name in elche.__all__ if not hasattr(elche, name)]
    assert missing == []


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert run("import elche; print(set(elche.__all__) <= set(dir(elche)))") == "True"


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(elche, "no_such_name")
