"""Everything that a worker and the coordinator say to each other.

Plain frozen values, comparable, versioned, and made only of what msgpack carries.
*Events* go to the core, *instructions* come from it; both name a rank: the sender of
an event, the addressee of an instruction. Times are seconds, sizes are samples.
"""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 7

Runs = tuple[tuple[int, int], ...]
"""Batch sizes of an epoch, run-length encoded: (samples, number of batches)."""

Scalars = tuple[tuple[str, float, float], ...]
"""What users logged: (name, weighted sum, weight)."""

OwnPart = tuple[int, ...]
"""A rank's part of a step: the step, the backward pass in it, its first sample and one
past the last; or ()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank presents itself and what it holds; compared between ranks.

    ``settings`` are (name, value) pairs that must agree, ``tensors`` are (name,
    shape, dtype) of parameters and buffers. ``horizon_batches`` is how many batches
    the rank's loader draws ahead of the one in hand.
    """

    rank: int
    version: int
    world_size: int
    settings: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, str, str], ...]
    device: str
    horizon_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened:
    """A rank asks for the epoch; rank 0 says its batch sizes, and the plan to replay.

    ``probe_s`` is what one reduction of the model takes (0.0 where nobody asks).
    ``layout`` names what is trained now and whether that has changed since the last
    epoch, ``checksum`` the values of the parameters ("" where devices of several kinds
    round differently): both must agree. ``rates`` names what the optimizer steps with
    (learning rate and so on, but not a rate that follows the run's progress).
    """

    rank: int
    epoch: int
    sizes: Runs | None = None
    layout: str = ""
    checksum: str = ""
    plan: str = ""
    probe_s: float = 0.0
    rates: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """``sync``: a rank has run the steps ``start <= step < stop`` of its grant.

    ``busy_s`` is delivered time without the wait for other ranks (``sync_wait_s``); of
    it, ``data_wait_s`` waiting for data and ``transfer_s`` moving them to the device.
    ``parameter_norm`` is said once per epoch, by the first rank, and 0.0 otherwise.
    ``warm`` is False when the steps held a first batch, which is not timed.
    ``backward_passes`` of the run so far were reduced: as many on every rank.
    ``max_samples`` is what the rank's device turned out to hold at once (0: no limit
    was met). ``is_finite`` says whether the parameters are numbers, as far as was
    looked; ``broken`` is the part since which this rank's own gradients are none.
    """

    rank: int
    epoch: int
    start: int
    stop: int
    samples: int
    busy_s: float
    data_wait_s: float
    sync_wait_s: float
    warm: bool
    backward_passes: int
    transfer_s: float = 0.0
    parameter_norm: float = 0.0
    max_samples: int = 0
    scalars: Scalars = ()
    is_finite: bool = True
    broken: OwnPart = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesDone:
    """Windows: a rank has trained on the batches ``start <= batch < stop`` of a lease.

    ``busy_s`` is delivered time; of it, ``data_wait_s`` waiting for data and
    ``transfer_s`` moving them to the device. Of the batches ``timed`` took ``timed_s``:
    a first one of its kind (compilation) is not timed.
    """

    rank: int
    epoch: int
    window: int
    start: int
    stop: int
    samples: int
    busy_s: float
    data_wait_s: float
    timed: int
    timed_s: float
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed:
    """A rank has ended its part of a window at a batch boundary.

    ``state`` names the layout of its optimizer state ("" when it has none),
    ``changed_buffers`` are indices of float buffers written since the last reduction,
    ``is_finite`` is False when its drift cannot be used. ``rejected`` are batches
    (start, stop) that are not in it, as the rank has taken them back, and ``culprits``
    those that were found to be at fault. ``scalars`` are (name, weighted sum, weight)
    of what the user logged. ``weight`` is what the user says that its batches weigh in
    the mean over ranks, None where their samples do.
    """

    rank: int
    epoch: int
    window: int
    state: str
    changed_buffers: tuple[int, ...]
    is_finite: bool = True
    culprits: tuple[int, ...] = ()
    rejected: Runs = ()
    scalars: Scalars = ()
    weight: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReduced:
    """The window's mean is in this rank's model.

    ``sync_s`` is what it cost the training thread, ``wait_s`` the wait for other ranks
    before it, ``divergence`` the rank's distance from the consensus it contributed to
    over the consensus' norm, ``adopted_at`` the batches it had run in the next window.
    """

    rank: int
    epoch: int
    window: int
    sync_s: float
    wait_s: float
    divergence: float
    adopted_at: int
    parameter_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A rank is in the group of this generation; it holds the result of ``reduced``.

    Which is a window, or under ``sync`` a step of the epoch (-1 for none).
    """

    rank: int
    generation: int
    epoch: int
    reduced: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLeft:
    """A rank's loop left the epoch early, with ``step`` steps of it run.

    Under ``sync`` also what it did since its last report; see `StepsDone`.
    """

    rank: int
    epoch: int
    step: int
    samples: int = 0
    busy_s: float = 0.0
    data_wait_s: float = 0.0
    sync_wait_s: float = 0.0
    transfer_s: float = 0.0
    scalars: Scalars = ()
    is_finite: bool = True
    broken: OwnPart = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached:
    """A rank waits at the barrier ``name``."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank ends with an error."""

    rank: int
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A rank has nothing more to do and goes."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """The shell saw a rank's connection end."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; deadlines are looked at."""

    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All ranks are there and agree; the first generation may form its group."""

    rank: int
    generation: int
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """All ranks have opened the epoch; rank 0 now sends its positions.

    ``policy`` is the one that the epoch begins with, ``window`` the first one of it.
    Where ``state_from`` names a rank, it has trained alone: all take its optimizer's
    state first.
    """

    rank: int
    epoch: int
    sizes: Runs
    policy: str
    window: int
    state_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChosen:
    """``auto`` has chosen, and says why; told to the first rank."""

    rank: int
    policy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPolicy:
    """From ``step`` of this epoch on there are windows under ``policy``."""

    rank: int
    epoch: int
    step: int
    policy: str
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSteps:
    """``sync``: the steps ``start <= step < stop``, split by ``shares`` per rank."""

    rank: int
    epoch: int
    start: int
    stop: int
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantBatches:
    """Windows: a lease of the batches ``start <= batch < stop``.

    One of ``suspects`` may have spoilt a window: who trains on them finds out which.
    """

    rank: int
    epoch: int
    start: int
    stop: int
    suspects: Runs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """Train until ``wall_s`` or ``max_batches`` is reached.

    ``hold_after`` batches the rank waits for a `Permit`. ``adopt_at`` fixes after how
    many batches of this window the last reduction is adopted (a replay). Overlapped, a
    rank trains on past the window's end until it has adopted the last result; it waits
    for that when ``patience_s`` have passed since the window began. What a scheduler
    follows: ``committed_samples`` were trained on before this window,
    ``planned_samples`` are planned in it by all ranks and ``planned_batches`` by this
    one.
    """

    rank: int
    epoch: int
    window: int
    wall_s: float | None
    max_batches: int | None
    hold_after: int | None
    adopt_at: int | None
    patience_s: float | None
    committed_samples: int
    planned_samples: int
    planned_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """The slowest rank has caught up: train up to ``batches`` in this window."""

    rank: int
    epoch: int
    window: int
    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWindow:
    """Close at the next batch boundary, whatever the deadline.

    With ``drain`` the epoch ends there and leases not begun are given back.
    """

    rank: int
    epoch: int
    window: int
    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """All ranks have closed the window; reduce now.

    ``weight`` is this rank's part of the mean; over ranks they sum to one, and a rank
    of weight zero sends zeros. ``active_ranks`` weigh something. ``attempt`` counts the
    generations that have tried. ``fragment`` is the part of the parameters whose turn
    it is, None for all.
    """

    rank: int
    epoch: int
    window: int
    attempt: int
    weight: float
    active_ranks: int
    include_state: bool
    buffers: tuple[int, ...]
    outer: str
    outer_lr: float
    outer_momentum: float
    fragment: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """The membership has changed: form the group of ``generation``, and say so.

    ``left`` are gone, ``joined`` are new since the generation before.
    """

    rank: int
    generation: int
    left: tuple[int, ...]
    joined: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take the common model after ``window`` from rank ``source``, with all ranks.

    Under ``sync`` it is that after a step, and the optimizer's state belongs to it. The
    answer is a `WindowReduced`.
    """

    rank: int
    epoch: int
    window: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch:
    """Every contribution of the epoch is in the model that all ranks hold.

    ``left_out`` are batches (start, stop) whose contribution was no number, and which
    are not tried again; ``plan`` records the epoch for a replay (told to the first rank
    only).
    """

    rank: int
    epoch: int
    samples: tuple[int, ...]
    busy_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    sync_s: float
    windows: int
    anchor: int
    shares: tuple[float, ...]
    left_out: Runs = ()
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReported:
    """What a window (or, with ``window`` -1, the epoch) brought; told to one rank.

    ``values`` are the fields of `WindowMetrics` or `EpochMetrics` as JSON.
    """

    rank: int
    epoch: int
    window: int
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierPassed:
    """All ranks have reached the barrier ``name``."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The run ends: ``reason``, and the failed rank's traceback if one failed.

    ``batches`` (start, stop) are those that it ends for, if it is about data; ``part``
    (start, stop) the samples of the batch, where only some of it are meant.
    """

    rank: int
    reason: str
    failed_rank: int | None = None
    traceback: str = ""
    kind: str = "remote"
    batches: Runs = ()
    part: tuple[int, ...] = ()


Event = (
    Join
    | EpochOpened
    | StepsDone
    | BatchesDone
    | WindowClosed
    | WindowReduced
    | Regrouped
    | EpochLeft
    | BarrierReached
    | Failed
    | Left
    | Disconnected
    | Tick
)
Instruction = (
    Welcome
    | BeginEpoch
    | PolicyChosen
    | SwitchPolicy
    | GrantSteps
    | GrantBatches
    | OpenWindow
    | Permit
    | CloseWindow
    | Reduce
    | Regroup
    | Adopt
    | EndEpoch
    | MetricsReported
    | BarrierPassed
    | Abort
)
