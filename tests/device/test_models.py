"""Models and optimizers train on the device as on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.device import KIND, NAME, delays, extension, has_streams

# Other devices draw other numbers, and round in their own way.
IS_EXACT = KIND in (NAME, "cpu")
SLACK = 1 if IS_EXACT else 100


def near(expected: list[float], rel: float) -> Any:
    return pytest.approx(expected, rel=rel * SLACK, abs=rel * SLACK / 10)


Optimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


class First(nn.Module):
    """Output of a recurrent module without its state."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(batch)[0]
        return outputs


def mlp() -> nn.Module:
    return nn.Sequential(
        *[
            nn.Linear(6, 16, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(0.3 * IS_EXACT),
        ],
        *[nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)],
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()],
        *[nn.MaxPool2d(2), nn.ConvTranspose2d(8, 6, 3, groups=2), nn.GroupNorm(2, 6)],
        *[nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)],
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        16, 2, 32, batch_first=True, dropout=0.1 * IS_EXACT
    )
    return nn.Sequential(nn.Embedding(11, 16), layer)


def lstm() -> nn.Module:
    return First(nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True))


SERIES = torch.linspace(-1, 1, 60).reshape(3, 5, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "mlp": (mlp, torch.linspace(-1, 1, 48).reshape(8, 6)),
    "convolutions": (convolutions, torch.linspace(-1, 1, 768).reshape(4, 3, 8, 8)),
    "transformer": (transformer, torch.arange(10).reshape(2, 5)),
    "lstm": (lstm, SERIES),
    "lstm without bias": (lambda: First(nn.LSTM(4, 5, bias=False)), SERIES),
    "gru": (lambda: First(nn.GRU(4, 5, num_layers=2, dropout=0.2 * IS_EXACT)), SERIES),
    "lstm cell": (lambda: First(nn.LSTMCell(4, 5)), SERIES[0]),
}
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "muon": lambda p: torch.optim.Muon([each for each in p if each.ndim == 2], 0.01),
}


def losses(
    device: torch.device | str,
    model: str = "mlp",
    optimizer: str = "sgd",
    dtype: torch.dtype | None = None,
) -> list[float]:
    """Losses of three steps, the parameters' mean after them, and the buffers'."""
    make, batch = MODELS[model]
    torch.manual_seed(0)
    trained = make().to(device)
    stepping = OPTIMIZERS[optimizer](trained.parameters())
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        name = torch.device(device).type
        with torch.autocast(name, dtype=dtype, enabled=dtype is not None):
            loss = trained(batch.to(device)).float().square().mean()
        stepping.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        stepping.step()
        found.append(loss.item())
    state = trained.state_dict().values()
    return [*found, *(each.cpu().double().mean().item() for each in state)]


@pytest.mark.parametrize("model", MODELS)
def test_model_equals_cpu(device: torch.device, model: str) -> None:
    expected = losses("cpu", model)
    assert losses(device, model) == near(expected, 1e-5)


def test_delays_change_no_number(device: torch.device) -> None:
    expected = losses(device)
    with delays("random", longest_us=200, seed=5):
        assert losses(device) == expected


def test_evaluation_equals_cpu(device: torch.device) -> None:
    model, (_, batch) = mlp().eval(), MODELS["mlp"]
    with torch.no_grad():
        expected = model(batch)
        found = model.to(device)(batch.to(device)).cpu()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", ["mse_loss", "huber_loss"])
def test_loss_equals_cpu(device: torch.device, loss: str, reduction: str) -> None:
    found = []
    for place in ("cpu", device):
        x = torch.linspace(-2, 2, 12, device=place, requires_grad=True)
        y = torch.linspace(0.1, 1, 12, device=place)
        value = getattr(nn.functional, loss)(x, y, reduction=reduction)
        value.sum().backward()
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_equals_cpu(device: torch.device, optimizer: str) -> None:
    expected = losses("cpu", "mlp", optimizer)
    found = losses(device, "mlp", optimizer)
    assert found == near(expected, 1e-4)


@pytest.mark.parametrize("model", ["mlp", "convolutions"])
def test_bfloat16_autocast_equals_cpu(device: torch.device, model: str) -> None:
    expected = losses("cpu", model, dtype=torch.bfloat16)
    found = losses(device, model, dtype=torch.bfloat16)
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert found != losses(device, model)


def test_autocast_dtypes(device: torch.device) -> None:
    layer, batch = nn.Linear(4, 4).to(device), torch.ones(2, 4, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(batch).dtype == torch.bfloat16
        loss = nn.functional.mse_loss(layer(batch), batch)
        assert loss.dtype == torch.float32


def test_grad_scaler_skips_a_step_of_infinities(device: torch.device) -> None:
    layer = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=1)
    kept = layer.weight.tolist()
    for factor, scale in ((float("inf"), 4.0), (1.0, 8.0)):
        optimizer.zero_grad()
        loss = layer(torch.full((2, 4), factor, device=device)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert (layer.weight.tolist() == kept) == (factor != 1.0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_pins_batches(device: torch.device, workers: int) -> None:
    has_streams()
    dataset = TensorDataset(torch.arange(64.0))
    loader = DataLoader(dataset, batch_size=4, num_workers=workers, pin_memory=True)
    total = torch.zeros((), device=device)
    for (batch,) in loader:
        assert batch.is_pinned()
        total += batch.to(device, non_blocking=True).sum()
    assert float(total) == sum(range(64))


def test_activation_checkpointing_draws_the_same_dropout(device: torch.device) -> None:
    model, batch = nn.Dropout(0.5), torch.ones(100, device=device, requires_grad=True)
    output = torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False)
    output.sum().backward()
    assert batch.grad is not None
    assert torch.equal(batch.grad, output.detach())


def test_random_numbers_are_the_device_s_own(device: torch.device) -> None:
    assert extension()
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    torch.randn(100)
    assert torch.equal(torch.randn(4, device=device).cpu(), expected)
    with torch.random.fork_rng(devices=[0], device_type=device.type):
        inside = torch.randn(4, device=device)
    assert torch.equal(torch.randn(4, device=device), inside)
    own = torch.Generator(device).manual_seed(3)
    assert torch.equal(torch.randn(4, generator=own, device=device).cpu(), expected)


def test_state_is_saved_and_loaded(device: torch.device, tmp_path: object) -> None:
    state = nn.Linear(3, 3).to(device).state_dict()
    torch.save(state, f"{tmp_path}/state.pt")
    same = torch.load(f"{tmp_path}/state.pt")
    assert same["weight"].device.type == device.type
    assert torch.equal(same["weight"], state["weight"])
    on_host = torch.load(f"{tmp_path}/state.pt", map_location="cpu")
    assert torch.equal(on_host["weight"], state["weight"].cpu())


def test_sparse_gradients_are_refused_by_name(device: torch.device) -> None:
    assert extension()
    table = nn.Embedding(5, 3, sparse=True).to(device)
    loss = table(torch.tensor([1, 2], device=device)).sum()
    with pytest.raises(NotImplementedError, match="'Sparsetdev' backend"):
        loss.backward()
