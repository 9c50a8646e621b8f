"""The default policy's one line on what windows would bring. Pure.

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
from elche.coordination.auto.measures import MeasuredSteps
from elche.coordination.protocol.events import StepsDone
from elche.coordination.protocol.instructions import Instruction, PolicyChosen

ADVICE_GRANTS = 16
"""Grants of warm steps that are measured for it; the shares have settled by then."""
ADVICE_GAIN = 1.1
"""Least predicted gain over ``sync`` that is worth a line."""


@final
class AdvisedSync(MeasuredSteps):
    """``sync`` by default: measures some steps and says once what windows bring."""

    _is_over = False  # it was said, or other ranks take part than were measured

    def _watch(self, reports: Sequence[StepsDone], steps: int) -> list[Instruction]:
        """The line, when all ranks have run enough; nothing before and ever after."""
        measures = self._measures
        self._is_over |= {report.rank for report in reports} != self._members.keys()
        if self._is_over or not all(report.warm for report in reports):
            return []
        measures.take(reports, steps)
        if measures.count < ADVICE_GRANTS:
            return []
        self._is_over, cluster = True, self._cluster()
        reason, first, name = advice(cluster), min(self._members), self._sync.name
        line = PolicyChosen(rank=first, policy=name, reason=reason, is_advice=True)
        return [line] if reason else []


def advice(cluster: MeasuredCluster) -> str:
    """Line about the predicted gain of windows of all ranks; "" where they do not pay.

    ``sync`` measures only the part of a reduction that backward does not hide.
    """
    shown_s = cluster.sync_s
    step_s = predict("sync", replace(cluster, sync_s=0.0)).window_s
    longest_s = shown_s + BACKWARD_SHARE * step_s
    hidden = 1.0 - shown_s / longest_s
    cluster = replace(cluster, sync_s=longest_s, hidden=hidden)
    choice = Chooser(leaves_out=False).choose(cluster)
    gain = choice.prediction.goodput / predict("sync", cluster).goodput
    if choice.policy == "sync" or gain < ADVICE_GAIN:
        return ""
    return (
        f"policy={choice.policy!r} is predicted to train {gain:.1f} times as fast "
        "here; read docs/policies.md first"
    )
