"""Versions of what ranks must have alike, without importing torch."""

from __future__ import annotations

import sys
from importlib.metadata import version


def installed_versions() -> dict[str, str]:
    """Versions of elche, and of torch as far as numbers and formats depend on it."""
    package = sys.modules["elche"]  # its statement would be a circle: it names us
    torch = ".".join(version("torch").split(".")[:2])
    return {"elche": str(package.__version__), "torch": torch}
