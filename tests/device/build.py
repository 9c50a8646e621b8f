"""Builds the test device's C++ for the installed torch, and again what has changed.

Objects and the module are named by the hash of what they are made from and lie in
`build/test_device/` of the checkout. Processes that need the module at the same time
wait for the one that builds it. `python -m tests.device.build` only builds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

NAME = "elche_test_device"
SOURCES = Path(__file__).parent / "csrc"
BUILDS = Path(__file__).parents[2] / "build" / "test_device"
COMPILER = os.environ.get("CXX", "c++")
INCLUDES = [*include_paths(), sysconfig.get_paths()["include"]]
LIBRARIES = [str(Path(each).resolve()) for each in library_paths()]
COMPILE = [
    *[COMPILER, "-c", "-std=c++20", "-O1", "-Wall", "-fPIC"],
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    f"-DTORCH_EXTENSION_NAME={NAME}",
    *(part for each in INCLUDES for part in ("-isystem", str(Path(each).resolve()))),
]
LINK = [
    *[COMPILER, "-shared", "-Wl,--no-as-needed"],
    *(part for each in LIBRARIES for part in (f"-L{each}", f"-Wl,-rpath,{each}")),
    *["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"],
]


def missing_compiler() -> str | None:
    """Name of the compiler where this machine lacks it."""
    return None if shutil.which(COMPILER) else COMPILER


def load_extension() -> Any:
    """The extension module, built if there is none of these sources."""
    spec = spec_from_file_location(NAME, built())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built() -> Path:
    """Path of the extension module; compiles what is missing of it."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    with (BUILDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        headers = [each.read_bytes() for each in sorted(SOURCES.glob("*.h"))]
        objects = {
            BUILDS / f"{each.stem}-{_digest(each.read_bytes(), *headers)}.o": each
            for each in sorted(SOURCES.glob("*.cpp"))
        }
        parts = [*LINK, *(each.name for each in objects)]
        product = BUILDS / f"{NAME}-{_digest(*parts)}.so"
        if not product.exists():
            with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
                missing = [each for each in objects.items() if not each[0].exists()]
                list(pool.map(lambda each: _run(COMPILE, each[0], each[1]), missing))
            _run(LINK, product, *objects)
            for old in BUILDS.iterdir():
                if old not in objects and old not in (product, BUILDS / "lock"):
                    old.unlink()
    return product


def _digest(*parts: bytes | str) -> str:
    """Hash of the parts, of torch's version and of how sources are compiled."""
    digest = hashlib.sha256(" ".join([torch.__version__, *COMPILE]).encode())
    for each in parts:
        digest.update(each.encode() if isinstance(each, str) else each)
    return digest.hexdigest()[:16]


def _run(command: list[str], product: Path, *sources: Path) -> None:
    """Runs the command; its product exists only when it is complete."""
    partial = product.with_suffix(f".partial-{os.getpid()}")  # a killed build's may run
    done = subprocess.run(
        [*command, "-o", str(partial), *map(str, sources)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{product.name} could not be built:\n{done.stderr}")
    partial.replace(product)


if __name__ == "__main__":
    from tests import device

    missing = missing_compiler()
    if device.KIND != device.NAME:
        print(f"tests run on {device.register()}")  # or there is none: an error
    else:
        print(f"{missing} is missing, nothing is built" if missing else built())
