"""Versions of what ranks must have alike, without importing it."""

from __future__ import annotations

import importlib.metadata

from elche import __version__


def installed_versions() -> dict[str, str]:
    """Of elche, and of torch as far as its numbers and formats depend on it."""
    torch = importlib.metadata.version("torch").split(".")
    return {"elche": __version__, "torch": ".".join(torch[:2])}
