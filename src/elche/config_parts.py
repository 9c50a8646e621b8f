"""Groups of settings inside `elche.RunConfig`, checked when they are made. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from elche.config_checks import check_fields, check_known, is_number
from elche.errors import ConfigError

Update = Literal["auto", "gradients", "parameters"]
OuterOptimizer = Literal["auto", "nesterov", "slowmo", "average"]
NonFinite = Literal["stop", "leave_out"]
TransportKind = Literal["auto", "gloo", "nccl"]

_Group = TypeVar("_Group", bound="SettingsGroup")
_Part = TypeVar(
    "_Part", "OuterConfig", "WindowConfig", "TransportConfig", "DebugConfig"
)


class SettingsGroup:
    """Base of settings; refuses unknown names and suggests the right ones."""

    __slots__ = ()

    def __new__(cls: type[_Group], **given: Any) -> _Group:
        """Refuses former and unknown names.

        Raises:
            ConfigError: a name is no setting here; the message suggests another.
        """
        own = {item.name for item in fields(cls)}  # type: ignore[arg-type]
        refuse_former(given.keys() - own)
        check_known(given, own, f" of {cls.__name__}")
        return object.__new__(cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig(SettingsGroup):
    """The optimizer that steps along the mean of the ranks' parameter deltas.

    Attributes:
        optimizer: ``"average"`` (none), ``"nesterov"``, or ``"slowmo"`` (heavy-ball
            momentum, arXiv:1910.00643); ``"auto"`` is Nesterov, or plain averaging in
            a run that is known to have fewer than 4 windows.
        lr: outer learning rate; None is 1 for ``"slowmo"`` (as in its paper), and for
            Nesterov 0.7 at two ranks, 1 beyond.
        momentum: momentum of its step; the default, 0.5, was measured for Nesterov and
            is within the 0.4 to 0.8 of SlowMo's paper.
    """

    optimizer: OuterOptimizer = "auto"
    lr: float | None = None
    momentum: float = 0.5

    def __post_init__(self) -> None:
        check_fields(self, positive=("lr",), group="outer.")
        if not is_number(self.momentum) or not 0.0 <= self.momentum < 1.0:
            raise ConfigError(
                f"expected 0 <= outer.momentum < 1, got {self.momentum!r}"
            )
        if self.optimizer == "average" and self.lr not in (None, 1.0):
            raise ConfigError(
                f"outer.optimizer 'average' has rate 1, got lr={self.lr!r}; leave it "
                "out, or choose 'nesterov' or 'slowmo'"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowConfig(SettingsGroup):
    """Windows of ``cadence``, ``async`` and ``auto``: length, and what they reduce.

    Attributes:
        local_batch_size: most samples of a local step; each batch is cut into as few
            local steps as possible. None cuts it into one per rank.
        update: tensors that a window of ``cadence`` reduces: ``"parameters"``, or
            ``"gradients"`` (summed over the window, one common optimizer step at
            its end). ``"auto"`` is the policy's default.
        anchor: batches of the slowest rank in the first window.
        min_anchor: the anchor's lower bound.
        max_anchor: its upper bound; 0 switches El Che off (a window is one batch
            everywhere), ``anchor == max_anchor`` fixes it.
        overhead_target: share of a window that a synchronisation may cost before
            the anchor grows; clamped to 0.01 .. 0.50.
        max_grad_norm: norm to which the reduced gradient of ``update="gradients"`` is
            clipped; elsewhere the loop clips.
        guard: monitor how far replicas drift apart, and shorten windows.
        non_finite: reaction to a rank's update that is not finite. It is always
            discarded, and its batches are not trained on again; the rank warns, naming
            them, and its next windows are of one batch until its update is finite.
            After two in a row ``"stop"`` ends the run and names rank and samples;
            ``"leave_out"`` continues. Windows end on parameters that are NaN, and do
            not begin on them. Under ``sync`` no part of a step can be discarded: the
            run ends soon after parameters have become NaN, and names the rank and
            samples of the first such gradient. One device checks nothing.
        max_batch_diff: most batches that a rank may run beyond the slowest rank's
            planned count in a window, and the most a count moves per report.
        outer: the outer optimizer, an `elche.config.OuterConfig`.
    """

    local_batch_size: int | None = None
    update: Update = "auto"
    anchor: int = 1
    min_anchor: int = 1
    max_anchor: int = 200
    overhead_target: float = 0.03
    max_grad_norm: float | None = None
    guard: bool = True
    non_finite: NonFinite = "stop"
    max_batch_diff: int | None = None
    outer: OuterConfig = field(default_factory=OuterConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outer", part_of("outer", OuterConfig, self.outer))
        check_fields(
            self,
            whole={
                **dict.fromkeys(("local_batch_size", "anchor", "min_anchor"), 1),
                **dict.fromkeys(("max_anchor", "max_batch_diff"), 0),
            },
            positive=("overhead_target", "max_grad_norm"),
        )
        self._check_anchors()
        if self.update == "gradients" and self.outer.optimizer in (
            "nesterov",
            "slowmo",
        ):
            raise ConfigError(
                f"outer.optimizer {self.outer.optimizer!r} steps along averaged "
                "parameters, and update='gradients' reduces gradients; leave one out"
            )

    def _check_anchors(self) -> None:
        """Refuses bounds that would silently change the requested anchor."""
        if self.max_anchor == 0:
            return
        for name in ("anchor", "min_anchor"):
            if getattr(self, name) > self.max_anchor:
                raise ConfigError(
                    f"expected {name} of at most max_anchor ({self.max_anchor}), got "
                    f"{getattr(self, name)}; give a larger max_anchor as well"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig(SettingsGroup):
    """Transport of tensors between ranks.

    Attributes:
        kind: under ``"auto"``, CPU ranks of one host sum in shared memory, ranks with a
            CUDA device each sum gradients through NCCL, and the others use gloo.
            ``"gloo"`` always uses gloo. ``"nccl"`` sums gradients through NCCL between
            hosts as well, or refuses to train; the death of a rank then ends the run.
        bucket_cap_mb: most mebibytes of gradients reduced in one message.
    """

    kind: TransportKind = "auto"
    bucket_cap_mb: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, positive=("bucket_cap_mb",), group="transport.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig(SettingsGroup):
    """Settings for reproducible runs.

    Attributes:
        deterministic: plans depend on the settings alone, not on time: two runs
            on the same devices give the same bits.
    """

    deterministic: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def part_of(name: str, kind: type[_Part], given: object) -> _Part:
    """A group of settings, from an instance or (in files and messages) a mapping.

    Raises:
        ConfigError: ``given`` is neither, or a setting is unknown or wrong.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        return kind(**{str(key): value for key, value in given.items()})
    known = ", ".join(item.name for item in fields(kind))
    raise ConfigError(
        f"expected {name} to be {kind.__name__} (with {known}), got {given!r}"
    )


_FORMER = {
    **{
        name: f"windows=elche.WindowConfig({name}=...)"
        for name in (item.name for item in fields(WindowConfig))
    },
    "outer": "windows=elche.WindowConfig(outer={'optimizer': ...})",
    "outer_lr": "windows=elche.WindowConfig(outer={'lr': ...})",
    "outer_momentum": "windows=elche.WindowConfig(outer={'momentum': ...})",
    "bucket_cap_mb": "transport=elche.config.TransportConfig(bucket_cap_mb=...)",
    **{
        name: f"debug=elche.config.DebugConfig({name}=...)"
        for name in (item.name for item in fields(DebugConfig))
    },
}
REMOVED = {
    "micro_batches": "micro_batches= was removed: elche.Trainer runs shares "
    "above max_samples in micro-batches, a loop of your own does not",
    "checkpoint_every_epochs": "checkpoint_every_epochs= was removed: on_checkpoint= "
    "is called at the end of every epoch, with its number",
    "on_window_end": "on_window_end= was removed: elche.metrics() returns the windows "
    "that have ended, and so does the handle of Trainer.start()",
    "fragments": "fragments= was removed: short windows with an encoding "
    "(max_anchor=, codec='int4') send less and learn more",
    "drift_weights": "drift_weights= was removed: all ranks' deltas of a window have "
    "equal weight; leave it out",
    "optimizer_state": "optimizer_state= was removed: each rank keeps its optimizer's "
    "state; leave it out",
    "record": "record= was removed: for runs that can be repeated give "
    "debug=elche.config.DebugConfig(deterministic=True)",
    "replay": "replay= was removed: for runs that can be repeated give "
    "debug=elche.config.DebugConfig(deterministic=True)",
}
FORMER_SETTINGS = {
    **{name: f"{name}= is now {place}" for name, place in _FORMER.items()},
    **REMOVED,
    **{
        name: f"{name}= is an option of the launcher, also for one device: "
        f"`elche run --{name}`, or elche.launch(main, {name}=...)"
        for name in ("events", "page")
    },
}
"""Names that are no settings here, and the error message for each."""
NO_AUTO_CODEC = (
    "codec='auto' was removed: measure the link between ranks (`elche doctor`) and "
    "name the codec: 'int8' below about 250 Mbit/s, 'bf16' below 700, none above"
)
NO_DELAYED_SYNC = (
    "policy='delayed_sync' was removed: on one machine 'sync' is faster, and behind a "
    "slow link policy='async' with codec='int8' is"
)


def refuse_former(names: Iterable[str]) -> None:
    """Refuses former names of settings.

    Raises:
        ConfigError: a name is a former one; the message gives the new place.
    """
    for name in names:
        if name in FORMER_SETTINGS:
            raise ConfigError(FORMER_SETTINGS[name])
