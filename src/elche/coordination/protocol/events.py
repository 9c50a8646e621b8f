"""Events: messages from workers and the shell to the coordinator. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from elche.coordination.protocol.messages import CheckRows, OwnPart, Runs, Scalars


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A rank presents itself and what it holds; compared between ranks.

    ``settings`` are (name, value) pairs that must agree, ``tensors`` are (name,
    shape, dtype) of parameters and buffers. ``horizon_batches`` is how many batches
    the rank's loader draws ahead of the one in hand. ``memory_bytes`` are the device's.
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
    """A rank asks for the epoch; rank 0 says its batch sizes.

    ``probe_s`` is what one reduction of the model takes (0.0 where nobody asks).
    ``layout`` names what is trained now and whether that has changed since the last
    epoch, ``checks`` the values of the parameters (none where the layout has changed):
    both must agree. ``rates`` names what the optimizer steps with
    (learning rate and so on, but not a rate that follows the run's progress). ``steps``
    is how many the loop takes at most, -1 for a whole epoch. ``continues``: it is what
    was left of the epoch begun last when that was cut, or a resumed run's first.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """``sync``: a rank has run the steps ``start <= step < stop`` of its grant.

    ``busy_s`` is delivered time without the wait for other ranks (``sync_wait_s``); of
    it, ``data_wait_s`` waiting for data and ``transfer_s`` moving them to the device.
    ``parameter_norm`` is reported once per epoch, by the first rank, and 0.0 otherwise.
    ``warm`` is False when the steps held a first batch, which is not timed.
    ``backward_passes`` of the run so far were reduced: as many on every rank, of the
    same steps in the same order, whose checksum is ``pass_steps``.
    ``max_samples`` is what the rank's device turned out to hold at once (0: no limit
    was met). ``is_finite`` is False where checked parameters are NaN; ``broken`` is
    the part since which this rank's own gradients are NaN or Inf. ``unknown`` names
    state that moves with this rank's batches and cannot be carried to another ("" if
    none was seen), so that no rank may be left out. ``checks`` are of its parameters
    after some of the steps before ``start``; see `ModelCheck`.
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
    parameter_norm: float = 0.0
    max_samples: int = 0
    scalars: Scalars = ()
    is_finite: bool = True
    broken: OwnPart = ()
    unknown: str = ""
    checks: CheckRows = ()


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

    ``changed_buffers`` are indices of float buffers written since the last reduction,
    ``is_finite`` is False when its update cannot be used; ``has_moved`` is False where
    the update is known to be none, as all gradients wait for a step (looked at only
    after one that was not finite). ``scalars`` are (name, weighted sum, weight) of what
    the user logged. ``weight`` is what the user says that its batches weigh, None where
    their samples do: a rank of weight 0 is left out of the mean. ``periods`` are
    (calls, period) of the schedulers that were handed over, ``copies`` samples of the
    batches that updated each copy of the model that the rank knows (see `CopySamples`).
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
    """The result of ``window`` is in this rank's model: the mean of all updates.

    Under ``sync``, where a model was copied or ranks have died: of all steps up to that
    one. ``sync_s`` is what it cost the training thread, ``wait_s`` the wait for other
    ranks before it. ``divergence`` is the rank's distance from the consensus, over the
    consensus' norm. ``adopted_at`` batches of the next window were run before it.
    ``checks`` are of the common model that the rank goes on from.
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
    """A rank that is to join the run has built all it needs, and its loop begins."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A rank is in the group of this generation; it holds the result of ``reduced``.

    Which is a window, or under ``sync`` a step of the epoch (-1 for none).
    There ``lost`` are ranks that have died in this part of it, each with the first step
    that lacks its part; all run the steps to ``reduced``, and say so (`ModelUpdated`).
    """

    rank: int
    generation: int
    epoch: int
    reduced: int = -1
    lost: Runs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLeft:
    """A rank's loop left the epoch early, with ``step`` steps of it run.

    Under ``sync`` also what it did since its last report; see `StepsDone`. It has taken
    part in ``passes`` backward passes of the run, and takes part in later ones of the
    others with nothing, unless ``apart`` says why it cannot. ``checks`` are of the
    parameters that it has left, after ``stepped`` steps of its optimizers in the run:
    before the last step's, or after it.
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
    """A rank asks for a pause of the epoch: all is committed, and the rest is kept.

    ``is_end``: no rank goes on with the rest.
    """

    rank: int
    epoch: int
    is_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBegun:
    """``sync``: how far a rank is that waits, or knows of ``gone`` ranks which left.

    It has begun ``step`` steps of the epoch, and ``passes`` backward passes of the run.
    """

    rank: int
    epoch: int
    step: int
    passes: int
    gone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached:
    """A rank waits at the barrier ``name``, which needs equal ``checks`` of all.

    The first rank's ``text`` reaches all; None: a rank that is not the first yet.
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
class Failed:
    """A rank ends with an error, or by ``sys.exit(exit_code)`` inside an epoch."""

    rank: int
    error: str
    traceback: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A rank has nothing more to do and goes.

    If its loop has left an epoch of windows before: ``batches`` that it has taken in
    the run, ``samples`` and ``steps`` (global batches) of the whole run; 0 otherwise.
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
    """Time has passed; deadlines are looked at."""

    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The launcher was sent the signal ``by``: the run is to end."""

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
    | Failed
    | Left
    | RankLost
    | Tick
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class StreamBegun:
    """A rank has come, with a stream of messages of that name."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class StoreSet:
    """A rank has published a rendezvous value."""

    key: str
    value: bytes


Input: TypeAlias = Event | StreamBegun | StoreSet
