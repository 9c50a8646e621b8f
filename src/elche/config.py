"""Settings of a run, checked when they are made. Pure: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from elche.config_checks import caps_of, check_fields, hints_of
from elche.config_parts import (
    NO_AUTO_CODEC,
    NO_DELAYED_SYNC,
    SettingsGroup,
    part_of,
)
from elche.config_parts import DebugConfig as DebugConfig
from elche.config_parts import OuterConfig as OuterConfig
from elche.config_parts import TransportConfig as TransportConfig
from elche.config_parts import WindowConfig as WindowConfig
from elche.errors import ConfigError

PolicyName = Literal["sync", "cadence", "async", "auto"]
LossReduction = Literal["mean", "sum"]
Shares = Literal["auto", "fixed"]
Codec = Literal["fp32", "bf16", "int8", "int4"]
POLICIES: tuple[str, ...] = get_args(PolicyName)
CODECS: tuple[str, ...] = get_args(Codec)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(SettingsGroup):
    """Settings of a run, equal on every rank.

    Attributes:
        policy: ``"sync"``, the default (gradients reduced at every batch, shares of the
            global batch by delivered speed; the result equals one device's), or a
            policy that changes the optimisation: ``"cadence"`` (local steps in El Che
            windows, parameters averaged at their end), ``"async"`` (as cadence, the
            averaging overlapped with the next window), or ``"auto"`` (begins as sync,
            chooses by predicted goodput, logs its choice).
        seed: seed of sample augmentation, by (epoch, position), and of dropout, by
            rank; None keeps the user's seeding and only makes ranks differ.
        loss_reduction: reduction of the loop's loss over a batch: ``"mean"`` or
            ``"sum"``. Reduced gradients (under ``sync`` and in gradient windows) are
            those of the mean, or of the sum, over all ranks' samples; averaged
            parameters do not depend on it.
        max_samples: most samples that a rank's device holds at once, as ``{rank:
            samples}`` or a sequence of one number (or None) per rank. Under ``sync`` no
            share is larger; a loop of the `Trainer` runs larger ones in micro-batches,
            and finds limits by itself. Stored as a tuple with one value per rank.
        speed_hints: relative speeds per rank until the first measurement.
        shares: ranks' shares of a batch under ``sync``: ``"auto"`` by delivered speed;
            ``"fixed"`` keeps those of the first step (by ``speed_hints``, else equal),
            so that each column of every batch is on one rank, as state carried over
            batches needs. In a smaller batch the remaining columns stay on their rank,
            except the last ones where a rank would have none; a batch smaller than the
            world is divided again.
        codec: encoding of averaged parameters, or of ``sync``'s gradients, on the wire:
            ``"fp32"`` unencoded, ``"bf16"``, ``"int8"`` or ``"int4"`` in fewer bytes,
            with error feedback. float64 and complex tensors are sent unencoded, as are
            gradients while policy ``auto`` runs as ``sync``.
        timeout_s: deadline of every wait for another rank.
        leave_out: exclude a rank under ``sync`` if steps are predicted to be shorter
            without it, from an epoch's start or its calibration on; it is retried now
            and then. False keeps all. Needs ``epochs=`` (or the `Trainer`, or
            ``loader.steps(n)``), since a loop that counts steps itself would count too
            few on such a rank.
        survive: training continues when a rank dies: the others train its uncommitted
            batches. Needs ``elche run`` or `elche.launch`; False, or a setting that
            rules this out (docs/protocol.md), ends the run.
        min_ranks: the run pauses while fewer ranks are alive, until others join it
            (``elche run --rejoin``); after ``timeout_s`` it ends.
        windows: an `elche.WindowConfig`: length of windows, and what they reduce.
        transport: an `elche.config.TransportConfig`: transport of tensors between
            ranks.
        debug: an `elche.config.DebugConfig`: deterministic runs.
    """

    policy: PolicyName = "sync"
    seed: int | None = None
    loss_reduction: LossReduction = "mean"
    max_samples: Mapping[int, int] | Sequence[int | None] = ()
    speed_hints: tuple[float, ...] | None = None
    shares: Shares = "auto"
    codec: Codec = "fp32"
    timeout_s: float = 300.0
    leave_out: bool = True
    survive: bool = True
    min_ranks: int = 1
    windows: WindowConfig = field(default_factory=WindowConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        if str(self.codec) == "auto":
            raise ConfigError(NO_AUTO_CODEC)
        if str(self.policy) == "delayed_sync":
            raise ConfigError(NO_DELAYED_SYNC)
        check_fields(self, whole={"seed": 0, "min_ranks": 1}, positive=("timeout_s",))
        normal = {
            "max_samples": caps_of(self.max_samples),
            "speed_hints": hints_of(self.speed_hints),
            "windows": part_of("windows", WindowConfig, self.windows),
            "transport": part_of("transport", TransportConfig, self.transport),
            "debug": part_of("debug", DebugConfig, self.debug),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        self._check_windows()
        self._check_planned()

    def _check_windows(self) -> None:
        """Refuses windows, codecs and shares that the policy does not have."""
        windows = self.windows
        is_sync = self.policy == "sync"
        if self.shares == "fixed" and not is_sync:
            raise ConfigError(
                f"policy {self.policy!r} leases whole batches, of which no column "
                "stays on a rank; leave shares='fixed' out, or choose policy 'sync'"
            )
        if is_sync and windows != WindowConfig():
            raise ConfigError(
                f"policy {self.policy!r} reduces gradients at every batch and has no "
                "windows; leave windows= out, or choose policy 'cadence' or 'async'"
            )
        carries = self.policy == "sync" and self.codec == "fp32"
        if self.transport.kind == "nccl" and not carries:
            raise ConfigError(
                "transport.kind='nccl' carries gradients of policy 'sync' as they are, "
                f"got policy {self.policy!r} and codec {self.codec!r}; leave kind= "
                "out, or choose policy 'sync' and codec 'fp32'"
            )
        if self.codec != "fp32" and self.sums_gradients:
            raise ConfigError(
                f"codec {self.codec!r} is for averaged parameters and for policy "
                "'sync', but update='gradients' sums uncompressed gradients; leave "
                "codec out, or update='gradients'"
            )
        if self.policy == "auto" and windows.update != "auto":
            raise ConfigError(
                "policy 'auto' chooses what is reduced; leave update out, or choose "
                "policy 'cadence' or 'async'"
            )
        if self.policy == "async" and windows.update == "gradients":
            raise ConfigError(
                "policy 'async' averages parameters; gradient windows need policy "
                "'cadence'"
            )

    def _check_planned(self) -> None:
        """Refuses a plan with settings that follow measured times."""
        if not self.debug.deterministic:
            return
        if self.policy == "auto":
            raise ConfigError(
                "policy 'auto' follows measured times, so it cannot be deterministic; "
                "choose policy 'sync', 'cadence' or 'async'"
            )
        if self.windows.max_batch_diff is not None:
            raise ConfigError(
                "max_batch_diff follows measured progress, so it cannot be "
                "deterministic; leave it out"
            )

    @property
    def caps(self) -> tuple[int | None, ...]:
        """`max_samples` per rank; ranks at the end may be missing."""
        assert isinstance(self.max_samples, tuple)
        return self.max_samples

    def cap_of(self, rank: int) -> int | None:
        """Samples that a rank's device holds at once; None if not given."""
        return self.caps[rank] if rank < len(self.caps) else None

    @property
    def sums_gradients(self) -> bool:
        """True if a window reduces gradients."""
        return self.policy == "cadence" and self.windows.update == "gradients"

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, groups as dictionaries."""
        return asdict(self)


def default_outer_lr(world_size: int, outer: str = "nesterov") -> float:
    """Outer learning rate of a step with momentum.

    Equal drift weights shrink the step of the mean, and more ranks shrink it more.
    Nesterov's rates restore it, up to about 1.5 for rate times (1 + momentum)
    (measured: `docs/convergence.md`); SlowMo's is its paper's 1.

    Args:
        world_size: number of ranks.
        outer: ``"nesterov"`` or ``"slowmo"``.
    """
    return 0.7 if outer == "nesterov" and world_size <= 2 else 1.0
