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
from dataclasses import dataclass
from pathlib import Path

from tests.device import build

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
TESTS = sorted(Path(__file__).parent.glob("test_*_waits.py"))
DEADLINE_S = 300.0
"""Deadline of one run of the tests; a missing wait may also hang."""
WAITS = {
    "wait_event": "None",
    "wait_stream": "None",
    "record_stream": "None",
    "synchronize": "None",
    "query": "True",
}
"""Calls that wait for a device or poll it, and what stands for each in a mutant."""
CONTEXT = "beside"
"""`with beside(stream):` orders work behind another stream's."""
WORKS = ("comm", "transport")
"""Room in whose `device*.py` a `wait` waits for the work of a device's own backend."""
WRAPPER_STATEMENTS = 8
"""Most statements of a function whose calls count as waits themselves."""
NO_CONTEXT = "__import__('contextlib').nullcontext()"
RUN = "import sys, elche, pytest; print(elche.__file__); sys.exit(pytest.main())"


@dataclass(frozen=True)
class Mutant:
    """One source file without one of its waits.

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
    sources = {path: path.read_text() for path in sorted(SOURCES.rglob("*.py"))}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    wrappers = find_wrappers(list(trees.values()))
    found = []
    for path, tree in trees.items():
        name = path.relative_to(SOURCES)
        has_works = path.parts[-3:-1] == WORKS and path.name.startswith("device")
        waits = WAITS | ({"wait": "None"} if has_works else {})
        for node, replacement in find_waits(tree, waits, wrappers):
            changed = replaced(sources[path], node, replacement)
            found.append(Mutant(name, node.lineno, ast.unparse(node), changed))
    return sorted(found, key=lambda each: (each.path, each.line))


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
        if name not in WAITS and all(calls) and set().union(*calls) & WAITS.keys()
    }


def find_waits(
    tree: ast.Module, waits: dict[str, str], wrappers: set[str]
) -> Iterator[tuple[ast.expr, str]]:
    """Waits of a file, each with the expression that replaces it."""
    called = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and _statement(node) in wrappers:
            yield node.value, "None"
        elif isinstance(node, ast.Call):
            called.add(node.func)
            if replacement := waits.get(_name(node.func)):
                yield node, replacement
        elif isinstance(node, ast.Attribute) and node.attr == "query":
            if node not in called:  # a poll that another function calls
                yield node, "(lambda: True)"
        elif isinstance(node, ast.With):
            for context in (item.context_expr for item in node.items):
                is_call = isinstance(context, ast.Call)
                name = _name(context.func if is_call else context)
                if name == CONTEXT or name.endswith("stream"):
                    yield context, NO_CONTEXT


def replaced(source: str, node: ast.expr, replacement: str) -> str:
    """The source with another expression in the place of a node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    # The columns of ast count bytes of UTF-8.
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    whole = b"".join(lines)
    return (whole[:start] + replacement.encode() + whole[end:]).decode()


def _statement(node: ast.stmt) -> str:
    """Name of the function that a statement calls, "" if it is another statement."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return _name(node.value.func) if is_call else ""


def _name(called: ast.expr) -> str:
    """Name of a function or value, without that of its owner."""
    return getattr(called, "attr", getattr(called, "id", ""))


def failing_test(folder: Path) -> str | None:
    """Runs the tests on the sources in a folder; the first red one, None without one.

    Raises:
        RuntimeError: the tests did not run on these sources.
    """
    tests = [str(each.relative_to(ROOT)) for each in TESTS]
    options = ["-p", "no:cacheprovider", "-x", "-q", "--tb=line", "-o", "addopts="]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", RUN, *options, *tests],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return f"deadline of {DEADLINE_S:g} s"
    if not done.stdout.startswith(str(folder)) or done.returncode > 1:
        raise RuntimeError(f"the tests did not run:\n{done.stdout}{done.stderr}")
    if done.returncode == 0:
        return None
    red = re.compile(r"^(?:FAILED|ERROR) \S*::(.+?)(?: - |$)", re.MULTILINE)
    found = red.search(done.stdout)
    return found.group(1) if found else f"ended with {done.returncode}"


def run_mutant(mutant: Mutant | None) -> str | None:
    """The test that turns red in a copy of the sources; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder, "src")
        shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            (copied / mutant.path).write_text(mutant.source)
        return failing_test(copied)


def main() -> int:
    """Runs all mutants; the number of those that live."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the waits alone")
    parser.add_argument("--only", default="", help="part of the places to take out")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    given = parser.parse_args()
    mutants = [
        (f"{each.path.relative_to('elche')}:{each.line}", each)
        for each in find_mutants()
        if given.only in f"{each.path}:{each.line}"
    ]
    if given.list:
        print(*(f"{place} {each.taken_out}" for place, each in mutants), sep="\n")
        return 0
    build.built()
    if red := run_mutant(None):
        sys.exit(f"{red} fails with all waits in place")
    began_s = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        reds = pool.map(run_mutant, [each for _, each in mutants])
        print("| place | taken out | turns red |\n|---|---|---|")
        alive = 0
        for (place, each), red in zip(mutants, reds, strict=True):
            alive += red is None
            found = f"`{red}`" if red else "ALIVE"
            print(f"| {place} | `{each.taken_out}` | {found} |", flush=True)
    took_s = time.monotonic() - began_s
    print(f"{len(mutants)} mutants, {alive} alive, {took_s:.0f} s")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
