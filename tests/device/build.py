"""Builds the test device's C++ once per version of torch, and again what has changed.

The product lies in `build/test_device/` of the checkout. Processes that need it at the
same time wait for the one that builds; a build that was killed is repeated.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

NAME = "elche_test_device"
SOURCES = Path(__file__).parent / "csrc"
BUILDS = Path(__file__).parents[2] / "build" / "test_device"
FLAGS = ["-O1", "-g0", "-Wall"]


def missing_tool() -> str | None:
    """Name of the first tool that a build needs and the machine lacks."""
    compiler = os.environ.get("CXX", "c++")
    return next((tool for tool in (compiler, "ninja") if not shutil.which(tool)), None)


def load_extension() -> Any:
    """The extension module, built if this checkout has none of these sources."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = BUILDS / f"torch{torch.__version__}-python{python}"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with its process, unlike torch's lock
        built = place / "sources"
        if not built.exists() or built.read_text() != _digest():
            built.unlink(missing_ok=True)
            module = _build(place)
            built.write_text(_digest())
            return module
    return _imported(place / f"{NAME}.so")


def _digest() -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for each in sorted(SOURCES.iterdir()):
        digest.update(each.name.encode() + each.read_bytes())
    return digest.hexdigest()


def _imported(product: Path) -> Any:
    spec = spec_from_file_location(NAME, product)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(place: Path) -> Any:
    from torch.utils import cpp_extension

    (place / "lock").unlink(missing_ok=True)  # of a build that was killed
    sources = [str(each) for each in sorted(SOURCES.glob("*.cpp"))]
    return cpp_extension.load(
        NAME, sources, extra_cflags=FLAGS, build_directory=str(place)
    )
