"""What is refused of saving and resuming, on one device, and what is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.checkpoint.capture import random_state, restore_random
from elche.checkpoint.contents import Contents
from elche.checkpoint.keeper import CheckpointConfig
from elche.checkpoint.store import CheckpointStore
from elche.checkpoint.writer import CheckpointWriter
from elche.coordination.accounts.copy_updates import DueUpdates
from elche.devices import choice
from elche.devices import random_state as devices
from elche.errors import ConfigError, MismatchError
from elche.runtime.process.stop_signals import StopRequest
from elche.session.process import process
from tests.harness import printing


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    elche.shutdown()


def set_up(width: int = 4, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    data = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=4)
    return elche.setup(model, torch.optim.Adam(model.parameters()), data, **more)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path) -> None:
    model, optimizer, loader = set_up()
    for _ in elche.epochs(1):
        for _ in loader:
            step(model, optimizer)
        elche.save(folder)
    elche.shutdown()


def test_a_file_and_a_damaged_folder_are_said_to_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once without a word, the first one."""
    saved(tmp_path)
    (manifest,) = tmp_path.glob("*/manifest.json")
    manifest.write_text("{}")
    for path in (manifest, tmp_path):
        set_up()
        assert not elche.resume(path)
        assert f"{path} has no complete checkpoint: the run starts" in caplog.text
        elche.shutdown()
    caplog.clear()
    set_up()
    assert not elche.resume(tmp_path / "none")
    assert not caplog.text


def test_a_script_that_ends_has_written_its_last_checkpoint(tmp_path: Path) -> None:
    # Once: the thread that writes it ended with the process, on one device.
    script = """
import sys, torch, elche
model = torch.nn.Linear(2000, 1000)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.ones(2, 2000))
model, optimizer, loader = elche.setup(model, optimizer, loader)
for _ in elche.epochs(1):
    for x in loader:
        model(x).sum().backward()
        optimizer.step()
    elche.save(sys.argv[1])
"""
    done = printing.ended("-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert CheckpointStore(tmp_path).newest() is not None


def test_between_epochs_the_next_one_follows(tmp_path: Path) -> None:
    saved(tmp_path)
    model, _, loader = set_up()
    assert elche.resume(str(tmp_path))
    assert elche.progress_steps() == 3
    assert [(epoch, len(list(loader))) for epoch in elche.epochs(3)] == [(1, 3), (2, 3)]
    plain = load_file(next(tmp_path.glob("*/model.safetensors")))
    assert plain.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name])


def test_resume_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path))
    set_up()
    assert list(elche.epochs(3)) == [1, 2]


def test_who_does_not_resume_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ELCHE_RESUME", str(tmp_path))
    _, _, loader = set_up()
    for _ in range(2):
        list(loader)
    assert caplog.text.count(f"does not resume from {tmp_path} and starts from") == 1
    caplog.clear()
    _, _, loader = set_up()
    for _ in elche.epochs(1):
        list(loader)
    assert not caplog.text


def test_the_last_checkpoint_is_made_once(tmp_path: Path) -> None:
    set_up()
    keeper = process.checkpoints
    keeper._stops = StopRequest()  # as a loop that ends by itself gives it
    keeper.configure(CheckpointConfig(folder=tmp_path))
    keeper._due_at_s = 0.0
    keeper.cut(is_end=True)
    keeper._writers[tmp_path].wait(60.0)
    assert not keeper.wants_cut()  # the next one is due later
    keeper.end()
    elche.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]


def contents_of(rank: int, number: int, *, is_common: bool) -> Contents:
    """What a rank holds, with this number in all of it."""
    torch.manual_seed(number)
    parts, kept = cast(Any, process.checkpoints._run).parts(), DueUpdates()
    parts.optimizers[0].param_groups[0]["lr"] = number
    group = dict.fromkeys(("momentum", "base", "residual"), number)
    state = {"averaging": {"groups": [group]}}
    parts = replace(parts, is_common=is_common, state=state)
    kept.load_state_dict([number, 1])  # a rank's own: it changes with no model
    return Contents(rank=rank, parts=parts, schedulers=[], registered={"kept": kept})


@pytest.mark.parametrize(
    ("was_common", "is_common"), [(True, True), (False, False), (False, True)]
)
def test_a_rank_gets_what_is_common_and_its_own(
    was_common: bool, is_common: bool, tmp_path: Path
) -> None:
    """Rank 2 was not there: it has no residual and its own seed, else rank 0's."""
    set_up()
    store = CheckpointStore(tmp_path)
    for rank in (1, 0):
        held = contents_of(rank, rank, is_common=was_common).capture({})
        writer = CheckpointWriter(store, rank, 2, "run", deadline_s=60.0)
        writer.begin("checkpoint-00000001", held, {})
        writer.close(60.0)
    found, loaded = store.newest(), []
    for rank in range(3):
        new = contents_of(rank, 9, is_common=is_common)
        (group,) = new.load(cast(Any, found))["run"]["averaging"]["groups"]
        assert (group["momentum"], group["base"]) == (0, 0)
        (rates,) = new.parts.optimizers[0].param_groups
        own = (
            new.registered["kept"].state_dict()[0],
            group["residual"],
            torch.initial_seed(),
        )
        loaded.append((rates["lr"], *own))
    rate = 0 if is_common else 1
    assert loaded == [(0, 0, 0, 0), (rate, 1, 1, 1), (0, 0, None, 9)]


def test_the_second_of_a_pair_of_normal_numbers_is_kept() -> None:
    random.gauss(0.0, 1.0)
    state, second = random_state({}), random.gauss(0.0, 1.0)
    restore_random(state, {})
    assert random.gauss(0.0, 1.0) == second


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_random_states_of_accelerators_are_restored_on_their_type(
    monkeypatch: pytest.MonkeyPatch, is_old: bool, kind: str
) -> None:
    """Files from before 0.1 name no type: theirs is CUDA's."""
    device, given, restored = torch.device(kind, 1), torch.arange(3), list[Any]()
    monkeypatch.setattr(choice, "is_started", lambda: True)
    monkeypatch.setattr(choice, "current_device", lambda: device)
    monkeypatch.setattr(choice, "kind", lambda: "cuda")
    monkeypatch.setattr(devices, "state_of", lambda _: given)
    monkeypatch.setattr(devices, "restore", lambda *told: restored.append(told))
    state = random_state({})
    assert state["device"] == {"type": "cuda", "state": given}
    if is_old:
        state["cuda"] = state.pop("device")["state"]
    monkeypatch.setattr(choice, "kind", lambda: kind)
    restore_random(state, {})
    assert restored == [(device, given)] * (kind == "cuda")
    if is_old:
        restore_random({**state, "cuda": None}, {})  # of a machine without one
        assert len(restored) == (kind == "cuda")


def test_a_loop_that_breaks_where_it_saves(tmp_path: Path) -> None:
    """The epoch is over: the checkpoint is made before the next one."""
    _, _, loader = set_up()
    for _ in elche.epochs(2):
        for _ in loader:
            elche.save(tmp_path)
            break
    elche.shutdown()
    _, _, loader = set_up()
    assert elche.resume(tmp_path)
    assert list(elche.epochs(3)) == [2]


def test_an_epoch_of_two_passes_goes_on_in_the_second(tmp_path: Path) -> None:
    _, _, loader = set_up()
    for _ in elche.epochs(1):
        for number in range(2):
            for at, _ in enumerate(loader):
                if (number, at) == (1, 0):
                    elche.save(tmp_path)
    elche.shutdown()
    _, _, loader = set_up()
    assert elche.resume(tmp_path)
    assert list(elche.epochs(1)) == [0]
    elche.shutdown()
    _, _, loader = set_up()
    elche.resume(tmp_path)
    passes = [[len(list(loader)), len(list(loader))] for _ in elche.epochs(2)]
    assert passes == [[0, 2], [3, 3]]
    # Once: on one device the pass that was left out had a number of its own.
    assert elche.epoch_metrics().epoch == 3
    assert elche.progress_steps() == 12.0


def two_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon([model[1].weight]),
        torch.optim.Adam([*model[0].parameters(), model[1].bias]),
    ]
    data = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=4)
    return elche.setup(model, optimizers, data)


def test_all_optimizers_of_a_list_are_resumed(tmp_path: Path) -> None:
    model, optimizers, loader = two_optimizers()
    for _ in elche.epochs(1):
        for _ in loader:
            step(model, *optimizers)
        elche.save(tmp_path)
    elche.shutdown()
    _, again, _ = two_optimizers()
    assert elche.resume(tmp_path)
    for one, other in zip(optimizers, again, strict=True):
        kept, found = one.state_dict()["state"], other.state_dict()["state"]
        assert kept.keys() == found.keys() != set()
        for at, state in kept.items():
            for name, value in state.items():
                assert torch.equal(value, found[at][name])


def other_model(folder: Path) -> None:
    set_up(width=5)
    elche.resume(folder)


def others_registered(folder: Path) -> None:
    set_up()
    elche.register_for_checkpointing(ema=(ema := nn.Linear(1, 1)))
    elche.register_for_checkpointing(ema=ema, more=nn.Linear(1, 1))
    elche.resume(folder)


def another_scheduler(folder: Path) -> None:
    _, optimizer, _ = set_up()
    elche.follow(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    elche.resume(folder)


def too_late(folder: Path) -> None:
    _, _, loader = set_up()
    list(loader)
    elche.resume(folder)


def scheduled(folder: Path) -> None:
    _, optimizer, _ = set_up()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elche.save(folder)


def second_optimizer(folder: Path) -> None:
    model, optimizer, loader = set_up()
    other = torch.optim.SGD(model[1].parameters())  # type: ignore[index]
    for _ in elche.epochs(1):
        for _ in loader:
            step(model, optimizer, other)
        elche.save(folder)


def inside_a_plain_loop(folder: Path) -> None:
    _, _, loader = set_up()
    for _ in loader:
        elche.save(folder)


def no_state(folder: Path) -> None:
    set_up()
    elche.register_for_checkpointing(folder)


def twice_as(folder: Path) -> None:
    set_up()
    elche.register_for_checkpointing(a=nn.Linear(1, 1))
    elche.register_for_checkpointing(a=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (other_model, MismatchError, "does not fit the model of this script"),
        (
            others_registered,
            MismatchError,
            r"this script has registered \['ema', 'more'\]",
        ),
        (another_scheduler, MismatchError, "holds 0 schedulers, but this script"),
        (too_late, ConfigError, "before the first epoch, got it after 1"),
        (scheduled, ConfigError, "a scheduler sets the learning rate of Adam"),
        (second_optimizer, ConfigError, "SGD also steps the model, but elche"),
        (inside_a_plain_loop, ConfigError, "cannot record the rest of the"),
        (no_state, ConfigError, r"expected object 0 to have state_dict\(\)"),
        (twice_as, ConfigError, "two objects are registered as 'a'"),
        (lambda folder: elche.save(folder), ConfigError, r"elche.save\(\) needs a run"),
        (
            lambda folder: elche.epochs(-1),
            ConfigError,
            "number of epochs to be an int",
        ),
        (
            lambda folder: set_up() and elche.save_every(folder, every_s=0.0),
            ConfigError,
            "expected every_s to be a positive finite number, got 0.0",
        ),
        (
            lambda folder: set_up() and elche.save_every(folder, keep=0),
            ConfigError,
            "expected keep to be an int >= 1, got 0",
        ),
    ],
)
def test_what_is_refused(
    act: Callable[[Path], Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    with pytest.raises(error, match=message):
        act(tmp_path)
