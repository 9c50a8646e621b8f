"""Messages between workers and coordinator, and the types of their fields.

Plain frozen values, comparable, versioned, made only of types that msgpack supports.
*Events* go to the core, *instructions* come from it. Both name a rank: an event its
sender, an instruction its addressee. Times are in seconds, sizes in samples.
"""

from __future__ import annotations

PROTOCOL_VERSION = 25

Runs = tuple[tuple[int, int], ...]
"""Batch sizes of an epoch, run-length encoded: (samples, number of batches)."""

Cut = tuple[int, ...]
"""Cut of global batches by windows: the fields of a `BatchCut`."""

Scalars = tuple[tuple[str, float, float], ...]
"""Logged scalars: (name, weighted sum, weight)."""

OwnPart = tuple[int, ...]
"""Part of a step that one rank runs: epoch, step, backward pass in it, its first sample
and one past the last; or ()."""

CheckRows = tuple[tuple[int, str, str, int, int, float, float, float], ...]
"""Checksums of a rank's parameters, each with the fields of a `ModelCheck`."""
