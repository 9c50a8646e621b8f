"""One device: nothing is wrapped, and nothing is paid."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import elche
from elche.config import RunConfig
from elche.errors import ConfigError
from elche.runtime.rank_settings import check_shared, describe
from elche.runtime.training import Training
from elche.runtime.watch.model_sums import ModelSums

pytestmark = pytest.mark.usefixtures("plain_environment")

SYNC = RunConfig(policy="sync")
SGD = torch.optim.SGD([nn.Parameter(torch.zeros(1))])


def _parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 1)


def test_nothing_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    parts = _parts()
    returned = elche.setup(*parts)
    assert returned[0] is parts[0]
    assert returned[1] is parts[1]
    assert returned[2].dataset is parts[2].dataset
    assert len(returned[2]) == len(parts[2])
    assert not parts[0]._forward_hooks
    assert all(not p._post_accumulate_grad_hooks for p in parts[0].parameters())
    assert capsys.readouterr().err == "elche: CPU\n"
    assert (elche.rank(), elche.world_size(), elche.is_main_process()) == (0, 1, True)
    elche.barrier()


def test_a_run_of_one_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no thread, no socket."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("one device needs none of this")

    for owner, name in ((socket, "socket"), (subprocess, "Popen"), (os, "fork")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(ModelSums, "begin", refuse)
    threads = set(threading.enumerate())
    model, optimizer, loader = elche.setup(*_parts(), seed=3)
    for (x,) in loader:
        loss = model(x).sum()
        loss.backward()
        elche.log_scalar("loss", loss)
        optimizer.step()
        assert set(threading.enumerate()) <= threads  # earlier ones may end
    assert elche.epoch_metrics().samples == 64


def test_a_step_adds_a_handful_of_calls() -> None:
    """Counted, not timed: `benchmarks/single_device.py` says what they take."""

    def calls(model: nn.Module, optimizer: Any, loader: Any) -> int:
        count = 0

        def seen(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(seen)
        try:
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            sys.setprofile(None)
        return count

    plain, ours = _parts(), elche.setup(*_parts())
    calls(*plain), calls(*ours)
    assert 0 < calls(*ours) - calls(*plain) <= 6 * 64 + 128  # and some an epoch


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "m"}, "expected model to be a torch.nn.Module"),
        ({"optimizer": 3}, "expected a torch.optim.Optimizer"),
        ({"optimizer": []}, r"or several in a list, got \[\]"),
        ({"optimizer": [SGD, 3]}, r"or several in a list, got \[SGD"),
        ({"optimizer": [SGD, SGD]}, "an optimizer is listed twice"),
        ({"optimizer": SGD}, "holds none of the model's parameters"),
        ({"loader": [1]}, "expected a torch.utils.data.DataLoader"),
        ({"config": {"seed": 1}}, r"expected config to be an elche\.RunConfig, got \{"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], says: str) -> None:
    model, optimizer, loader = _parts()
    given = {"model": model, "optimizer": optimizer, "loader": loader} | change
    with pytest.raises(ConfigError, match=says):
        elche.setup(**given)


def test_unknown_option() -> None:
    says = r"unknown option 'polcy' of RunConfig; .*known are: codec"
    with pytest.raises(ConfigError, match=says):
        elche.setup(*_parts(), polcy="sync")


def test_progress_counts_samples() -> None:
    """Once: 0.0 for ever, so a schedule that follows it stood still."""
    model, optimizer, _ = _parts()
    data = DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=4)
    _, _, loader = elche.setup(model, optimizer, data)
    seen = [elche.progress_samples() for _ in range(2) for _ in loader]
    assert seen == [0, 4, 8, 10, 14, 18]
    assert elche.progress_samples() == 20


def test_every_optimizer_of_a_list_is_compared_between_ranks() -> None:
    model, sgd, loader = _parts()
    adam = torch.optim.Adam([model.bias], lr=0.3)
    returned = elche.setup(model, [sgd, adam], loader)
    assert returned[1] == [sgd, adam]
    training = Training(config=SYNC, model=model, optimizers=[sgd, adam], loader=loader)
    found = describe(training, None).optimizer
    assert (found["class"], found["lr"]) == ("SGD", 0.1)
    assert (found["2.class"], found["2.lr"]) == ("Adam", 0.3)
    stranger = [sgd, torch.optim.Adam([nn.Parameter(torch.zeros(1))])]
    with pytest.raises(ConfigError, match="Adam holds none of the model's"):
        elche.setup(model, stranger, loader)


def test_an_optimizer_with_a_quantised_state_is_refused_by_name() -> None:
    model, _, loader = _parts()
    space = {"__module__": "bitsandbytes.optim.adamw"}
    eight_bits = type("AdamW8bit", (torch.optim.AdamW,), space)
    with pytest.raises(ConfigError, match="AdamW8bit of bitsandbytes quantises its"):
        check_shared(model, [eight_bits(model.parameters())], loader, SYNC)


def test_tensors_that_cannot_be_shared() -> None:
    model, optimizer, loader = _parts()
    model.register_buffer("bad", torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=r"^bad has elements that share memory"):
        check_shared(model, [optimizer], loader, SYNC)


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="0: sparse gradients cannot be reduced"):
        check_shared(model, [optimizer], _parts()[2], SYNC)


def test_the_state_of_a_run_is_asked_for_between_epochs() -> None:
    _, _, loader = elche.setup(*_parts())
    state = elche.state_dict()
    for _ in loader:
        with pytest.raises(ConfigError, match="between epochs"):
            elche.state_dict()
        with pytest.raises(ConfigError, match="between epochs"):
            elche.load_state_dict(state)
    assert elche.state_dict()["samples"] > 0


class Endless(IterableDataset[torch.Tensor]):
    """A stream of nine numbers, of unknown length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(9.0))


@pytest.mark.parametrize("kind", ["shuffled", "seed", "stream"])
def test_steps_are_a_plain_loops_first_batches_over_epochs(kind: str) -> None:
    def loader() -> DataLoader[Any]:
        order = torch.Generator().manual_seed(5)
        data: Any = Endless() if kind == "stream" else torch.arange(9.0)
        return DataLoader(data, 2, shuffle=kind != "stream", generator=order)

    plain, expected = loader(), []
    while len(expected) < 13:
        expected += [batch.tolist() for batch in plain]
    model, optimizer, _ = _parts()
    seed = 3 if kind == "seed" else None
    *_, shared = elche.setup(model, optimizer, loader(), seed=seed)
    found = []
    for step, batch in enumerate(shared.steps(13)):
        assert elche.progress_steps() == step
        found.append(batch.tolist())
    assert found == expected[:13]
    assert elche.progress_steps() == 13.0
    assert list(shared.steps(13)) == []
    assert len(list(shared.steps(14))) == 1
    for wrong in (-1, 2.0, True):
        with pytest.raises(ConfigError, match="expected the number of steps to be"):
            shared.steps(wrong)
    elche.shutdown()
