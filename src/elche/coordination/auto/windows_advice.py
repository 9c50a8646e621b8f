"""The default policy, with one line on what windows would bring. Pure.

What they would bring on these devices and this link is predicted as ``auto`` predicts,
but from the steps that ``sync`` takes anyway: nothing is probed and no share changed
for it. Of a reduction only what does not hide under backward shows, so it is taken to
be as long as could hide: windows then look no better than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from elche.cadence.chooser import Chooser
from elche.cadence.goodput import BACKWARD_SHARE, MeasuredCluster, predict
from elche.coordination.accounts.batch_ranges import BatchSizes
from elche.coordination.agreement import Settings
from elche.coordination.auto.auto_choice import RunLength
from elche.coordination.auto.auto_gauge import Gauge
from elche.coordination.policy import Member, Outcome
from elche.coordination.protocol.events import Event, StepsDone
from elche.coordination.protocol.instructions import PolicyChosen
from elche.coordination.sync.sync_policy import SyncPolicy

ADVICE_GRANTS = 16
"""Grants of warm steps that are measured for it; the shares have settled by then."""
ADVICE_GAIN = 1.1
"""Least predicted gain over ``sync`` that is worth a line."""


@final
class AdvisedSync(SyncPolicy):
    """``sync``, chosen by nobody: measures some steps and says once what windows bring.

    Args:
        members: all ranks, in order.
        settings: what the ranks agreed on.
    """

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        super().__init__(members, settings)
        least, kind = settings.min_share_samples, settings.optimizer_kind
        self._gauge: Gauge | None = Gauge(settings.config, len(members), least, kind)
        self._length = RunLength(settings.epochs)
        self._batch_size = 0

    def begin_epoch(self, epoch: int, sizes: BatchSizes, now_s: float) -> Outcome:
        """Grants the first steps."""
        if self._gauge is not None:
            length = replace(
                self._length, begun_epochs=epoch + 1, epoch_batches=sizes.num_batches
            )
            self._gauge.begin_epoch(float(length.epochs * sizes.num_batches))
            self._batch_size = sizes.runs[0][0]
        return super().begin_epoch(epoch, sizes, now_s)

    def handle(self, event: Event, now_s: float) -> Outcome:
        """Takes an event; adds the line when enough is measured."""
        outcome = super().handle(event, now_s)
        if self._left_out.ranks:
            self._gauge = None  # it waits for reports of all ranks
        said = self._measured(event) if isinstance(event, StepsDone) else ""
        if said:
            rank = min(self._members)
            line = PolicyChosen(
                rank=rank, policy=self.name, reason=said, is_advice=True
            )
            outcome.instructions.insert(0, line)
        return outcome

    def remove(self, rank: int) -> None:
        """A rank is gone: what was measured is of another membership."""
        self._gauge = None
        super().remove(rank)

    def add(self, member: Member) -> None:
        """A rank joins: what was measured is of another membership."""
        self._gauge = None
        super().add(member)

    def _measured(self, event: StepsDone) -> str:
        """The line, when all ranks have run enough; "" before and ever after."""
        gauge = self._gauge
        reports = gauge.reported(event) if gauge is not None else []
        if gauge is None or not reports or not gauge.took_steps(reports):
            return ""
        if gauge.measurements == ADVICE_GRANTS // 2:
            gauge.learn(0.0)  # how steps vary, which later waits are freed of
        if gauge.measurements < ADVICE_GRANTS:
            return ""
        self._gauge = None
        gauge.learn(0.0)
        return advice(gauge.cluster(self._batch_size))


def advice(cluster: MeasuredCluster) -> str:
    """What windows of all ranks are predicted to bring; "" where they do not pay.

    Args:
        cluster: as measured under ``sync``; of its reduction only what showed.
    """
    shown_s = cluster.sync_s
    step_s = predict("sync", replace(cluster, sync_s=0.0)).window_s
    longest_s = shown_s + BACKWARD_SHARE * step_s
    hidden = 1.0 - shown_s / longest_s
    cluster = replace(cluster, sync_s=longest_s, hidden=hidden)
    choice = Chooser(leaves_out=False).observe(cluster)
    gain = choice.prediction.goodput / predict("sync", cluster).goodput
    if choice.policy == "sync" or gain < ADVICE_GAIN:
        return ""
    return (
        f"policy={choice.policy!r} is predicted to train {gain:.1f} times as fast "
        "here; read docs/policies.md first"
    )
