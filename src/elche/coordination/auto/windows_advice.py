"""The default policy's advice: one line on the predicted gain of windows. Pure.

The gain is predicted as in ``auto``, but from the steps that ``sync`` takes anyway:
nothing is probed, and no share changes. Only the part of a reduction that backward does
not hide is visible. The hidden part is assumed to be as long as possible, so windows
look no better than they are.
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
"""Grants of warm steps that are measured first; by then the shares have settled."""
ADVICE_GAIN = 1.1
"""Least predicted gain over ``sync`` that is reported."""


@final
class AdvisedSync(MeasuredSteps):
    """``sync`` by default: measures some steps and reports the gain of windows once."""

    _is_over = False  # advice was given, or the ranks are not those measured

    def _watch(self, reports: Sequence[StepsDone], steps: int) -> list[Instruction]:
        """Returns the advice once all ranks have run enough steps, else nothing."""
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
    """Returns the predicted gain of windows of all ranks as a line; "" without gain.

    ``sync`` measures only the part of a reduction that backward does not hide.
    """
    shown_s = cluster.sync_s
    step_s = predict("sync", replace(cluster, sync_s=0.0)).window_s
    longest_s = shown_s + BACKWARD_SHARE * step_s
    cluster = replace(cluster, sync_s=longest_s, hidden=1.0 - shown_s / longest_s)
    choice = Chooser(leaves_out=False).choose(cluster)
    gain = choice.prediction.goodput / predict("sync", cluster).goodput
    if choice.policy == "sync" or gain < ADVICE_GAIN:
        return ""
    return (
        f"policy={choice.policy!r} is predicted to train {gain:.1f} times as fast "
        "here; read docs/policies.md first"
    )
