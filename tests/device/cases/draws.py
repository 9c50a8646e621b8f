"""Training loops drawn from seeds: `draws.py FOLDER SEED...` trains them as ranks."""

from __future__ import annotations

import io
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.features.feature import PlainTorch
from elche.config import DebugConfig
from tests import device as test_device

CLASSES = 4


class First(nn.Module):
    """Output of a recurrent module without its state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(batch)[0]
        return outputs


MODELS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "mlp": (
        (12,),
        lambda: nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 4)),
    ),
    "convolution": (
        (2, 6, 6),
        lambda: nn.Sequential(
            *[nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2)],
            *[nn.Flatten(), nn.Linear(24, 4)],
        ),
    ),
    "transformer": (
        (5, 8),
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            *[nn.Flatten(), nn.Linear(40, 4)],
        ),
    ),
    "lstm": (
        (5, 6),
        lambda: nn.Sequential(
            *[First(nn.LSTM(6, 8, batch_first=True)), nn.Flatten(), nn.Linear(40, 4)]
        ),
    ),
    "batch norm": (
        (12,),
        lambda: nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)),
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 3e-3, eps=1e-4),
    "fused": lambda p: torch.optim.AdamW(p, 3e-3, eps=1e-4, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-4, foreach=False),
}


class Loop(NamedTuple):
    """What a seed draws; as its repr a failure shows it."""

    model: str
    optimizer: str
    samples: int
    batch_size: int
    accumulation: int
    is_pinned: bool
    dtype: torch.dtype
    restored: bool
    evaluates: bool
    policy: str
    pattern: str
    longest_us: int
    kernel_us: tuple[float, float]


def drawn(seed: int, *, policies: bool = False) -> Loop:
    """The loop of a seed, on ranks or on one device."""
    draw = random.Random(seed)
    pick = draw.choice
    model = pick([*MODELS][: 4 if policies else None])
    dtypes = [torch.float32] * 2 + [torch.bfloat16, torch.float16] * (model != "lstm")
    return Loop(
        model=model,
        optimizer=pick([*OPTIMIZERS]),
        samples=draw.randint(40, 120),
        batch_size=draw.randint(4, 16),
        accumulation=1 if policies else pick([1, 1, 2, 3]),
        is_pinned=pick([True, False]),
        dtype=pick(dtypes),
        restored=pick([True, False]),
        evaluates=pick([True, False]),
        policy=pick(["sync", "cadence", "async", "auto"]) if policies else "sync",
        pattern=pick([*test_device.DELAYS]),
        longest_us=pick([50, 500, 2000]),
        kernel_us=(pick([0.0, 0.0, 20.0]), pick([0.0, 20.0, 100.0])),
    )


def train(seed: int, loop: Loop, elche: Any = PlainTorch) -> dict[str, Any]:
    """Trains two epochs, with new objects between them if the loop is restored."""
    torch.manual_seed(seed)
    shape, make = MODELS[loop.model]
    x = torch.randn(loop.samples, *shape)
    data = TensorDataset(x, x.flatten(1).sum(1).mul(4).long() % CLASSES)
    options: dict[str, Any] = {}
    if elche is not PlainTorch:
        is_windowed = loop.policy in ("cadence", "async")
        debug = DebugConfig(deterministic=is_windowed)
        options = {"policy": loop.policy, "epochs": 2, "debug": debug}
    device, seen, scores, saved = elche.device(), 0, [], io.BytesIO()
    is_amp = loop.dtype != torch.float32
    scaler = torch.amp.GradScaler(
        device.type, 2.0**8, enabled=loop.dtype == torch.float16
    )
    for epoch in range(2):
        if epoch == 0 or loop.restored:
            torch.manual_seed(seed + epoch)
            model: Any = make()
            optimizer: Any = OPTIMIZERS[loop.optimizer](model.parameters())
            loader: Any = DataLoader(
                *(data, loop.batch_size, True),
                pin_memory=loop.is_pinned,
                drop_last=loop.model == "batch norm",
            )
            if epoch:
                saved.seek(0)
                states = torch.load(saved, weights_only=True, map_location="cpu")
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            model, optimizer, loader = elche.setup(model, optimizer, loader, **options)
        for index, (x, y) in enumerate(loader):
            with torch.autocast(x.device.type, loop.dtype, enabled=is_amp):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss / loop.accumulation).backward()
            if (index + 1) % loop.accumulation == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            # A rank without a share in a small last batch gets a sample of weight 0.
            seen += len(x) if elche is PlainTorch or elche.batch_weight() else 0
        if loop.evaluates:
            model.eval()
            with torch.no_grad():
                held_out = data.tensors[0].to(device, non_blocking=True)
                scores.append(model(held_out).float().mean().item())
            model.train()
        torch.save((model.state_dict(), optimizer.state_dict()), saved)
    state = {name: each.cpu() for name, each in model.state_dict().items()}
    return {"state": state, "samples": seen, "scores": scores}


def main(folder: str, *seeds: str) -> None:
    import elche

    torch.set_num_threads(1)
    for seed in map(int, seeds):
        loop = drawn(seed, policies=True)
        device = elche.device()
        if device.type != "cpu":
            test_device.set_speed(device.index, loop.kernel_us[elche.rank()])
            test_device.set_delays(loop.pattern, loop.longest_us, seed + 1)
        found = train(seed, loop, elche)
        torch.save(found, Path(folder, f"{seed}.{os.environ['RANK']}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
