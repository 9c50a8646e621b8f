"""Instructions: messages from the coordinator to the workers. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from elche.coordination.protocol.messages import Cut, Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """All ranks are there and agree; the first generation may form its group.

    To a rank that is to join a run under way: it fits, and may build what it needs.
    The run ``survives`` the loss of ranks, or ends by it.
    """

    rank: int
    generation: int
    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...] = ()
    survives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginEpoch:
    """All ranks have opened the epoch; rank 0 now sends its positions.

    ``policy`` is the one that the epoch begins with, ``window`` the first one of it,
    ``cut`` how it cuts the batches of ``sizes``.
    Where ``state_from`` names a rank, it has trained alone: all take its optimizer's
    state first.
    """

    rank: int
    epoch: int
    sizes: Runs
    policy: str
    window: int
    cut: Cut
    state_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChosen:
    """A choice of ``auto`` and its reason; sent to the first rank.

    Or, if it ``is_advice``, what another policy would bring than the default.
    """

    rank: int
    policy: str
    reason: str
    is_advice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOut:
    """``sync``: from now on ``left_out`` get no batch, and the others reduce alone.

    () takes all in again. Where it changes who takes part, no granted step is under
    way. ``reason`` is a line for the user, which may come with nothing changed.
    """

    rank: int
    epoch: int
    left_out: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLeft:
    """``sync``: rank ``gone`` has left the epoch, and sends nothing after ``passes``.

    The steps that are granted are run all the same; the answers are `PassBegun`.
    """

    rank: int
    epoch: int
    gone: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPasses:
    """To a rank that has left: the others are in pass ``passes``, of step ``step``."""

    rank: int
    epoch: int
    step: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantBatches:
    """A lease of the batches ``start <= batch < stop``.

    Windows: local batches, for this rank alone. ``sync``: global ones, which are steps
    of all ranks, each split by ``shares`` per rank. A grant of no step: loops that
    fetch early are to report their last one, and no others are granted for now.
    """

    rank: int
    epoch: int
    start: int
    stop: int
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWindow:
    """Train until ``wall_s`` or ``max_batches`` is reached.

    ``hold_after`` batches the rank waits for a `Permit`. ``adopt_at`` fixes after how
    many batches of this window the last reduction is adopted (a plan). Overlapped, a
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
    generations that have tried. ``periods`` are of the schedulers that were
    handed over, in batches; 0 if not known yet. ``copies`` are samples by which each
    copy of the model (EMA) is behind the result. ``mean_over`` ranks the epoch's
    batches were cut for: where fewer weigh something, their mean is scaled down, so
    that no sample counts for more than in a window of all.
    """

    rank: int
    epoch: int
    window: int
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
class Regroup:
    """The membership has changed: form group ``generation``, then send `Regrouped`.

    ``left`` are gone (``in_order``: not dead), ``joined`` are new since the previous
    generation. A new rank receives all members as ``joined``.
    """

    rank: int
    generation: int
    left: tuple[int, ...]
    joined: tuple[int, ...]
    in_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take the common model after ``window`` from rank ``source``, with all ranks.

    Under ``sync`` it is that after a step, and the optimizer's state belongs to it. The
    answer is a `ModelUpdated`.
    """

    rank: int
    epoch: int
    window: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndEpoch:
    """Every contribution of the epoch is in the model that all ranks hold.

    ``is_early``: a rank's loop has left it before its end, or is to end with the cut.
    ``left``: it was cut (see `EpochCut`), and these ranges of its positions are still
    to be trained on. ``steps``: in so many global batches (``sync``, where
    ranks have died); 0: in those of the epoch, or what is left of each.
    """

    rank: int
    epoch: int
    samples: int
    sync_s: float
    windows: int
    anchor: int
    is_early: bool = False
    left: Runs = ()
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsReported:
    """Metrics of a window (or, with ``window`` -1, of the epoch); sent to one rank.

    ``values`` are the fields of `WindowMetrics` or `EpochMetrics` as JSON.
    """

    rank: int
    epoch: int
    window: int
    values: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierPassed:
    """All ranks have reached the barrier ``name``; the first one's ``text``."""

    rank: int
    name: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The run ends: ``reason``, and the failed rank's traceback if one failed.

    ``batches`` (start, stop) are those that it ends for, if it is about data; ``part``
    (start, stop) the samples of the batch, where only some of it are meant. With an
    ``exit_code`` every rank ends with it, as the failed one does by ``sys.exit``.
    """

    rank: int
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
