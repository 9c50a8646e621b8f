"""Settings of a run, checked when they are made. Pure: imports no torch."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from elche.config_checks import (
    caps_of,
    check_choice,
    check_positive,
    check_whole,
    hints_of,
    is_number,
    path_of,
)
from elche.errors import ConfigError

POLICIES = ("sync", "cadence", "async", "auto")
UPDATES = ("auto", "gradients", "parameters")
DRIFT_WEIGHTS = ("equal", "samples", "sqrt")
OPTIMIZER_STATES = ("auto", "average", "local", "reset")
NON_FINITE = ("stop", "leave_out")
TRANSPORTS = ("auto", "gloo")
LOSS_REDUCTIONS = ("mean", "sum")
OUTER_OPTIMIZERS = ("auto", "nesterov", "slowmo", "average")
CODECS = ("auto", "fp32", "bf16", "int8", "int4")
REMOVED_SETTINGS = {
    "fragments": "short windows with an encoding (max_anchor=, codec='int4') send less "
    "and learn more",
}
"""Settings that were, and what to do instead."""

_T = TypeVar("_T")


def refuse_removed(names: Iterable[str]) -> None:
    """Answers a setting that is no more.

    Raises:
        ConfigError: one of the names is such.
    """
    for name in names:
        if name in REMOVED_SETTINGS:
            raise ConfigError(f"{name}= was removed: {REMOVED_SETTINGS[name]}")


def _answers_removed(cls: type[_T]) -> type[_T]:
    """Has a class refuse settings that are no more by name, not with a TypeError."""
    made = cls.__init__

    @functools.wraps(made)
    def checked(self: object, *args: Any, **options: Any) -> None:
        refuse_removed(options)
        made(self, *args, **options)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@_answers_removed
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What every rank of a run must agree on.

    Attributes:
        policy: ``"sync"``, the default (gradients reduced at every batch, shares of
            the global batch by delivered speed; the result is one device's), or by
            name what changes the optimisation: ``"cadence"`` (local steps in El Che
            windows, parameters averaged at their end), ``"async"`` (as cadence, the
            averaging overlapped with the next window) or ``"auto"`` (begins as sync,
            measures, goes on by predicted goodput, with windows too, and says so).
        update: what a window of ``cadence`` reduces: ``"parameters"``, or
            ``"gradients"`` (summed over the window, one common optimizer step at
            its end). ``"auto"`` is what the policy usually does.
        loss_reduction: what the loop's loss is over the samples of a batch: their
            ``"mean"`` or their ``"sum"``. Where gradients are reduced they are those of
            the mean, or of the sum, over the samples of all ranks (under ``sync`` and
            ``update="gradients"``); averaged parameters do not depend on it.
        max_grad_norm: under gradient windows the reduced gradient is clipped to
            this norm; elsewhere the loop clips for itself.
        deterministic: plans depend on these settings alone, not on time: two runs
            on the same devices give the same bits.
        record: file to write what the run did to, for a replay; on rank 0.
        replay: file to repeat a recorded run from, bit for bit on the same devices.
        guard: watch how far replicas drift apart, and shorten windows; False does not.
        non_finite: what happens under windows where a rank's update is not finite. It
            is discarded, and its batches are not trained on again; the rank warns,
            naming them, and its next windows are of one batch until its update is
            finite. If it is not twice in a row, ``"stop"`` ends the run and names rank
            and samples; ``"leave_out"`` goes on. Under ``sync`` a step is one of all
            ranks and nothing can be left out of it: whatever is set, the run ends soon
            after parameters have become NaN, and names the rank and samples whose
            gradient was none first. Windows end on such parameters, too, and do not
            begin on them. One device does nothing of this.
        seed: when given, sample augmentation draws by (epoch, position) and
            dropout by (seed, rank); None leaves the user's seeding alone and only
            makes ranks differ.
        anchor: batches of the slowest rank in the first window of ``cadence``.
        min_anchor: the anchor's lower bound.
        max_anchor: its upper bound; 0 switches El Che off (a window is one batch
            everywhere), ``anchor == max_anchor`` fixes it.
        overhead_target: share of a window that a synchronisation may cost before
            the anchor grows; clamped to 0.01 .. 0.50.
        max_batch_diff: most batches that a rank may run beyond the slowest rank's
            planned count in a window, and the most a count moves per report.
        speed_hints: relative speeds per rank until the first measurement.
        max_samples: most samples that a rank's device holds at once, as ``{rank:
            samples}`` or a sequence of one number (or None) per rank. Under ``sync`` no
            share is larger; a loop of the `Trainer` runs larger ones in micro-batches,
            and learns of limits by itself. Kept as a tuple of one value per rank.
        micro_batches: the loop runs a batch above the rank's ``max_samples`` in several
            parts, so that shares need not keep within it. The `Trainer` sets it; a loop
            that the user owns is handed each batch whole, and must leave it out.
        drift_weights: how parameter drifts are weighted in the mean: ``"equal"``, by
            ``"samples"`` or their root, ``"sqrt"``; or by what `elche.setup` is told
            that batches weigh. A rank that trained on nothing weighs nothing.
        optimizer_state: whether optimizer state is averaged with the parameters,
            stays local, or is reset at each synchronisation, of all optimizers that
            step the model; ``"auto"`` averages it under ``cadence`` and leaves it local
            under ``async``.
        outer: outer optimizer of averaged parameters: ``"average"`` (none),
            ``"nesterov"``, or ``"slowmo"`` (heavy-ball momentum, arXiv:1910.00643);
            ``"auto"`` is Nesterov, or plain averaging in a run that is known to have
            fewer than 4 windows.
        outer_lr: outer learning rate; None is 1 for ``"slowmo"`` (its paper's) and
            picks Nesterov's by world size (0.7 at two ranks, 1 beyond).
        outer_momentum: momentum of the outer step; the default, 0.5, is measured for
            Nesterov and within the 0.4 to 0.8 that SlowMo's paper uses.
        bucket_cap_mb: most mebibytes of gradients reduced in one message.
        transport: ``"auto"`` lets ranks of one host that compute on the CPU sum in
            memory they share, those that have a CUDA device each sum gradients through
            NCCL, and the others through gloo; ``"gloo"`` is gloo always.
        codec: how averaged parameters travel: ``"fp32"`` as they are, ``"bf16"``,
            ``"int8"`` or ``"int4"`` in fewer bytes, with error feedback; ``"auto"``
            measures the link and encodes, down to int8, where that makes a reduction
            clearly shorter (not the default: what it costs learning has not been
            measured in long runs). Gradients and float64 parameters travel as they are.
        timeout_s: deadline of every wait for another rank.
    """

    policy: str = "sync"
    update: str = "auto"
    loss_reduction: str = "mean"
    max_grad_norm: float | None = None
    deterministic: bool = False
    record: str | None = None
    replay: str | None = None
    guard: bool = True
    non_finite: str = "stop"
    seed: int | None = None
    anchor: int = 1
    min_anchor: int = 1
    max_anchor: int = 200
    overhead_target: float = 0.03
    max_batch_diff: int | None = None
    speed_hints: tuple[float, ...] | None = None
    max_samples: Mapping[int, int] | Sequence[int | None] = ()
    micro_batches: bool = False
    drift_weights: str = "equal"
    optimizer_state: str = "auto"
    outer: str = "auto"
    outer_lr: float | None = None
    outer_momentum: float = 0.5
    bucket_cap_mb: float = 1.0
    transport: str = "auto"
    codec: str = "fp32"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_choice("policy", self.policy, POLICIES)
        check_choice("update", self.update, UPDATES)
        check_choice("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        check_choice("drift_weights", self.drift_weights, DRIFT_WEIGHTS)
        check_choice("optimizer_state", self.optimizer_state, OPTIMIZER_STATES)
        check_choice("outer", self.outer, OUTER_OPTIMIZERS)
        check_choice("transport", self.transport, TRANSPORTS)
        check_choice("non_finite", self.non_finite, NON_FINITE)
        check_choice("codec", self.codec, CODECS)
        check_whole("anchor", self.anchor, 1)
        check_whole("min_anchor", self.min_anchor, 1)
        check_whole("max_anchor", self.max_anchor, 0)
        if self.max_batch_diff is not None:
            check_whole("max_batch_diff", self.max_batch_diff, 0)
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        for name in ("overhead_target", "bucket_cap_mb", "timeout_s"):
            check_positive(name, getattr(self, name))
        for name in ("outer_lr", "max_grad_norm"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        object.__setattr__(self, "max_samples", caps_of(self.max_samples))
        for name in ("deterministic", "guard", "micro_batches"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"expected {name} to be True or False, got {getattr(self, name)!r}"
                )
        if not is_number(self.outer_momentum) or not 0.0 <= self.outer_momentum < 1.0:
            raise ConfigError(
                f"expected 0 <= outer_momentum < 1, got {self.outer_momentum!r}"
            )
        for name in ("record", "replay"):
            object.__setattr__(self, name, path_of(name, getattr(self, name)))
        object.__setattr__(self, "speed_hints", hints_of(self.speed_hints))
        self._check_anchors()
        self._check_together()

    def _check_anchors(self) -> None:
        """Refuses bounds that would silently move what was asked for."""
        if self.max_anchor == 0:
            return
        for name in ("anchor", "min_anchor"):
            if getattr(self, name) > self.max_anchor:
                raise ConfigError(
                    f"expected {name} of at most max_anchor ({self.max_anchor}), got "
                    f"{getattr(self, name)}; give a larger max_anchor as well"
                )

    def _check_together(self) -> None:
        """Refuses settings that contradict each other."""
        if self.outer == "average" and self.outer_lr not in (None, 1.0):
            raise ConfigError(
                f"outer 'average' has rate 1, got outer_lr={self.outer_lr!r}; leave it "
                "out, or choose outer 'nesterov' or 'slowmo'"
            )
        self._check_planned()
        if self.policy == "auto":
            self._check_auto()
        self._check_updates()
        self._check_averaging()

    def _check_planned(self) -> None:
        """What follows measured times cannot be planned."""
        planned = self.deterministic or self.replay is not None
        if planned and self.policy == "auto":
            raise ConfigError(
                "policy 'auto' follows measured times, so it cannot be deterministic; "
                "choose policy 'sync', 'cadence' or 'async'"
            )
        if planned and self.codec == "auto":
            raise ConfigError(
                "codec 'auto' follows a measured link, so it cannot be deterministic "
                "or replayed; choose codec 'fp32', 'bf16', 'int8' or 'int4'"
            )
        if planned and self.max_batch_diff is not None:
            raise ConfigError(
                "max_batch_diff follows measured progress, so it cannot be "
                "deterministic or replayed; leave it out"
            )

    def _check_auto(self) -> None:
        """Policy ``auto`` chooses for itself."""
        if self.record is not None:
            raise ConfigError(
                "policy 'auto' may change inside an epoch, which no record can "
                "repeat; choose policy 'sync', 'cadence' or 'async'"
            )
        if self.update != "auto":
            raise ConfigError(
                "policy 'auto' chooses what is reduced; leave update out, or choose "
                "policy 'sync', 'cadence' or 'async'"
            )
        if self.optimizer_state == "average":
            raise ConfigError(
                "policy 'auto' may choose 'async', which cannot average optimizer "
                "state; leave optimizer_state out, or choose policy 'cadence'"
            )

    def _check_updates(self) -> None:
        """Each policy reduces what it can."""
        if self.update == "gradients" and self.policy == "async":
            raise ConfigError(
                "policy 'async' averages parameters; gradient windows need policy "
                "'cadence'"
            )
        if self.update == "parameters" and self.policy == "sync":
            raise ConfigError(
                "policy 'sync' reduces gradients; averaging parameters needs policy "
                "'cadence' or 'async'"
            )

    def _check_averaging(self) -> None:
        """Settings of averaged parameters need them, and one another."""
        reduces_gradients = self.policy == "sync" or self.sums_gradients
        if self.outer in ("nesterov", "slowmo") and reduces_gradients:
            raise ConfigError(
                f"outer {self.outer!r} steps along averaged parameters, and gradients "
                "are reduced here; leave outer out, or choose policy 'cadence' or "
                "'async'"
            )
        is_lossy = self.codec not in ("auto", "fp32")
        if is_lossy and reduces_gradients:
            raise ConfigError(
                f"codec {self.codec!r} is for averaged parameters, and gradients are "
                "reduced here; leave codec out, or choose policy 'cadence' or 'async'"
            )
        if self.policy == "async" and self.optimizer_state == "average":
            raise ConfigError(
                "policy 'async' leaves optimizer state local (or resets it): an "
                "average of it would come late; choose optimizer_state 'local'"
            )

    @property
    def caps(self) -> tuple[int | None, ...]:
        """`max_samples` per rank; ranks at the end may be missing."""
        assert isinstance(self.max_samples, tuple)
        return self.max_samples

    def cap_of(self, rank: int) -> int | None:
        """Samples that a rank's device holds at once; None if that is not said."""
        return self.caps[rank] if rank < len(self.caps) else None

    @property
    def sums_gradients(self) -> bool:
        """Whether a window reduces gradients."""
        return self.policy == "cadence" and self.update == "gradients"

    @property
    def averages_state(self) -> bool:
        """Whether optimizer state is averaged with the parameters."""
        if self.optimizer_state == "auto":
            return self.policy == "cadence" and not self.sums_gradients
        return self.optimizer_state == "average" and not self.sums_gradients

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, for comparison between ranks."""
        return asdict(self)

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> RunConfig:
        """Builds a configuration from keyword options.

        Raises:
            ConfigError: an option is unknown or its value is wrong.
        """
        refuse_removed(options)
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(unknown_option(unknown[0], known))
        return cls(**options)


def unknown_option(name: str, known: Collection[str]) -> str:
    """The error text of an unknown option."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown option {name!r}; {meant}known are: {', '.join(sorted(known))}"


def default_outer_lr(world_size: int, outer: str = "nesterov") -> float:
    """Outer learning rate of a step with momentum.

    Equal drift weights shrink the step of the mean, the more so the more ranks.
    Nesterov's rates restore it, up to about 1.5 for rate times (1 + momentum)
    (measured: `docs/convergence.md`, "The outer step"); SlowMo's is its paper's 1.

    Args:
        world_size: ranks.
        outer: ``"nesterov"`` or ``"slowmo"``.
    """
    return 0.7 if outer == "nesterov" and world_size <= 2 else 1.0
