"""The convergence benchmark: virtual ranks against plain torch, rank by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.convergence.digits import Digits
from benchmarks.convergence.engine import Compressor, train
from benchmarks.convergence.method import Method
from benchmarks.convergence.replicas import (
    BETAS,
    EPSILON,
    MAX_NORM,
    MOMENTUM,
    WEIGHT_DECAY,
    Column,
    Replicas,
)
from benchmarks.convergence.report import (
    describe,
    difference,
    differences_table,
    interval,
    samples_for,
)
from benchmarks.convergence.results import Results, Setting
from benchmarks.convergence.search import Trial, wanted
from benchmarks.convergence.tasks import Task

SIZE = 6
BATCHES = 121
LR = 0.05


class Points(Task):
    """Mean distance to points, the fourth power for curvature; its value is a norm."""

    name = "points"
    batch_size = 2
    shapes = ((2, 2), (2,))

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.points = torch.randn(64, SIZE, generator=generator)

    def initial(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return 2.0 * torch.randn(SIZE, generator=generator), torch.zeros(0)

    def stream(self, seed: int, batches: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + seed)
        return torch.randint(64, (batches, self.batch_size), generator=generator)

    def losses(
        self, parameters: Sequence[Tensor], buffers: Tensor, samples: Tensor
    ) -> Tensor:
        flat = torch.cat([part.flatten(1) for part in parameters], dim=1)
        away = flat[:, None] - self.points[samples]
        return (away.square() + 0.1 * away**4).sum(-1).mean(-1).sum()

    def evaluate(self, parameters: Sequence[Tensor], buffers: Tensor) -> list[float]:
        flat = torch.cat([part.flatten(1) for part in parameters], dim=1)
        return [float(v) for v in flat.detach() @ torch.arange(1.0, SIZE + 1)]


def reference(method: Method, seed: int, lr: float) -> float:
    """The same by hand, with a torch optimizer per rank."""
    task = Points()
    stream = task.stream(seed, BATCHES)
    start, _ = task.initial(seed)
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
    window = method.window_ticks(method.anchor)
    lag = window if method.lag < 0 else method.lag

    def adopt() -> None:
        nonlocal base, momentum
        assert pending is not None
        _, taken, batches = pending
        raw = {
            "equal": [float(n > 0 or method.mix < 1.0) for n in batches],
            "samples": [float(n) for n in batches],
            "sqrt": [math.sqrt(n) for n in batches],
        }[method.weights]
        drift = torch.zeros(SIZE)
        for weight, snapshot in zip(raw, taken, strict=True):
            drift += weight / sum(raw) * (base - snapshot)
        mean_of_ranks = base - drift
        momentum = method.outer_momentum * momentum + drift
        if method.outer == "nesterov":
            drift = drift + method.outer_momentum * momentum
        base = base - method.outer_lr * drift
        for p, snapshot in zip(ranks, taken, strict=True):
            p.data += method.mix * (mean_of_ranks - snapshot) + base - mean_of_ranks
        for key in ("exp_avg", "exp_avg_sq"):
            if method.state == "average":
                held = [o.state[p][key] for o, p in zip(optimizers, ranks, strict=True)]
                mean = sum(w / sum(raw) * h for w, h in zip(raw, held, strict=True))
                for into in held:
                    into.copy_(mean)

    done = tick = 0
    while done < BATCHES:
        tick += 1
        active = [r for r, s in enumerate(method.speeds) if tick % round(1 / s) == 0]
        active = active[: BATCHES - done]
        for place, rank in enumerate(active):
            p, optimizer = ranks[rank], optimizers[rank]
            optimizer.zero_grad()
            samples = stream[done + place][None]
            task.losses([p[None]], torch.zeros(1, 0), samples).backward()
            assert p.grad is not None
            norm = p.grad.norm()
            p.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
            optimizer.param_groups[0]["lr"] = lr * method.rate_at(
                (done + len(active) / 2) / BATCHES
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
        trained = [int(n > 0) for n in counts]
        pending = (tick, [p.detach().clone() for p in ranks], trained)
        adopt()
    return float(base @ torch.arange(1.0, SIZE + 1))


NESTEROV: dict[str, Any] = {"outer": "nesterov", "outer_lr": 0.8, "outer_momentum": 0.6}


@pytest.mark.parametrize(
    "settings",
    [
        {"fleet": "1:4", "anchor": 1},
        {"fleet": "1:4", "anchor": 2, "weights": "samples", "state": "local"},
        {"fleet": "1:1:2:4", "anchor": 1, "weights": "sqrt", **NESTEROV},
        {"fleet": "8 mixed", "anchor": 1, "lag": 2, "state": "local", **NESTEROV},
        {"fleet": "1:4", "anchor": 1, "lag": -1, "state": "local", **NESTEROV},
        {"fleet": "1:4", "anchor": 2, "optimizer": "sgd", "state": "local"},
        {"fleet": "1:1:2:4", "anchor": 2, "state": "local", "mix": 0.5},
        {"fleet": "1:1:2:4", "lag": 1, "state": "local", "mix": 0.7, **NESTEROV},
    ],
)
def test_virtual_ranks_train_as_ranks_of_torch_do(settings: dict[str, Any]) -> None:
    method = Method(**settings)
    columns = [Column(0, LR), Column(1, LR), Column(0, LR / 2)]
    found = train(Points(), method, columns, BATCHES)
    expected = [reference(method, c.seed, c.lr) for c in columns]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert len({round(value, 3) for value in found}) == 3


def test_one_device_takes_a_step_of_torch_per_batch() -> None:
    task, method = Points(), Method(optimizer="sgd")
    found = train(task, method, [Column(3, LR)], BATCHES)
    parameter = torch.nn.Parameter(task.initial(3)[0])
    optimizer = torch.optim.SGD([parameter], lr=LR, momentum=MOMENTUM)
    for index, samples in enumerate(task.stream(3, BATCHES)):
        optimizer.zero_grad()
        task.losses([parameter[None]], torch.zeros(1, 0), samples[None]).backward()
        torch.nn.utils.clip_grad_norm_([parameter], MAX_NORM)
        optimizer.param_groups[0]["lr"] = LR * method.rate_at((index + 0.5) / BATCHES)
        optimizer.step()
    assert found == pytest.approx(task.evaluate([parameter[None]], torch.zeros(1, 0)))


SAME = {"fleet": "1:1:2:4", "anchor": 1, "state": "local"}


@pytest.mark.parametrize(
    ("settings", "change", "is_same"),
    [
        (NESTEROV, {"anticipate": True}, True),
        (NESTEROV, {"anticipate": True, "lag": 2}, False),
        ({}, {"first_anchor": 1}, True),
        ({"anchor": 2}, {"first_anchor": 1}, False),
        ({}, {"last_anchor": 1}, True),
        ({"anchor": 2, **NESTEROV}, {"last_anchor": 1}, False),
        (NESTEROV, {"growth": 2.0}, False),
        ({}, {"first_sync": 0.2}, False),
        ({}, {"last_sync": 0.2}, False),
        (NESTEROV, {"fade": 0.5}, False),
        ({}, {"rewarm": 2}, False),
        ({}, {"warm_up": 0.3}, False),
        ({}, {"state": "second"}, False),
        ({}, {"top": 0.5}, False),
        ({}, {"mix": 0.5}, False),
        ({}, {"codec": "int4"}, False),
        ({}, {"outer": "slowmo", "outer_momentum": 0.5}, False),
        ({"lag": 2}, {"lag": 2, "state": "late"}, False),
        ({}, {"state": "reset"}, False),
    ],
)
def test_variants_change_what_they_should(
    settings: dict[str, Any], change: dict[str, Any], is_same: bool
) -> None:
    columns = [Column(0, LR)]
    plain = train(Points(), Method(**{**SAME, **settings}), columns, BATCHES)
    other = train(Points(), Method(**{**SAME, **settings, **change}), columns, BATCHES)
    assert math.isfinite(other[0])
    assert (other == pytest.approx(plain, rel=1e-5)) == is_same


def test_as_many_batches_in_a_step_need_as_many_fewer_steps() -> None:
    columns = [Column(0, LR)]
    once = train(Points(), Method(), columns, BATCHES)
    fourfold = train(Points(), Method(batches_per_step=4), columns, BATCHES)
    late = train(Points(), Method(batches_per_step=4, delay=2), columns, BATCHES)
    assert len({round(each[0], 3) for each in (once, fourfold, late)}) == 3


def test_nearly_all_in_common_steps_is_one_device_with_larger_steps() -> None:
    columns = [Column(0, LR), Column(1, LR)]
    fourfold = train(Points(), Method(batches_per_step=4), columns, BATCHES)
    mixed = train(Points(), Method(**SAME, first_sync=0.99), columns, BATCHES)
    assert mixed == pytest.approx(fourfold, rel=1e-3)
    single = train(Points(), Method(), columns, BATCHES)
    few = Method(**SAME, first_sync=0.99, first_batches=1)
    assert train(Points(), few, columns, BATCHES) == pytest.approx(single, rel=1e-3)


def test_the_outer_momentum_fades_to_nothing() -> None:
    method = Method(**SAME, **NESTEROV, fade=0.5)
    found = [method.momentum_at(progress) for progress in (0.0, 0.5, 0.75, 1.0)]
    assert found == pytest.approx([0.6, 0.6, 0.3, 0.0])
    assert Method(**SAME, **NESTEROV).momentum_at(1.0) == 0.6


def test_windows_grow_as_the_learning_rate_falls() -> None:
    method = Method(fleet="1:4", anchor=2, growth=2.0, warm_up=0.1)
    found = [method.anchor_at(progress) for progress in (0.01, 0.1, 0.55, 0.9, 1.0)]
    assert found == [2, 2, 8, 40, 40]
    assert Method(fleet="1:4", anchor=2).anchor_at(0.9) == 2


def test_gradients_that_travel_whole_are_the_mean() -> None:
    columns = [Column(0, LR), Column(1, LR)]
    whole = train(Points(), Method(batches_per_step=4), columns, BATCHES)
    method = Method(batches_per_step=4, top=1.0 - 1e-9)
    assert train(Points(), method, columns, BATCHES) == pytest.approx(whole, rel=1e-5)


def test_what_is_not_sent_of_a_gradient_is_sent_later() -> None:
    task = Points()
    held = Replicas(task, [Column(0, LR)], 1, "sgd")
    compressor = Compressor(held, Method(batches_per_step=2, top=0.5))
    samples = task.stream(0, 2)[:, None]
    whole = torch.zeros(SIZE)
    for batch in samples:
        held.gradients([0], batch[None])
        whole += held.grad[0, 0] / 2
    arrived = torch.zeros(SIZE)
    for _ in range(40):
        compressor.gradients(samples)
        arrived += held.grad[0, 0]
    torch.testing.assert_close(arrived / 40, whole, rtol=0.2, atol=0.2)
    compressor.gradients(samples)
    assert not torch.allclose(held.grad[0, 0], whole, rtol=1e-3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fleet": "2:3"}, "unknown fleet '2:3'"),
        ({"outer_lr": 0.7}, "plain averaging has rate 1"),
        ({"state": "late"}, "needs a lag"),
        ({"first_anchor": 2}, "first anchor 2 is longer than"),
        ({"last_anchor": 2}, "last anchor 2 is longer than"),
        ({"first_sync": 0.6, "last_sync": 0.4}, "no part of the run is left"),
        ({"first_batches": 1}, "needs common steps at the beginning only"),
        ({"first_batches": 1, "first_sync": 0.1, "last_sync": 0.1}, "beginning only"),
        ({"state": "second", "lag": 3}, "cannot come late"),
        ({"state": "average", "lag": 3}, "cannot come late"),
        ({"mix": 0.5, "weights": "samples"}, "needs equal weights"),
        ({"mix": 0.5, "top": 0.2}, "needs equal weights, whole drifts"),
    ],
)
def test_methods_that_mean_nothing_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Method(**settings)


def test_a_study_finds_a_learning_rate_and_resumes(tmp_path: Path) -> None:
    setting = Setting("points", BATCHES, Method(fleet="1:4", anchor=3))
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
    rates = [0.0625, 0.1, 0.16, 0.256, 0.41]
    assert asked == [(lr, 0) for lr in rates] + [(0.256, 1)]
    assert results.best(setting, (0,)) == 0.256
    assert results.best(setting, (0, 1)) == 0.256
    assert results.best(setting, (0,), (0.1, 0.41)) == 0.41
    assert results.best(setting, (5,)) is None


def test_runs_that_diverge_are_not_the_best(tmp_path: Path) -> None:
    setting = Setting("points", BATCHES, Method())
    results = Results(tmp_path / "runs.jsonl")
    for lr, value in ((0.1, 2.0), (0.2, math.nan), (0.3, 3.0)):
        results.add(setting, lr, 0, value)
    results.load()
    assert results.best(setting, (0,)) == 0.1


def test_samples_for_a_loss_are_read_off_the_curve() -> None:
    curve = {1000: 3.0, 2000: 2.0, 8000: 1.0}
    for length, loss in curve.items():
        assert samples_for(loss, curve) == pytest.approx(length)
    assert samples_for(1.5, curve) == pytest.approx(4000)
    assert samples_for(4.0, curve) == pytest.approx(500)
    assert samples_for(0.5, curve) == pytest.approx(16_000)
    with pytest.raises(ValueError, match="at least two lengths"):
        samples_for(1.0, {1000: 3.0})


def test_settings_are_compared_seed_by_seed(tmp_path: Path) -> None:
    results = Results(tmp_path / "runs.jsonl")
    one = Setting("points", BATCHES, Method(fleet="1:4"))
    other = Setting("points", BATCHES, Method(fleet="1:4", lag=1, state="local"))
    for seed, value in enumerate((1.0, 2.0, 3.0, 5.0, 9.0)):
        results.add(one, 0.1, seed, value)
        results.add(one, 0.2, seed, value + 3.0)
    for seed, value in enumerate((3.0, 3.0, 5.0, 8.0)):
        results.add(other, 0.4, seed, value)
    seeds, mean, half = difference(other, one, results)
    assert (seeds, mean) == (4, pytest.approx(2.0))
    assert half == pytest.approx(interval([2.0, 1.0, 2.0, 3.0]))
    assert "| 4 | +2.0000 ± 1.2990 |" in differences_table([other], one, results)
    with pytest.raises(ValueError, match="is common"):
        difference(Setting("points", 1, Method()), one, results)


def test_intervals_are_students() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(interval([1.0]))
    with pytest.raises(ValueError, match="at most 11 values"):
        interval([0.0] * 12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one device"),
        ({"batches_per_step": 8, "delay": 1}, "8 batches a step, 1 steps late"),
        (
            {"batches_per_step": 8, "top": 0.01, "codec": "int8", "warm_up": 0.2},
            "8 batches a step, largest 1 %, int8, warm-up 20 %",
        ),
        (
            {"fleet": "1:4", "anchor": 5, "last_anchor": 1, "first_sync": 0.1},
            "1:4, anchor 5, at last 1, first 10 % sync, blocking, state average, "
            "average",
        ),
        (
            {"fleet": "1:4", "first_sync": 0.2, "first_batches": 1},
            "1:4, anchor 1, first 20 % sync, steps of one batch, blocking, "
            "state average, average",
        ),
        (
            {"fleet": "1:4", "first_sync": 0.2, "first_batches": 3},
            "1:4, anchor 1, first 20 % sync, steps of 3 batches, blocking, "
            "state average, average",
        ),
        (
            {
                "fleet": "1:4",
                "state": "second",
                "fade": 0.2,
                "rewarm": 4,
                "growth": 2.0,
            },
            "1:4, anchor 1, growing with power 2, blocking, state second moment "
            "average, average, momentum fades over 20 %, rate rises over 4 ticks",
        ),
        (
            {"fleet": "1:4", "lag": -1, "state": "late", **NESTEROV, "codec": "int4"},
            "1:4, anchor 1, a window late, state late, Nesterov (0.8, 0.6), int4",
        ),
        (
            {"fleet": "8 mixed", "anchor": 5, "weights": "sqrt", "top": 0.05},
            "8 mixed, anchor 5, blocking, state average, average, weights sqrt, "
            "largest 5 %",
        ),
    ],
)
def test_methods_are_named_in_words(settings: dict[str, Any], words: str) -> None:
    assert describe(Method(**settings)) == words


def test_a_replica_of_digits_is_torchs_batch_norm() -> None:
    task = Digits()
    start, held = task.initial(2)
    parameters, buffers = task.views(start[None]), held[None].clone()
    samples = task.stream(2, 3)
    one = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    flat = [*parameters[:6]]
    for into, value in zip(one.parameters(), flat, strict=True):
        into.data.copy_(value[0])
    images, labels = task._train
    for batch in samples:
        found = task.losses(parameters, buffers, batch[None])
        inside = one(images[batch][:, None])
        logits = inside @ parameters[6][0] + parameters[7][0]
        expected = nn.functional.cross_entropy(logits, labels[batch])
        assert float(found) == pytest.approx(expected.item(), rel=1e-4)
    running = [one[1].running_mean, one[1].running_var]
    running += [one[4].running_mean, one[4].running_var]
    torch.testing.assert_close(buffers[0], torch.cat(running), rtol=1e-4, atol=1e-5)
    error = task.evaluate(parameters, buffers)[0]
    one.eval()
    images, labels = task._eval
    with torch.no_grad():
        logits = one(images[:, None]) @ parameters[6][0] + parameters[7][0]
    wrong = (logits.argmax(-1) != labels).float().mean()
    assert error == pytest.approx(100.0 * float(wrong), abs=0.3)
