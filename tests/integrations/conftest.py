"""Tests with other frameworks: only where all of these are installed, and offline.

`make test-integrations` installs them; with one missing pytest finds no test here,
which is an error for that target.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = ("accelerate", "lightning", "peft", "torchdata", "transformers")
IGNORED_WARNINGS: tuple[str, ...] = ()
"""What the frameworks warn of in themselves."""

os.environ["HF_HUB_OFFLINE"] = "1"
MISSING = [name for name in FRAMEWORKS if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f"tests/integrations left out: {', '.join(MISSING)} not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for warning in IGNORED_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))
