"""Checks which module of elche may import what, from the sources alone.

Every import counts, also one inside a function or under TYPE_CHECKING: a type that
belongs to a shell makes a pure module depend on it all the same.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PACKAGE = "elche"


class Layer(Enum):
    """What a module may touch."""

    PURE = "pure: no torch, sockets, clock, threads or processes"
    SHELL = "shell: executes, and knows nothing of the surface"
    SURFACE = "surface: what people touch"


# The longest prefix decides. A module that no prefix covers is an error, so that each
# new room is placed on purpose.
LAYERS = {
    "elche.cadence": Layer.PURE,
    "elche.cli.doctor_findings": Layer.PURE,
    "elche.config": Layer.PURE,
    "elche.config_checks": Layer.PURE,
    "elche.config_parts": Layer.PURE,
    "elche.coordination": Layer.PURE,
    "elche.errors": Layer.PURE,
    "elche.monitor": Layer.PURE,
    "elche.schedule": Layer.PURE,
    "elche.sim": Layer.PURE,
    "elche.checkpoint": Layer.SHELL,
    "elche.comm": Layer.SHELL,
    "elche.devices": Layer.SHELL,
    "elche.monitor.live_run": Layer.SHELL,
    "elche.monitor.page.beside": Layer.SHELL,
    "elche.monitor.page.charts": Layer.SHELL,
    "elche.monitor.page.report_file": Layer.SHELL,
    "elche.monitor.page.server": Layer.SHELL,
    "elche.monitor.progress": Layer.SHELL,
    "elche.monitor.results": Layer.SHELL,
    "elche.pipeline": Layer.SHELL,
    "elche.runtime": Layer.SHELL,
    "elche.torch_internals": Layer.SHELL,
    "elche.__main__": Layer.SURFACE,
    "elche.cli": Layer.SURFACE,
    "elche.ddp": Layer.SURFACE,
    "elche.demo": Layer.SURFACE,
    "elche.launching": Layer.SURFACE,
    "elche.by_hand": Layer.SURFACE,
    "elche.integrations": Layer.SURFACE,
    "elche.ray": Layer.SURFACE,
    "elche.session": Layer.SURFACE,
    "elche.trainer": Layer.SURFACE,
}

MAY_IMPORT = {
    Layer.PURE: {Layer.PURE},
    Layer.SHELL: {Layer.PURE, Layer.SHELL},
    Layer.SURFACE: {Layer.PURE, Layer.SHELL, Layer.SURFACE},
}

IMPURE_STDLIB = frozenset(
    {
        *("_thread", "asyncio", "concurrent", "queue", "sched", "threading"),
        *("datetime", "time"),
        *("http", "select", "selectors", "socket", "socketserver", "ssl", "urllib"),
        *("fcntl", "mmap", "multiprocessing", "os", "signal", "subprocess"),
        *("secrets", "uuid"),
        *("ctypes", "importlib", "runpy"),
    }
)


@dataclass(frozen=True)
class Import:
    """One import statement's target.

    Attributes:
        line: where it stands.
        module: the module that it loads, absolute.
        name: what a ``from`` import takes from that module's namespace, None where the
            module itself is meant.
    """

    line: int
    module: str
    name: str | None = None


def read_sources(src: Path) -> dict[str, str]:
    """Returns the source of every module of elche by its dotted name."""
    sources = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources[name] = path.read_text(encoding="utf-8")
    return sources


def layer_of(module: str) -> Layer | None:
    """Returns the layer of a module, None if no rule places it."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        layer = LAYERS.get(".".join(parts[:end]))
        if layer is not None:
            return layer
    return None


def pure_modules(sources: Mapping[str, str]) -> list[str]:
    """Returns the names of the modules that must import without torch."""
    return [module for module in sources if layer_of(module) is Layer.PURE]


def violations(sources: Mapping[str, str]) -> list[str]:
    """Checks every module against the layers.

    Args:
        sources: source text by module name; packages stand under their own name.

    Returns:
        One line per violation, empty when all is well.
    """
    found = []
    for module, source in sources.items():
        if module == PACKAGE:
            continue  # names the surface for type checkers, loads it lazily
        layer = layer_of(module)
        if layer is None:
            found.append(f"{module}: in no layer; place it in tests/harness/layers.py")
            continue
        for each in imports_of(module, source, sources):
            if complaint := _complaint(layer, each, sources):
                found.append(f"{module}:{each.line}: {complaint}")
    return found


def import_cycle(sources: Mapping[str, str]) -> list[str] | None:
    """Returns modules that import each other in a circle, None if none do.

    Args:
        sources: source text by module name.
    """
    graph = {
        module: sorted(
            {i.module for i in imports_of(module, source, sources)} & sources.keys()
        )
        for module, source in sources.items()
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        for target in graph[module]:
            if cycle := visit(target):
                return cycle
        path.pop()
        done.add(module)
        return None

    return next((cycle for module in graph if (cycle := visit(module))), None)


def imports_of(
    module: str, source: str, sources: Mapping[str, str]
) -> Iterator[Import]:
    """Yields everything that a module imports, wherever in it that stands.

    Args:
        module: its dotted name, to resolve relative imports.
        source: its text.
        sources: all modules, to tell a submodule from a name.
    """
    is_package = _is_package(module, sources)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                parts = module.split(".")
                base = ".".join([*parts[: len(parts) - up], *filter(None, [base])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in sources:
                    yield Import(node.lineno, submodule)
                else:
                    yield Import(node.lineno, base, alias.name)
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield Import(node.lineno, "importlib")


def _complaint(layer: Layer, each: Import, sources: Mapping[str, str]) -> str | None:
    root = each.module.partition(".")[0]
    if root == PACKAGE:
        if each.module == PACKAGE:
            if each.name == "__version__":
                return None  # stands in that very file
            return "imports through elche/__init__; name the module itself"
        if each.name is not None and _is_package(each.module, sources):
            return f"imports through {each.module}/__init__; name the module itself"
        target = layer_of(each.module)
        if target is not None and target not in MAY_IMPORT[layer]:
            return f"{layer.name.lower()} imports {target.name.lower()} {each.module}"
    elif layer is Layer.PURE and (
        root in IMPURE_STDLIB or root not in sys.stdlib_module_names
    ):
        return f"pure imports {each.module}"
    return None


def _is_package(module: str, sources: Mapping[str, str]) -> bool:
    return any(other.startswith(module + ".") for other in sources)
