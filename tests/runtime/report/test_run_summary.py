"""`elche.summary()`: devices, transport, policy and why, and figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

import elche
from elche.coordination.protocol.instructions import PolicyChosen
from elche.runtime.report.notifications import RunNotifications
from elche.runtime.report.run_summary import (
    RunFacts,
    RunSummary,
    headline,
    summarise,
)
from elche.session.process import current_run
from tests.distributed.cases.tasks import Task, build, take_step
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread


def _summaries() -> list[RunSummary]:
    """Before and after an epoch, under the default policy; then with one asked for."""
    found = []
    for options in ({}, {"policy": "async"}, {"policy": "auto"}):
        # its layers keep windows from being advised, and change no reason
        model, optimizer, loader = build(Task(model="mlp" if options else "norm"))
        model = elche.convert_sync_batchnorm(model)
        model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
        found.append(elche.summary())
        if not options:
            for x, y, *_ in loader:
                take_step(model, optimizer, x, y)
            found.append(elche.summary())
        elche.shutdown()
    assert current_run() is None
    assert elche.summary() == found[-1]  # the run's is still there after its end
    return found


@pytest.mark.distributed
def test_ranks_summarise_alike(ranks2: RankPool) -> None:
    first, other = ranks2.run(_summaries, case_setup=serve_in_thread)
    assert first == other
    begun, ended, asked, auto = first
    assert (begun.policy, begun.reason) == ("sync", "the default, as none was named")
    assert (begun.transport, begun.samples_per_s) == ("shared memory", None)
    assert [line.device for line in begun.ranks] == ["CPU", "CPU"]
    assert begun.ranks[0].memory_bytes == begun.ranks[1].memory_bytes > 1 << 28
    assert begun.reduction_bytes > 0
    assert sum(line.share or 0.0 for line in ended.ranks) == pytest.approx(1.0)
    assert ended.efficiency is not None
    assert ended.efficiency > 0
    text = str(ended)
    assert "policy     sync: the default" in text
    assert "samples/s in epoch 0" in text
    assert text.splitlines()[-1].split()[:2] == ["1", "CPU"]
    assert ended.as_dict()["ranks"][1]["share"] == ended.ranks[1].share
    assert (asked.policy, asked.reason) == ("async", "asked for")
    assert auto.reason == "asked for; it measures under sync until it chooses"


FACTS = RunFacts(
    policy="auto",
    is_default=False,
    transport="gloo",
    reduction_bytes=0,
    devices=("CPU", "CPU"),
    memory_bytes=(0, 0),
)


def test_the_first_line_names_memory() -> None:
    sizes = (8 * 10**9, 16 * 10**9, 24 * 10**9)
    facts = replace(FACTS, devices=("A", "A", "B"), memory_bytes=sizes)
    assert "unequal: 2 x A (8 or 16 GB), 1 x B (24 GB); p" in headline(facts, 1, "")
    facts = replace(FACTS, memory_bytes=sizes[:1] * 2)
    assert "2 devices, equal: 2 x CPU (host 8 GB); policy" in headline(facts, 1, "")


def test_a_choice_of_auto_is_said_in_its_own_words() -> None:
    """It said "async (auto): training on one device alone"."""
    notifications = RunNotifications(0)
    reason = "training on one device alone: predicted 1.00 times"
    told = PolicyChosen(rank=0, policy="async", reason=reason)
    notifications.handle(told)
    text = str(summarise(FACTS, notifications))
    assert text.startswith(f"policy     auto: {reason}")
