"""Events: messages from workers and the shell to the coordinator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elche.coordination.protocol.messages import CheckRows, OwnPart, Runs, Scalars


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank announces itself and its state, which is compared between ranks.

    ``settings`` are (name, value) pairs that must agree; ``tensors`` are (name,
    shape, dtype) of parameters and buffers. ``horizon_batches`` is the number of
    batches the loader draws ahead of the current one. ``memory_bytes`` is the device's
    memory.
    """

    rank: int
    version: int
    world_size: int
    settings: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, str, str], ...]
    device: str
    horizon_batches: int
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOpened:
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

    rank: int
    epoch: int
    sizes: Runs | None = None
    layout: str = ""
    checks: CheckRows = ()
    probe_s: float = 0.0
    rates: str = ""
    steps: int = -1
    continues: bool = False
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """``sync``: a rank has run the steps ``start <= step < stop`` of its grant.

    ``busy_s`` is delivered time without the wait for other ranks (``sync_wait_s``). Of
    ``busy_s``, ``data_wait_s`` is the wait for data and ``transfer_s`` its transfer to
    the device; ``reduce_s`` is reductions in backward, which a rank alone saves.
    ``parameter_norm`` is sent once per epoch by the first rank, else 0.0.
    ``warm`` is False if the steps held a first batch, which is not timed.
    ``backward_passes`` is the number of the run's reduced passes. They must be of the
    same steps in the same order on every rank; ``pass_steps`` is their checksum.
    ``max_samples`` is the most samples that fit on the device (0: no limit found).
    ``is_finite`` is False if checked parameters are NaN. ``broken`` is the part since
    which this rank's own gradients are NaN or Inf. ``unknown`` names state that depends
    on this rank's batches and cannot be copied to another rank ("" if none was seen):
    no rank may then be excluded. ``checks`` are of its parameters after some of the
    steps before ``start``; see `ModelCheck`.
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
    pass_steps: int = 0
    transfer_s: float = 0.0
    reduce_s: float = 0.0
    parameter_norm: float = 0.0
    max_samples: int = 0
    scalars: Scalars = ()
    is_finite: bool = True
    broken: OwnPart = ()
    unknown: str = ""
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesDone:
    """Windows: a rank has trained the batches ``start <= batch < stop`` of a lease.

    ``busy_s`` is delivered time; of it, ``data_wait_s`` is the wait for data and
    ``transfer_s`` its transfer to the device. ``timed`` of the batches took
    ``timed_s``: a first batch of its kind (compilation) is not timed.
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
    """A rank has closed its part of a window at a batch boundary.

    ``changed_buffers`` are indices of float buffers written since the last reduction.
    ``is_finite`` is False if the update cannot be used. ``has_moved`` is False if the
    update is known to be zero, as all gradients wait for a step (checked only after an
    update that was not finite). ``scalars`` are (name, weighted sum, weight) of logged
    scalars. ``weight`` is the user's weight for this rank's batches, None for their
    samples; a rank of weight 0 is excluded from the mean. ``periods`` are (calls,
    period) of registered schedulers. ``copies`` are the samples of batches that updated
    each copy of the model that the rank has registered (see `CopySamples`).
    """

    rank: int
    epoch: int
    window: int
    changed_buffers: tuple[int, ...]
    is_finite: bool = True
    has_moved: bool = True
    scalars: Scalars = ()
    weight: float | None = None
    periods: Runs = ()
    copies: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUpdated:
    """The result of ``window``, the mean of all updates, is in this rank's model.

    Under ``sync``, after a copy of the model or a death: the result of all steps up to
    that one. ``sync_s`` is its cost on the training thread, ``wait_s`` the wait for
    other ranks before it. ``divergence`` is the rank's distance from the consensus,
    over the consensus' norm. ``adopted_at`` batches of the next window were run before
    it. ``checks`` are of the common model that the rank continues from.
    """

    rank: int
    epoch: int
    window: int
    sync_s: float = 0.0
    wait_s: float = 0.0
    divergence: float = 0.0
    adopted_at: int = 0
    parameter_norm: float = 0.0
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReady:
    """A newcomer has built all it needs, and its loop begins."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A rank is in the group of this generation; it holds the result of ``reduced``.

    ``reduced`` is a window, or under ``sync`` a step of the epoch (-1 for none). Under
    ``sync``, ``lost`` are ranks that died in this part of the epoch, each with the
    first step that lacks its share. All ranks run the steps up to ``reduced``, and
    report that by `ModelUpdated`.
    """

    rank: int
    generation: int
    epoch: int
    reduced: int = -1
    lost: Runs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLeft:
    """A rank's loop left the epoch early, after running ``step`` steps of it.

    Under ``sync`` it includes the work since the last report; see `StepsDone`. The rank
    has taken part in ``passes`` backward passes of the run. It joins later passes of
    the others with zeros, unless ``apart`` names a reason why it cannot. ``checks`` are
    of its parameters after ``stepped`` optimizer steps of the run: before the last
    step's update, or after it.
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
    passes: int = 0
    apart: str = ""
    checks: CheckRows = ()
    stepped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCut:
    """A rank requests a pause of the epoch: all is committed, and the rest is kept.

    ``is_end``: no rank continues with the rest.
    """

    rank: int
    epoch: int
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBegun:
    """``sync``: position of a rank that waits, or has received ``gone`` `RankLeft`s.

    It has begun ``step`` steps of the epoch, and ``passes`` backward passes of the run.
    """

    rank: int
    epoch: int
    step: int
    passes: int
    gone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached:
    """A rank waits at the barrier ``name``; ``checks`` must be equal on all ranks.

    The first rank's ``text`` is sent to all; None: a rank that is not the first yet.
    """

    rank: int
    name: str
    text: str | None = ""
    checks: CheckRows = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultGroupFormed:
    """torch.distributed's default group exists on a rank."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasFormed:
    """Ranks of a pipeline's replicas, each of which can continue without the others."""

    rank: int
    replicas: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved:
    """The writer of the manifest reports a complete checkpoint, for the event file."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank ends with an error, or by ``sys.exit(exit_code)`` inside an epoch."""

    rank: int
    error: str
    traceback: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A rank has finished and leaves in order.

    If its loop left an epoch of windows before: ``batches`` is this rank's count in the
    run, ``samples`` and ``steps`` (global batches) the whole run's; 0 otherwise.
    """

    rank: int
    batches: int = 0
    samples: int = 0
    steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """A rank's connection has ended, or it has sent nothing for ``silent_s``."""

    rank: int
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
