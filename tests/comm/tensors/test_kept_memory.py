"""Memory that is freed is not taken anew from the system, page by page."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from elche.comm.tensors.kept_memory import keep_freed_memory

ROUNDS, PIECES, PIECE_BYTES = 20, 40, 1 << 20
SCRIPT = f"""
import ctypes, resource, sys
import torch
from elche.comm.tensors.kept_memory import keep_freed_memory
# As glibc begins; it moves these later, by what the heap looks like.
for option in (-1, -3):
    ctypes.CDLL(None).mallopt(option, 128 * 1024)
kept = keep_freed_memory() if sys.argv[1] == "kept" else False
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    pieces = [torch.ones({PIECE_BYTES}, dtype=torch.uint8) for _ in range({PIECES})]
    return sum(int(one[0]) for one in pieces)
for _ in range(10):
    use()
before = faults()
for _ in range({ROUNDS}):
    use()
print(kept, faults() - before)
"""
needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
    reason="glibc's allocator",
)


def faults(way: str, **environment: str) -> tuple[bool, int]:
    """Whether it is kept, and page faults of using and freeing memory repeatedly."""
    clean = {key: each for key, each in os.environ.items() if "MALLOC" not in key}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, way],
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@needs_glibc
def test_freed_memory_is_used_again() -> None:
    pages = ROUNDS * PIECES * PIECE_BYTES // os.sysconf("SC_PAGE_SIZE")
    kept, count = faults("kept")
    assert kept
    assert count < pages / 20
    kept, count = faults("plain")  # as after a step's activations, without it
    assert not kept
    assert count > pages / 2


@needs_glibc
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_left_alone(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert not keep_freed_memory()
