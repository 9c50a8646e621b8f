"""Instructions: messages from the coordinator to the workers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from elche.coordination.protocol.messages import (
    Cut,
    EpochMessage,
    Message,
    Runs,
    WindowMessage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """All ranks have joined and agree; the first generation may form its group.

    A newcomer receives it once accepted, and may then build its reducers. ``survives``:
    the run survives the loss of ranks.
    """

    generation: int
    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...] = ()
    survives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch(WindowMessage):
    """All ranks have opened the epoch; rank 0 now sends its positions.

    ``policy`` is the epoch's first policy, ``window`` its first window, ``cut`` its cut
    of the batches of ``sizes``. ``state_from`` names a rank that has trained alone: all
    ranks first copy its optimizer state.
    """

    sizes: Runs
    policy: str
    cut: Cut
    state_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChosen(Message):
    """Choice of ``auto`` and its reason; sent to the first rank.

    With ``is_advice``: the predicted gain of another policy over the default.
    """

    policy: str
    reason: str
    is_advice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut(EpochMessage):
    """``sync``: from now on ``left_out`` get no batch, and the others reduce alone.

    () readmits all ranks. If the participants change, no granted step is open.
    ``reason`` is a line for the user, sent with or without a change.
    """

    left_out: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeft(EpochMessage):
    """``sync``: rank ``gone`` has left the epoch after ``passes`` backward passes.

    Granted steps are still run; each rank answers with `PassBegun`.
    """

    gone: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPasses(EpochMessage):
    """To a rank that left: join the others' pass ``passes``, of step ``step``."""

    step: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantBatches(EpochMessage):
    """Lease of the batches ``start <= batch < stop``.

    Windows: local batches, for this rank alone. ``sync``: global batches, each a step
    of all ranks, split by ``shares`` per rank. An empty grant asks loops that fetch
    early to report their last step; no other steps are granted for now.
    """

    start: int
    stop: int
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow(WindowMessage):
    """Opens a window: train until ``wall_s`` or ``max_batches`` is reached.

    After ``hold_after`` batches the rank waits for a `Permit`. ``adopt_at`` fixes the
    batch of this window after which the last reduction is adopted (a plan). Overlapped,
    a rank trains past the window's end until it has adopted the last result. It blocks
    on that result ``patience_s`` after the window began. Schedulers use the last three:
    ``committed_samples`` were trained before this window, ``planned_samples`` are
    planned in it for all ranks, ``planned_batches`` for this one.
    """

    wall_s: float | None
    max_batches: int | None
    hold_after: int | None
    adopt_at: int | None
    patience_s: float | None
    committed_samples: int
    planned_samples: int
    planned_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit(WindowMessage):
    """The slowest rank has caught up: train up to ``batches`` in this window."""

    batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWindow(WindowMessage):
    """Close the window at the next batch boundary, whatever the deadline.

    With ``drain`` the epoch ends there, and leases not begun return to the pool.
    """

    drain: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce(WindowMessage):
    """All ranks have closed the window; reduce now.

    ``weight`` is this rank's part of the mean. Weights sum to one over ranks; a rank of
    weight zero sends zeros. ``active_ranks`` is the number of ranks with a weight above
    zero. ``attempt`` counts the generations that have tried. ``periods`` are of the
    registered schedulers, in batches; 0 if unknown. ``copies`` are samples by which
    each copy of the model (EMA) is behind the result. ``mean_over`` is the number of
    ranks that the epoch's batches were cut for. If fewer are active, their mean is
    scaled down, so that no sample counts for more than in a window of all.
    """

    attempt: int
    weight: float
    active_ranks: int
    buffers: tuple[int, ...]
    outer: str
    outer_lr: float
    outer_momentum: float
    periods: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    mean_over: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup(Message):
    """The membership has changed: form group ``generation``, then send `Regrouped`.

    ``left`` are gone (``in_order``: not dead), ``joined`` are new since the previous
    generation. A new rank receives all members as ``joined``.
    """

    generation: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    in_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(WindowMessage):
    """Copy the common model after ``window`` from rank ``source``; all ranks do so.

    Under ``sync``, ``window`` is a step, and the optimizer's state is copied too. The
    answer is a `ModelUpdated`.
    """

    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch(EpochMessage):
    """Every contribution of the epoch is in the model that all ranks hold.

    ``is_early``: a rank's loop left the epoch before its end, or all must end at the
    cut. ``left``: ranges of positions of a cut epoch (see `EpochCut`) that are still to
    be trained. ``steps``: number of global batches for them (``sync``, after deaths);
    0: the epoch's batches, less their trained samples.
    """

    samples: int
    sync_s: float
    windows: int
    anchor: int
    is_early: bool = False
    left: Runs = ()
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReported(WindowMessage):
    """Metrics of a window (or, with ``window`` -1, of the epoch); sent to one rank.

    ``values`` are the fields of `WindowMetrics` or `EpochMetrics` as JSON.
    """

    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierPassed(Message):
    """All ranks have reached the barrier ``name``; ``text`` is the first rank's."""

    name: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """The run ends: ``reason``, and the failed rank's traceback if one failed.

    ``batches`` (start, stop) caused the end, if data did; ``part`` (start, stop) are
    the samples that did, if not the whole batch. With an ``exit_code`` every rank exits
    with it, as the failed rank did by ``sys.exit``.
    """

    reason: str
    failed_rank: int | None = None
    traceback: str = ""
    kind: str = "remote"
    batches: Runs = ()
    part: tuple[int, ...] = ()
    exit_code: int | None = None


Instruction = (
    Welcome
    | BeginEpoch
    | PolicyChosen
    | LeaveOut
    | RankLeft
    | JoinPasses
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
