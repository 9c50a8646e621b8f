"""Lines on what one device would do otherwise: once per run, only where it would."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import elche
from elche import session
from elche.runtime.process.coordinator import serve_in_thread
from tests.harness.rank_pool import RankPool
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
    "dropped": r"elche: a batch of \d+ samples came where \d+ were .* in a batch of \d",
    "buffers": r"write \(.*'0\.queue', '0\.observed'.*\) become the mean.*all_gather",
}
"""What is said, by the kind of the loop; of other kinds nothing."""
SILENT = ("plain", "padded alike", "weighed", "time first", "buffers alike")


class Written(nn.Module):
    """Buffers that its forward pass writes, and some of which all ranks write alike."""

    def __init__(self, *, is_alike: bool) -> None:
        super().__init__()
        self.is_alike = is_alike
        self.queue: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("queue", torch.zeros(2, 6))
        self.register_buffer("observed", torch.zeros(()))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        if not self.is_alike:
            self.queue = torch.cat([self.queue, x.detach()])[-2:]
            self.observed.copy_(x.detach().max())
        out: torch.Tensor = self.norm(x)
        return out


class Kept(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _collate(samples: list[Any]) -> Any:
    """Drops those that are marked; the rest as ever."""
    return default_collate([s for s in samples if s[2] % 11 != 10])


def _labels(kind: str, x: torch.Tensor) -> torch.Tensor:
    y = (x[:, :4] > 0).long()
    if kind == "padded alike":
        y[:, 0] = -100
    elif kind in ("ignored", "weighed"):
        y[::3, 1:] = -100
    return y


def _train(kind: str, model: nn.Module, loader: Any, optimizer: Any) -> None:
    weight = torch.tensor([1.0, 3.0]) if kind == "class weights" else None
    for _ in range(2):
        for x, y, *_ in loader:
            if kind == "time first":
                x, y = x.transpose(0, 1).reshape(-1, 6), y.transpose(0, 1).reshape(-1)
            out = model(x).view(-1, 2) if y.dim() > 1 else model(x)[:, :2]
            loss = F.cross_entropy(out, y.reshape(-1), weight)
            optimizer.zero_grad()
            (2.0 * loss / 2).backward()
            optimizer.step()


def lines_of(policy: str, kinds: list[str]) -> list[list[str]]:
    """What a rank says in a run of each kind."""
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = nn.Sequential(
            Written(is_alike=kind != "buffers")
            if kind.startswith("buffers")
            else nn.Identity(),
            nn.Linear(6, 8),
        )
        x = torch.randn(72, 6)
        tensors = (x, _labels(kind, x), torch.arange(72))
        if kind == "time first":
            x = x[:, None].expand(72, 5, 6)
            tensors = (x, (x[..., 0] > 0).long(), torch.arange(72))
        collates: dict[str, Any] = {"dropped": _collate, "time first": _time_first}
        collates["plain"] = _with_scalar
        data = TensorDataset(*tensors)
        loader: Any = DataLoader(data, 12, collate_fn=collates.get(kind))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        options: Any = nested(POLICIES[policy])
        if kind == "weighed":
            options["weight_of"] = lambda batch: (batch[1] != -100).sum()
        said: list[str] = []
        log = logging.getLogger("elche.comm.model_buffers")
        handler = Kept(said)
        log.addHandler(handler)
        model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
        run = session.current_run()
        assert run is not None
        run.notifications.emit = said.append
        _train(kind, model, loader, optimizer)
        elche.shutdown()
        log.removeHandler(handler)
        pattern = "become the mean|weight_of="
        found.append([line for line in said if re.search(pattern, line)])
    return found


def _with_scalar(samples: list[Any]) -> Any:
    """With tensors of integers that are no labels."""
    return [*default_collate(samples)[:2], torch.tensor(3), torch.empty(0).long()]


def _time_first(samples: list[Any]) -> Any:
    """Sequences one step after the other, as recurrent networks take them."""
    x, y, index = default_collate(samples)
    return [x.transpose(0, 1), y.transpose(0, 1), index]


@pytest.mark.parametrize("policy", ["sync", "gradients", "auto", "cadence"])
def test_what_differs_is_said_once(ranks2: RankPool, policy: str) -> None:
    kinds = [*SAID, *SILENT] if policy != "auto" else ["ignored", "buffers"]
    if policy != "sync":  # a float that counts is another one on each rank
        kinds = [kind for kind in kinds if kind != "buffers alike"]
    found, others = ranks2.run(lines_of, policy, kinds, case_setup=serve_in_thread)
    for kind, lines, of_other in zip(kinds, found, others, strict=True):
        weighs = policy != "cadence" or kind == "buffers"  # local steps have own means
        if kind not in SAID or not weighs:
            assert lines == [], kind
            continue
        assert len(lines) == 1, (kind, lines)
        assert re.search(SAID[kind], lines[0]), lines
        assert all("become the mean" not in line for line in of_other)  # of rank 0
