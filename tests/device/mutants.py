"""Takes out every wait for a device in turn: a test of the test device must turn red.

`python -m tests.device.mutants` finds the waits in copies of `src` by their names, runs
the tests of `test_*_waits.py` on each copy until the first failure, prints a table and
ends with 1 if all tests pass without a wait. `--list` only prints the waits.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.device import build

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
TESTS = sorted(Path(__file__).parent.glob("test_*_waits.py"))
DEADLINE_S = 300.0
"""Deadline of one run of the tests; a missing wait may also hang."""
WAITS = {"wait_event", "wait_stream", "record_stream", "synchronize"}
"""Calls that wait for a device; a mutant does nothing instead."""
POLL = "query"
"""Attribute that polls a device; it is True in a mutant."""
CONTEXT = "beside"
"""`with beside(stream):` orders work behind another stream's; not in a mutant."""
WORKS = ("comm", "transport", "device")
"""Room in whose `device*.py` a `wait` waits for the work of a device's own backend."""
WRAPPER_STATEMENTS = 8
"""Most statements of a function whose calls count as waits themselves."""
NOTHING, POLLED, NO_CONTEXT = (
    ast.parse(each, mode="eval").body
    for each in (
        "lambda *_: None",
        "__import__('types').SimpleNamespace(query=lambda: True)",
        "__import__('contextlib').nullcontext()",
    )
)
OPTIONS = ["-p", "no:cacheprovider", "-x", "-q", "--tb=line", "-o", "addopts="]
RUN = "import sys, elche, pytest; print(elche.__file__); sys.exit(pytest.main())"


class Mutant(NamedTuple):
    """A file of the package without one of its waits.

    Attributes:
        path: file, relative to `src`.
        line: number of the line that changes.
        taken_out: the expression that is replaced.
        source: the whole file with the replacement.
    """

    path: Path
    line: int
    taken_out: str
    source: str


def find_mutants() -> list[Mutant]:
    """Every mutant of the package."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
    wrappers = find_wrappers(list(trees.values()))
    found = []
    for path, tree in trees.items():
        name = path.relative_to(SOURCES)
        has_works = "/".join(name.parts[1:]).startswith("/".join(WORKS))
        waits = WAITS | ({"wait"} if has_works else set())
        for shown, node, field, replacement in list(find_waits(tree, waits, wrappers)):
            text, kept = ast.unparse(shown), getattr(node, field)
            setattr(node, field, replacement)
            found.append(Mutant(name, shown.lineno, text, ast.unparse(tree)))
            setattr(node, field, kept)
    return sorted(found)


def find_wrappers(trees: list[ast.Module]) -> set[str]:
    """Names of short functions that wait, whichever function of that name is called."""
    found: dict[str, list[set[str]]] = {}
    for node in (each for tree in trees for each in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            body = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
            calls = {_statement(each) for each in body} & {*WAITS, node.name}
            is_short = len(body) <= WRAPPER_STATEMENTS
            found.setdefault(node.name, []).append(calls if is_short else set())
    return {
        name
        for name, calls in found.items()
        if name not in WAITS and all(calls) and set().union(*calls) & WAITS
    }


def find_waits(
    tree: ast.Module, waits: set[str], wrappers: set[str]
) -> Iterator[tuple[ast.expr, ast.AST, str, ast.expr]]:
    """Waits of a file, each with the node and its field that a mutant replaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _statement(node) in wrappers:
            yield node.value, node.value, "func", NOTHING
        elif isinstance(node, ast.Call) and _name(node.func) in waits:
            yield node, node, "func", NOTHING
        elif isinstance(node, ast.Attribute) and node.attr == POLL:
            yield node, node, "value", POLLED
        elif isinstance(node, ast.withitem):
            context = node.context_expr
            name = _name(context.func if isinstance(context, ast.Call) else context)
            if name == CONTEXT or name.endswith("stream"):
                yield context, node, "context_expr", NO_CONTEXT


def _statement(node: ast.stmt) -> str:
    """Name of the function that a statement calls, "" if it is another statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _name(node.value.func)
    return ""


def _name(called: ast.expr) -> str:
    """Name of a function or value, without that of its owner."""
    return getattr(called, "attr", getattr(called, "id", ""))


def failing_test(mutant: Mutant | None) -> str:
    """The first test that turns red in a copy of the sources; "" if all pass.

    Raises:
        RuntimeError: the tests did not run on the copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "src")
        shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            (copied / mutant.path).write_text(mutant.source)
        try:
            done = subprocess.run(
                [sys.executable, "-c", RUN, *OPTIONS, *map(str, TESTS)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{copied}{os.pathsep}{ROOT}"},
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            return f"deadline of {DEADLINE_S:g} s"
    if not done.stdout.startswith(folder) or done.returncode > 1:
        raise RuntimeError(f"the tests did not run:\n{done.stdout}{done.stderr}")
    red = re.search(r"^(?:FAILED|ERROR) \S*::(.+?)(?: - |$)", done.stdout, re.M)
    if done.returncode == 1 and red is not None:
        return red.group(1)
    return f"ended with {done.returncode}" if done.returncode else ""


def main() -> int:
    """Runs all mutants; the number of those that live."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the waits alone")
    parser.add_argument("--only", default="", help="part of the places to take out")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    given = parser.parse_args()
    mutants = [each for each in find_mutants() if given.only in str(each.path)]
    if given.list:
        print(*(_row(each) for each in mutants), sep="\n")
        return 0
    build.built()
    if red := failing_test(None):
        sys.exit(f"{red} fails with all waits in place")
    began_s, alive = time.monotonic(), 0
    print("| place | taken out | turns red |\n|---|---|---|")
    with ThreadPoolExecutor(given.jobs) as pool:
        reds = pool.map(failing_test, mutants)
        for each, red in zip(mutants, reds, strict=True):
            alive += not red
            print(f"{_row(each)} {f'`{red}`' if red else 'ALIVE'} |", flush=True)
    took_s = time.monotonic() - began_s
    print(f"{len(mutants)} mutants, {alive} alive, {took_s:.0f} s")
    return int(alive > 0)


def _row(mutant: Mutant) -> str:
    place = Path(*mutant.path.parts[1:])
    return f"| {place}:{mutant.line} | `{mutant.taken_out}` |"


if __name__ == "__main__":
    sys.exit(main())
