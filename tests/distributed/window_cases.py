"""Cases of the window policies that need more than a plain task."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

import elche
from elche import session
from elche.comm.process_group import Group
from elche.runtime import run as run_module
from tests.distributed.cases import Task, Trace, build, shared

POISON = 17


def shared_over_slow_link(task: Task, sync_s: float) -> tuple[Trace, str]:
    """The task where the link was probed to be slow; also what was said."""
    said: list[str] = []
    probe = run_module.probe_reduction_s

    def slow(group: Group, numel: int) -> float:
        probe(group, numel)
        return sync_s

    run_module.probe_reduction_s = slow
    try:
        trace = shared_and_heard(task, said)
    finally:
        run_module.probe_reduction_s = probe
    return trace, "\n".join(said)


def shared_and_heard(task: Task, said: list[str]) -> Trace:
    """The task, with what the run says to people."""
    take = run_module.RunNews.take

    def listen(news: Any, report: Any) -> None:
        news.say = said.append
        take(news, report)

    run_module.RunNews.take = listen  # type: ignore[method-assign]
    try:
        return shared(task)
    finally:
        run_module.RunNews.take = take  # type: ignore[method-assign]


@dataclasses.dataclass
class Poisoned:
    """What a rank holds after training on data with a sample that gives no number."""

    state: dict[str, torch.Tensor]
    left_out: list[tuple[tuple[int, int], ...]]
    order: list[int]


def train_on_poison(task: Task) -> Poisoned:
    """One epoch in which one sample's loss is not finite, whoever trains on it."""
    model, optimizer, loader = build(task)
    model, optimizer, loader = elche.setup(model, optimizer, loader, **task.options)
    order: list[int] = []
    for x, y, index, _ in loader:
        order += index.tolist()
        loss = F.cross_entropy(model(x), y)
        if POISON in index.tolist():
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run = session.current_run()
    assert run is not None
    left_out = [report.left_out for report in run.reports]
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    elche.shutdown()
    return Poisoned(state, left_out, order)
