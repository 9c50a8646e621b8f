"""Torch without its compiler, in programs of tests that compile nothing.

Python imports this module as it starts where the folder is in PYTHONPATH. The first
optimizer of a process imports `torch._dynamo`, which takes as long as torch itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class Uncompiled(MetaPathFinder, Loader):
    """A `torch._dynamo` of what optimizers, groups and wrappers use, and no more."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "torch._dynamo" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: Any) -> None:
        module.disable = lambda fn, *_, **__: fn
        module.graph_break = lambda: None
        module.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)
        module.utils = SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization")


sys.meta_path.insert(0, Uncompiled())
