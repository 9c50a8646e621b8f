"""Messages between workers and coordinator, and the types of their fields.

Plain frozen values, comparable, versioned, and made only of what msgpack carries.
*Events* go to the core, *instructions* come from it; both name a rank: the sender of
an event, the addressee of an instruction. Times are seconds, sizes are samples.
"""

from __future__ import annotations

PROTOCOL_VERSION = 22

Runs = tuple[tuple[int, int], ...]
"""Batch sizes of an epoch, run-length encoded: (samples, number of batches)."""

Cut = tuple[int, ...]
"""Cut of global batches by windows: the fields of a `BatchCut`."""

Scalars = tuple[tuple[str, float, float], ...]
"""Logged scalars: (name, weighted sum, weight)."""

OwnPart = tuple[int, ...]
"""A rank's part of a step: epoch, step, backward pass in it, its first sample and one
past the last; or ()."""

CheckRows = tuple[tuple[int, str, str, int, int, float, float, float], ...]
"""Checksums of a rank's parameters: the fields of a `ModelCheck`, each."""
