"""Size and shape of the code base: files, lines, statements, folders, functions, names.

python benchmarks/house.py                    this tree
python benchmarks/house.py --rev a74b263      as it was at a commit, beside this tree

Statements are counted in the syntax tree, docstrings left out, so that joined lines and
dropped docstrings win nothing.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import PurePosixPath

DATA_PLANE = ("pipeline", "schedule", "sim", "demo")
"""Folders of the package that the count of the rest leaves out."""


def sources_at(revision: str | None) -> dict[str, str]:
    """Python files under src and tests, by path; None is the working tree."""
    names = ["git", "ls-files", "src/*.py", "tests/*.py"]
    if revision is None:
        listed = subprocess.run(names, capture_output=True, text=True, check=True)
        paths = [PurePosixPath(line) for line in listed.stdout.split()]
        return {str(p): open(p, encoding="utf-8").read() for p in paths}
    command = ["git", "archive", revision, "src", "tests"]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[member.name] = file.read().decode()
    return found


def statements_of(tree: ast.AST) -> int:
    """Statements, docstrings left out."""
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            is_text = isinstance(node, ast.Expr) and isinstance(
                getattr(node.value, "value", None), str
            )
            count += not is_text
    return count


def comments_of(text: str) -> int:
    """Comment tokens."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def census(sources: dict[str, str]) -> dict[str, object]:
    """The figures of one state of the code."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    ours = [path for path in sources if path.startswith("src/")]
    tests = [path for path in sources if path.startswith("tests/")]
    rest = [p for p in ours if PurePosixPath(p).parts[2] not in DATA_PLANE]
    lengths = [
        (node.end_lineno or 0) - node.lineno + 1
        for path in ours
        for node in ast.walk(trees[path])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    folders = Counter(str(PurePosixPath(p).parent) for p in ours)
    del_init = Counter(
        str(PurePosixPath(p).parent) for p in ours if not p.endswith("__init__.py")
    )
    room, files = del_init.most_common(1)[0]
    clauses = sum(
        sources[p].lstrip("'\"r").split(" ", 1)[0]
        in {"What", "Whether", "Which", "How", "Who", "Where"}
        for p in ours
    )
    return {
        "source files": len(ours),
        "source lines": _lines(sources, ours),
        "source statements": sum(statements_of(trees[p]) for p in ours),
        f"lines without {', '.join(DATA_PLANE)}": _lines(sources, rest),
        "statements without them": sum(statements_of(trees[p]) for p in rest),
        "test files": len(tests),
        "test lines": _lines(sources, tests),
        "test statements": sum(statements_of(trees[p]) for p in tests),
        "folders": len(folders),
        "largest folder (without __init__)": f"{files} ({room})",
        "settings of RunConfig": _fields(trees["src/elche/config.py"], "RunConfig"),
        "public names": _public_names(trees["src/elche/__init__.py"]),
        "function lines, median": statistics.median(lengths),
        "function lines, 95 %": statistics.quantiles(lengths, n=20)[-1],
        "comments in the source": sum(comments_of(sources[p]) for p in ours),
        "module headlines that are clauses": clauses,
    }


def _lines(sources: dict[str, str], paths: list[str]) -> int:
    return sum(sources[path].count("\n") for path in paths)


def _fields(tree: ast.Module, name: str) -> int:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return 0


def _public_names(tree: ast.Module) -> int:
    for node in tree.body:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if "_HOMES" in [getattr(target, "id", "") for target in targets]:
            table = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            words = (
                each.split() if isinstance(each, str) else each
                for each in table.values()
            )
            return sum(map(len, words))
    return 0


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rev", help="a commit to show beside this tree")
    revision = parser.parse_args().rev
    now = census(sources_at(None))
    then = census(sources_at(revision)) if revision else {}
    for name, value in now.items():
        before = f"{then[name]!s:>32}" if then else ""
        print(f"{name:<46}{before}{value!s:>32}")


if __name__ == "__main__":
    main()
