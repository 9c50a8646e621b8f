"""A run in a few lines: devices, transport, policy with its reason, speeds, shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from elche.coordination.accounts.metrics import EpochMetrics
from elche.monitor.run_view import RankLine, rank_lines, rank_table
from elche.runtime.report.notifications import RunNotifications


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that are known when it begins.

    Attributes:
        policy: requested policy, or the default.
        is_default: no policy was named.
        devices: device names of all ranks.
        memory_bytes: memory of each device; 0 if unknown.
        transport: transport of sums between ranks.
        reduction_bytes: memory that each rank holds for reductions.
    """

    policy: str
    is_default: bool
    devices: tuple[str, ...]
    memory_bytes: tuple[int, ...]
    transport: str
    reduction_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run so far; ``str()`` gives its lines.

    Attributes:
        policy: requested policy, or the default.
        reason: reason for it; for ``auto`` its choice and reason, on the first rank.
        advice: expected gain of another policy, or "".
        transport: transport of sums between ranks.
        reduction_bytes: memory that each rank holds for reductions.
        of: source of the figures: the last finished epoch or window.
        samples_per_s: throughput of the whole run; None before the first figures.
        efficiency: see `elche.monitor.Metrics.efficiency`.
        ranks: one line per rank.
    """

    policy: str
    reason: str
    advice: str
    transport: str
    reduction_bytes: int
    of: str
    samples_per_s: float | None
    efficiency: float | None
    ranks: tuple[RankLine, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        held_mb = self.reduction_bytes / 1e6
        lines = [
            f"policy     {self.policy}: {self.reason}",
            *([f"advice     {self.advice}"] if self.advice else []),
            f"transport  {self.transport}; {held_mb:.1f} MB per rank for reductions",
        ]
        if self.samples_per_s is not None:
            line = f"rate       {self.samples_per_s:,.0f} samples/s in {self.of}"
            if self.efficiency is not None:
                line += f", {self.efficiency:.0%} of what the devices deliver"
            lines.append(line)
        return "\n".join([*lines, *rank_table(self.ranks)])


def headline(facts: RunFacts, trained_bytes: int, steps: str) -> str:
    """The line that names the devices, their memory, and whether they differ.

    Args:
        facts: facts of the run.
        trained_bytes: size of the trained parameters.
        steps: text about local steps, or "".
    """
    count, by_kind = len(facts.devices), Counter(facts.devices)
    parts = [f"{by_kind[kind]} x {kind}{_memory(facts, kind)}" for kind in by_kind]
    what = f"{count} devices, {'un' * (len(parts) > 1)}equal"
    what = f"{what if count > 1 else 'single device'}: {', '.join(parts)}"
    models = facts.reduction_bytes / max(1, trained_bytes)
    held = f"{facts.reduction_bytes / 1e6:.1f} MB ({models:.1f} models) for reductions"
    return f"elche: {what}; policy {facts.policy}{steps}, {held}"


def _memory(facts: RunFacts, kind: str) -> str:
    """Memory of a kind of device, such as `` (24 GB)``; "" if unknown or emulated."""
    pairs = zip(facts.devices, facts.memory_bytes, strict=True)
    sizes = sorted({round(size / 1e9) for name, size in pairs if name == kind})
    if kind.startswith("CPU emulated") or not any(sizes):
        return ""
    return f" ({'host ' * (kind == 'CPU')}{' or '.join(map(str, sizes))} GB)"


def summarise(facts: RunFacts, notifications: RunNotifications) -> RunSummary:
    """Summarises the run so far, with its newest figures."""
    kept = notifications.epoch_metrics or notifications.window_metrics
    last = kept[-1] if kept else None
    window, of, efficiency = None, "", None
    if last is not None and len(last.shares) == len(facts.devices):
        window = {"t": 0.0, "samples": last.samples, **last.as_fields()}
        efficiency = last.efficiency
    if last is not None:
        is_epoch = isinstance(last, EpochMetrics)
        of = f"epoch {last.epoch}" if is_epoch else f"a window of epoch {last.epoch}"
    policy, reason = facts.policy, "asked for"
    if facts.is_default:
        reason = "the default, as none was named"
    if notifications.choices:
        policy, reason = "auto", notifications.choices[-1][1]  # it names the choice
    elif policy == "auto":
        reason = "asked for; it measures under sync until it chooses"
    return RunSummary(
        policy=policy,
        reason=reason,
        advice=notifications.advice,
        transport=facts.transport,
        reduction_bytes=facts.reduction_bytes,
        of=of,
        samples_per_s=None if last is None else last.samples_per_s,
        efficiency=efficiency,
        ranks=rank_lines(dict(enumerate(facts.devices)), window, facts.memory_bytes),
    )
