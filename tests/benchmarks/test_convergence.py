"""The convergence benchmark: virtual ranks against plain torch, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.convergence.engine import train
from benchmarks.convergence.method import Method
from benchmarks.convergence.muon import MuonRows
from benchmarks.convergence.replicas import (
    BETAS,
    EPSILON,
    MAX_NORM,
    MOMENTUM,
    WEIGHT_DECAY,
    Column,
)
from benchmarks.convergence.report import line, samples_for, table
from benchmarks.convergence.results import Results, Setting
from benchmarks.convergence.search import Trial, wanted
from benchmarks.convergence.tasks import Task
from benchmarks.paired import mean_interval

SIZE = 6
BATCHES = 121
LR = 0.05


class Points(Task):
    """Mean distance to points, the fourth power for curvature; its value is a norm."""

    name = "points"
    batch_size = 4
    shapes = ((2, 2), (2,))

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.points = torch.randn(64, SIZE, generator=generator)

    def initial(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return 2.0 * torch.randn(SIZE, generator=generator)

    def stream(self, seed: int, batches: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + seed)
        return torch.randint(64, (batches, self.batch_size), generator=generator)

    def losses(self, parameters: Sequence[Tensor], samples: Tensor) -> Tensor:
        flat = torch.cat([part.flatten(1) for part in parameters], dim=1)
        away = flat[:, None] - self.points[samples]
        return (away.square() + 0.1 * away**4).sum(-1).mean(-1).sum()

    def evaluate(self, parameters: Sequence[Tensor]) -> list[float]:
        flat = torch.cat([part.flatten(1) for part in parameters], dim=1)
        return [float(v) for v in flat.detach() @ torch.arange(1.0, SIZE + 1)]


def reference(method: Method, seed: int, lr: float) -> float:
    """The same by hand, with a torch optimizer per rank."""
    task = Points()
    stream = task.stream(seed, BATCHES).view(BATCHES * method.cut, -1)
    total = len(stream)
    start = task.initial(seed)
    ranks = [torch.nn.Parameter(start.clone()) for _ in method.speeds]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [p], lr=lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
        )
        if method.optimizer == "adamw"
        else torch.optim.SGD([p], lr=lr, momentum=MOMENTUM)
        for p in ranks
    ]
    base, momentum = start.clone(), torch.zeros(SIZE)
    counts = [0] * len(ranks)
    pending: tuple[int, list[Tensor], list[int]] | None = None
    window = method.window_ticks
    lag = window if method.lag < 0 else method.lag

    def adopt() -> None:
        nonlocal base, momentum
        assert pending is not None
        _, taken, batches = pending
        raw = [float(n > 0) for n in batches]
        drift = torch.zeros(SIZE)
        for weight, snapshot in zip(raw, taken, strict=True):
            drift += weight / sum(raw) * (base - snapshot)
        momentum = method.outer_momentum * momentum + drift
        if method.outer == "nesterov":
            drift = drift + method.outer_momentum * momentum
        base = base - method.outer_lr * drift
        for p, snapshot in zip(ranks, taken, strict=True):
            p.data += base - snapshot

    done = tick = 0
    ended = [0] * len(ranks)
    while done < total:
        tick += 1
        due = [math.floor(tick * speed + 1e-9) for speed in method.speeds]
        active = [r for r, ends in enumerate(due) if ends > ended[r]]
        ended = due
        active = active[: total - done]
        for place, rank in enumerate(active):
            p, optimizer = ranks[rank], optimizers[rank]
            optimizer.zero_grad()
            samples = stream[done + place][None]
            task.losses([p[None]], samples).backward()
            assert p.grad is not None
            norm = p.grad.norm()
            p.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
            optimizer.param_groups[0]["lr"] = lr * method.rate_at(
                (done + len(active) / 2) / total
            )
            optimizer.step()
            counts[rank] += 1
        done += len(active)
        if pending is not None and pending[0] <= tick:
            adopt()
            pending = None
        if tick % window == 0:
            pending = (tick + lag, [p.detach().clone() for p in ranks], counts)
            counts = [0] * len(ranks)
            if lag == 0:
                adopt()
                pending = None
    if pending is not None:
        adopt()
    if any(counts):
        pending = (tick, [p.detach().clone() for p in ranks], counts)
        adopt()
    return float(base @ torch.arange(1.0, SIZE + 1))


NESTEROV: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.6}


@pytest.mark.parametrize(
    "settings",
    [
        {"fleet": "4", "cut": 4, "anchor": 2},
        {"fleet": "4", "cut": 2, **NESTEROV},
        {"fleet": "8", "lag": 2, **NESTEROV},
        {"fleet": "2", "cut": 2, "lag": -1, **NESTEROV},
        {"fleet": "2", "cut": 2, "anchor": 2, "optimizer": "sgd"},
        {"optimizer": "sgd"},
    ],
)
def test_virtual_ranks_train_as_ranks_of_torch_do(settings: dict[str, Any]) -> None:
    method = Method(**settings)
    columns = [Column(0, LR), Column(1, LR), Column(0, LR / 2)]
    found = train(Points(), method, columns, BATCHES)
    expected = [reference(method, c.seed, c.lr) for c in columns]
    # Torch's momentum is float32, elche's bfloat16.
    bound = 1e-2 if method.outer_momentum else 1e-4
    assert found == pytest.approx(expected, rel=bound, abs=bound)
    assert len({round(value, 3) for value in found}) == 3


SAME = {"fleet": "4", "cut": 4}


def test_muon_steps_matrices_as_torchs_does() -> None:
    """Torch iterates in bfloat16, so directions agree and not digits."""
    shapes = [(5,), (12, 4), (4, 4), (4,), (4, 4), (3,), (2,)]
    generator = torch.Generator().manual_seed(3)
    sizes = [math.prod(shape) for shape in shapes]
    theta = torch.randn(2, sum(sizes), generator=generator)
    rows = MuonRows(shapes, (1, 2, 4), WEIGHT_DECAY)
    assert rows.others == [slice(0, 5), slice(69, 73), slice(89, 94)]
    matrix = torch.nn.Parameter(theta[1, 5:53].view(12, 4).clone())
    ours, momentum, begun = theta.clone(), torch.zeros_like(theta), theta.clone()
    muon = torch.optim.Muon(
        [matrix], lr=0.02, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        gradients = torch.randn(theta.shape, generator=generator)
        rows.step([1], 0.02, ours, gradients, momentum)
        matrix.grad = gradients[1, 5:53].view(12, 4).clone()
        muon.step()
    moved = (ours - begun)[1, 5:53]
    expected = matrix.detach().flatten() - begun[1, 5:53]
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.99
    assert moved.norm() == pytest.approx(expected.norm().item(), rel=0.05)
    assert torch.equal(ours[0], begun[0])
    assert torch.equal(ours[1, :5], begun[1, :5])


def test_muon_leaves_the_rest_to_adamw() -> None:
    class Matrix(Points):
        matrices = (0,)

    columns = [Column(0, LR)]
    adamw = train(Matrix(), Method(**SAME), columns, BATCHES)
    muon = train(Matrix(), Method(**SAME, optimizer="muon"), columns, BATCHES)
    none = train(Points(), Method(**SAME, optimizer="muon"), columns, BATCHES)
    assert none == pytest.approx(adamw, rel=1e-6)
    assert muon != pytest.approx(adamw, rel=1e-3)


def test_a_batch_is_cut_into_equal_parts_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="4 samples do not divide by 8"):
        train(Points(), Method(fleet="8", cut=8), [Column(0, LR)], BATCHES)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fleet": "2:3"}, "unknown fleet '2:3'"),
        ({"outer_lr": 0.7}, "plain averaging has rate 1"),
    ],
)
def test_methods_that_mean_nothing_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Method(**settings)


def test_a_study_finds_a_learning_rate_and_resumes(tmp_path: Path) -> None:
    setting = Setting("points", BATCHES, Method(fleet="2", anchor=3))
    trial = Trial(setting, centre=0.1, seeds=2)
    path, asked = tmp_path / "runs.jsonl", []
    for _ in range(20):
        results = Results(path)
        results.load()
        columns = wanted(trial, results)
        if not columns:
            break
        column = columns[0]
        asked.append((column.lr, column.seed))
        results.add(setting, column.lr, column.seed, abs(math.log(column.lr / 0.25)))
    rates = [0.05, 0.1, 0.2, 0.4]
    assert asked == [(lr, 0) for lr in rates] + [(0.2, 1)]
    assert results.best(setting, (0,)) == 0.2
    assert results.best(setting, (0, 1)) == 0.2
    assert results.best(setting, (0,), (0.1, 0.4)) == 0.4
    assert results.best(setting, (5,)) is None


def test_runs_that_diverge_are_not_the_best(tmp_path: Path) -> None:
    setting = Setting("points", BATCHES, Method())
    results = Results(tmp_path / "runs.jsonl")
    for lr, value in ((0.1, 2.0), (0.2, math.nan), (0.3, 3.0)):
        results.add(setting, lr, 0, value)
    results.load()
    assert results.best(setting, (0,)) == 0.1


def test_runs_of_settings_that_no_longer_exist_are_skipped(tmp_path: Path) -> None:
    setting, results = Setting("points", 1, Method()), Results(tmp_path / "runs.jsonl")
    results.add(setting, 0.1, 0, 2.0)
    old = results.path.read_text().replace("{}", '{"state": "average"}')
    with results.path.open("a") as file:
        file.write(old.replace("2.0", "1.0"))
    results.load()
    assert results.of(setting) == {0.1: {0: 2.0}}


def test_samples_for_a_loss_are_read_off_the_curve() -> None:
    curve = {1000: 3.0, 2000: 2.0, 8000: 1.0}
    for length, loss in curve.items():
        assert samples_for(loss, curve) == pytest.approx(length)
    assert samples_for(1.5, curve) == pytest.approx(4000)
    assert samples_for(4.0, curve) == pytest.approx(500)
    assert samples_for(0.5, curve) == pytest.approx(16_000)
    with pytest.raises(ValueError, match="at least two lengths"):
        samples_for(1.0, {1000: 3.0})


def test_a_line_compares_seed_by_seed(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    setting = Setting("points", 2000, Method(fleet="2", cut=2, lag=1))
    for seed, value in enumerate((1.5, 2.5, 3.8)):
        results.add(setting, 0.1, seed, value)
        results.add(setting, 0.2, seed, value + 3.0)
    alone = {0: 1.0, 1: 2.0, 2: 3.0, 3: 90.0}
    curve = {1000: 2.5, 2000: 1.9}
    found = line(setting, results, alone, curve)
    assert found is not None
    assert (found.lr, found.seeds) == (0.1, 3)
    assert found.penalty == pytest.approx(0.6)
    assert found.half == pytest.approx(mean_interval([0.5, 0.5, 0.8]).high - 0.6)
    assert found.efficiency == pytest.approx(0.5)
    assert found.low < 0.5 < found.high
    assert "| 3 | 2.6000 | +0.6000 ± " in table([found])
    assert line(Setting("points", 1, Method()), results, alone, curve) is None
