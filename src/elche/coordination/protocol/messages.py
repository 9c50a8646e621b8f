"""Messages between workers and coordinator, and the types of their fields.

Plain frozen values, comparable, versioned, made only of types that msgpack supports.
*Events* go to the core, *instructions* come from it. Both name a rank: an event its
sender, an instruction its addressee. Times are in seconds, sizes in samples.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of rank ``rank``, or to it."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMessage(Message):
    """A message of rank ``rank``, or to it, about epoch ``epoch``."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMessage(EpochMessage):
    """A message of rank ``rank``, or to it, about window ``window`` of an epoch."""

    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Message):
    """Work of a rank since its last report.

    ``busy_s`` is delivered time: waiting for data (``data_wait_s``), its transfer to
    the device (``transfer_s``), and compute.
    """

    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork(Work):
    """Work of a rank in steps of an epoch.

    ``sync_wait_s`` is the wait for other ranks, ``scalars`` the logged ones.
    ``is_finite`` is False if checked parameters are NaN. ``broken`` is the part since
    which this rank's own gradients are NaN or Inf.
    """

    epoch: int
    sync_wait_s: float = 0.0
    scalars: Scalars = ()
    is_finite: bool = True
    broken: OwnPart = ()
