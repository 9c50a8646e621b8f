"""Torch without its compiler, for a script that compiles nothing.

The first optimizer of a process imports `torch._dynamo`, which takes as long as torch
itself. A script that tests start many times, a process per rank, imports this module.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Uncompiled(ModuleType):
    """What optimizers and groups use of `torch._dynamo`, and no more."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any, *_: Any, **__: Any) -> Any:
        return fn

    @staticmethod
    def graph_break() -> None:
        pass


if "torch._dynamo" not in sys.modules:
    torch._dynamo = sys.modules["torch._dynamo"] = Uncompiled("torch._dynamo")
