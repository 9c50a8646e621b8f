"""Events: messages from workers and the shell to the coordinator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elche.coordination.protocol.messages import (
    CheckRows,
    EpochMessage,
    Message,
    Runs,
    Scalars,
    StepWork,
    WindowMessage,
    Work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Message):
    """A rank announces itself and its state, which is compared between ranks.

    ``settings`` are (name, value) pairs that must agree; ``tensors`` are (name,
    shape, dtype) of parameters and buffers. ``horizon_batches`` is the number of
    batches the loader draws ahead of the current one. ``memory_bytes`` is the device's
    memory.
    """

    version: int
    world_size: int
    settings: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, str, str], ...]
    device: str
    horizon_batches: int
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened(EpochMessage):
    """A rank requests the epoch; rank 0 sends its batch sizes.

    ``probe_s`` is the time of one reduction of the model (0.0 if not measured).
    ``layout`` names the trained parameters and whether they changed since the last
    epoch; ``checks`` are checksums of their values (none if the layout has changed).
    Both must agree. ``rates`` are the optimizer's settings (learning rate and so on,
    but not a rate that follows the run's progress). ``steps`` is the loop's most steps,
    -1 for a whole epoch. ``continues``: it is the rest of the latest epoch, which was
    cut, or a resumed run's first epoch. ``backend`` is the devices' own backend in use,
    "" if sums pass through the host.
    """

    sizes: Runs | None = None
    layout: str = ""
    checks: CheckRows = ()
    probe_s: float = 0.0
    rates: str = ""
    steps: int = -1
    continues: bool = False
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone(StepWork):
    """``sync``: a rank has run the steps ``start <= step < stop`` of its grant.

    ``reduce_s`` is the part of ``busy_s`` for reductions in backward; a rank alone has
    none. ``parameter_norm`` is sent once per epoch by the first rank, else 0.0.
    ``warm`` is False if the steps held a first batch, which is not timed.
    ``backward_passes`` is the number of the run's reduced passes. They must be of the
    same steps in the same order on every rank; ``pass_steps`` is their checksum.
    ``max_samples`` is the most samples that fit on the device (0: no limit found).
    ``unknown`` names state that depends on this rank's batches and cannot be copied to
    another rank ("" if none was seen): no rank may then be excluded. ``checks`` are of
    its parameters after some of the steps before ``start``; see `ModelCheck`.
    """

    start: int
    stop: int
    warm: bool
    backward_passes: int
    pass_steps: int = 0
    reduce_s: float = 0.0
    parameter_norm: float = 0.0
    max_samples: int = 0
    unknown: str = ""
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesDone(Work):
    """Windows: a rank has trained the batches ``start <= batch < stop`` of a lease.

    ``timed`` of the batches took ``timed_s``: a first batch of its kind (compilation)
    is not timed.
    """

    epoch: int
    window: int
    start: int
    stop: int
    timed: int
    timed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowClosed(WindowMessage):
    """A rank has closed its part of a window at a batch boundary.

    ``changed_buffers`` are indices of float buffers written since the last reduction.
    ``is_finite`` is False if the update cannot be used. ``has_moved`` is False if the
    update is known to be zero, since all gradients wait for a step (checked only after
    a non-finite update). ``scalars`` are (name, weighted sum, weight) of logged
    scalars. ``weight`` is the user's weight for this rank's batches, None for their
    samples; a rank of weight 0 is excluded from the mean. ``periods`` are (calls,
    period) of registered schedulers. ``copies`` are the samples of batches that updated
    each copy of the model that the rank has registered (see `CopySamples`).
    """

    changed_buffers: tuple[int, ...]
    is_finite: bool = True
    has_moved: bool = True
    scalars: Scalars = ()
    weight: float | None = None
    periods: Runs = ()
    copies: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUpdated(WindowMessage):
    """The result of ``window``, the mean of all updates, is in this rank's model.

    Under ``sync``, after a copy of the model or a death: the result of all steps up to
    that one. ``sync_s`` is its cost on the training thread, ``wait_s`` the wait for
    other ranks before it. ``divergence`` is the rank's distance from the consensus,
    over the consensus' norm. ``adopted_at`` batches of the next window were run before
    it. ``checks`` are of the common model that the rank continues from.
    """

    sync_s: float = 0.0
    wait_s: float = 0.0
    divergence: float = 0.0
    adopted_at: int = 0
    parameter_norm: float = 0.0
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReady(Message):
    """A newcomer has built all it needs, and its loop begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped(EpochMessage):
    """A rank is in the group of this generation; it holds the result of ``reduced``.

    ``reduced`` is a window, or under ``sync`` a step of the epoch (-1 for none). Under
    ``sync``, ``lost`` are ranks that died in this part of the epoch, each with the
    first step that lacks its share. All ranks run the steps up to ``reduced``, and
    report that by `ModelUpdated`.
    """

    generation: int
    reduced: int = -1
    lost: Runs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLeft(StepWork):
    """A rank's loop left the epoch early, after running ``step`` steps of it.

    Under ``sync`` it includes the work since the last report; see `StepsDone`. The rank
    has taken part in ``passes`` backward passes of the run. It joins later passes of
    the others with zeros, unless ``apart`` names a reason why it cannot. ``checks`` are
    of its parameters after ``stepped`` optimizer steps of the run: before the last
    step's update, or after it.
    """

    step: int
    passes: int = 0
    apart: str = ""
    checks: CheckRows = ()
    stepped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCut(EpochMessage):
    """A rank requests a pause of the epoch: all is committed, and the rest is kept.

    ``is_end``: no rank continues with the rest.
    """

    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBegun(EpochMessage):
    """``sync``: position of a rank that waits in a pass, or was sent `RankLeft`.

    The rank has received ``gone`` `RankLeft`s. It has begun ``step`` steps of the
    epoch, and ``passes`` backward passes of the run.
    """

    step: int
    passes: int
    gone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached(Message):
    """A rank waits at the barrier ``name``; ``checks`` must be equal on all ranks.

    The first rank's ``text`` is sent to all; None: a rank that is not the first yet.
    """

    name: str
    text: str | None = ""
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultGroupFormed(Message):
    """torch.distributed's default group exists on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasFormed(Message):
    """Ranks of a pipeline's replicas, each of which can continue without the others."""

    replicas: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Message):
    """The writer of the manifest reports a complete checkpoint, for the event file."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """A rank ends with an error, or by ``sys.exit(exit_code)`` inside an epoch."""

    error: str
    traceback: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Message):
    """A rank has finished and leaves cleanly.

    If its loop left an epoch of windows before: ``batches`` is this rank's count in the
    run, ``samples`` and ``steps`` (global batches) the whole run's; 0 otherwise.
    """

    batches: int = 0
    samples: int = 0
    steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost(Message):
    """A rank's connection has ended, or it has sent nothing for ``silent_s``."""

    silent_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed; deadlines are checked."""

    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The launcher received the signal ``by``, which ends the run."""

    by: str
    rank: int = -1


Event = (
    Join
    | JoinReady
    | EpochOpened
    | StepsDone
    | BatchesDone
    | WindowClosed
    | ModelUpdated
    | Regrouped
    | EpochLeft
    | EpochCut
    | PassBegun
    | BarrierReached
    | DefaultGroupFormed
    | ReplicasFormed
    | CheckpointSaved
    | Failed
    | Left
    | RankLost
    | Tick
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class StreamBegun:
    """A rank has connected, with a message stream of that name."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class StoreSet:
    """A rank has published a rendezvous value."""

    key: str
    value: bytes


Input: TypeAlias = Event | StreamBegun | StoreSet
