"""Keeps the memory of freed CPU tensors in the process for reuse.

glibc returns large freed blocks to the system and maps them again, page by page and
zeroed, a moment later. So a step that frees its activations pays for page faults, whose
number depends on the layout of the heap. Measured on
two cores, a pipeline of LSTMs took 98 ms a step with 2,600 to 11,500 faults, and 70 ms
with none (docs/benchmarks.md, "Pipelines").
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_MOST_BYTES = 32 * 2**20
"""glibc's limit: larger blocks are always returned to the system."""
_ASKED = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Makes glibc keep freed blocks of up to 32 MB.

    The process then holds its peak memory until it ends. Does nothing without glibc, or
    if the environment sets `MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_` or
    `GLIBC_TUNABLES`.

    Returns:
        True if this call has changed glibc's settings.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _ASKED):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    kept = set_option(_M_TRIM_THRESHOLD, _NEVER)
    return bool(kept and set_option(_M_MMAP_THRESHOLD, _MOST_BYTES))
