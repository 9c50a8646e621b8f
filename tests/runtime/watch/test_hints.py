"""Lines on what one device would do otherwise: once per run, only where it would."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import elche
from elche.comm.model_buffers import known_buffers
from elche.session.process import current_run
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

EVEN = {"max_anchor": 0, "deterministic": True}
"""A batch per rank and window."""
POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync", "speed_hints": (1.0, 0.4)},
    "cadence": {"policy": "cadence", **EVEN},
    "gradients": {"policy": "cadence", "update": "gradients", **EVEN},
    "auto": {"policy": "auto"},
}
MEAN = r"elche: the loss is a mean over {} in a batch of \d+ samples.*weight_of="
SAID = {
    "ignored": MEAN.format(r"\d+ targets, without ignored ones,"),
    "class weights": MEAN.format("class weights"),
    "dropped": r"elche: a batch of \d+ samples arrived where \d+ .* in a batch of \d",
    "dropped throughout": MEAN.format(r"\d+ targets"),
    "buffers": r"write \(.*'0\.observed'.*\) are averaged.*all_gather",
    "buffers that count": r"write \('0\.samples'\) .* integers stay local.*",
}
"""What is said, by the kind of the loop; of other kinds nothing."""
OF_STEPS = "buffers alike", "buffers that count"
SILENT = ("plain", "padded alike", "weighed", "time first", "buffers alike")


class Written(nn.Module):
    """Buffers that its forward pass writes, and some of which all ranks write alike."""

    def __init__(self, *, is_alike: bool, counts: bool) -> None:
        super().__init__()
        self.is_alike, self.counts = is_alike, counts
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("observed", torch.zeros(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.steps.add_(1)
        if self.counts:
            self.samples.add_(len(x))
        if not self.is_alike:
            self.observed.copy_(x.detach().max())
        out: torch.Tensor = self.norm(x)
        return out


def _time_first(samples: list[Any]) -> Any:
    """Sequences one step after the other, and integers that are no labels."""
    x, y, index = default_collate(samples)
    return [x.transpose(0, 1), y.transpose(0, 1), [index.sum(), index[:0]]]


COLLATES: dict[str, Any] = {
    "time first": _time_first,
    "dropped": lambda samples: default_collate([s for s in samples if s[2] % 11 != 10]),
    "dropped throughout": lambda samples: default_collate(samples[:-1] or samples),
}


def _data(kind: str) -> TensorDataset:
    x = torch.randn(72, 5, 6) if kind == "time first" else torch.randn(72, 6)
    y = (x[..., :4] > 0).long()
    if kind == "padded alike":
        y[:, 0] = -100
    elif kind in ("ignored", "weighed"):
        y[::3, 1:] = -100
    return TensorDataset(x, y, torch.arange(72))


def _train(kind: str, model: nn.Module, loader: Any, optimizer: Any) -> None:
    weight = torch.tensor([1.0, 3.0]) if kind == "class weights" else None
    for _ in range(2):
        for x, y, _ in loader:
            loss = F.cross_entropy(model(x).reshape(-1, 2), y.reshape(-1), weight)
            optimizer.zero_grad()
            (2.0 * loss / 2).backward()
            optimizer.step()


def lines_of(policy: str, kinds: list[str]) -> list[list[str]]:
    """What a rank says in a run of each kind."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(6, 8)
        if kind.startswith("buffers"):
            model = nn.Sequential(
                Written(
                    is_alike=kind != "buffers", counts=kind == "buffers that count"
                ),
                model,
            )
        loader: Any = DataLoader(_data(kind), 12, collate_fn=COLLATES.get(kind))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = nested(POLICIES[policy])
        if kind == "weighed":
            options["weight_of"] = lambda batch: (batch[1] != -100).sum()
        said: list[str] = []
        with mock.patch.object(known_buffers, "_log") as log:
            model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
            run = current_run()
            assert run is not None
            run.notifications.emit = said.append
            _train(kind, model, loader, optimizer)
            elche.shutdown()
        said += [call.args[0] % call.args[1:] for call in log.warning.call_args_list]
        pattern = "are averaged|weight_of="
        found.append([line for line in said if re.search(pattern, line)])
    return found


@pytest.mark.parametrize("policy", ["sync", "gradients", "auto", "cadence"])
def test_what_differs_is_said_once(ranks2: RankPool, policy: str) -> None:
    kinds = [*SAID, *SILENT] if policy != "auto" else ["ignored", "buffers"]
    if policy != "sync":  # floats that count differ by rank, and integers are summed
        kinds = [each for each in kinds if each not in OF_STEPS]
    found, others = ranks2.run(lines_of, policy, kinds, case_setup=serve_in_thread)
    for kind, lines, of_other in zip(kinds, found, others, strict=True):
        weighs = policy != "cadence" or kind == "buffers"  # local steps have own means
        if kind not in SAID or not weighs:
            assert lines == [], kind
            continue
        assert len(lines) == 1, (kind, lines)
        assert re.search(SAID[kind], lines[0]), lines
        assert all("are averaged" not in line for line in of_other)  # of rank 0
