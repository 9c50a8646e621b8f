"""transformers' Trainer and peft on two unequal ranks: the results of one device."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import EarlyStoppingCallback, TrainingArguments

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.integrations.transformers import ElcheTrainer, ElcheTrainingArguments
from elche.runtime.process.environment import Placement
from tests.distributed.cases.tasks import difference
from tests.distributed.test_sync import FOUR_TO_ONE
from tests.harness.rank_pool import RankPool
from tests.integrations.cases.hf_tasks import (
    Found,
    Job,
    Sentences,
    StopsAlone,
    build,
    loaded_adapter,
    make,
    own_loop,
    train,
)
from tests.integrations.programs import printed

CLOSE = 1e-5
"""Norm of the difference, by that of the parameters: both are in single precision."""

pytestmark = pytest.mark.distributed


def check_equal(ranks: list[Found], alone: Found) -> None:
    """Ranks hold the same, and what one device does; so does rank 0's log."""
    first, second = ranks
    assert [each.is_main for each in ranks] == [True, False]
    assert all(torch.equal(first.state[k], second.state[k]) for k in first.state)
    assert difference(first.state, alone.state) <= CLOSE
    assert first.steps == second.steps == alone.steps
    for name in ("loss", "eval_loss", "learning_rate", "epoch", "train_loss"):
        assert first.logged(name) == pytest.approx(alone.logged(name), rel=1e-4)
        assert second.logged(name) == first.logged(name)
    assert second.logged("total_flos") == first.logged("total_flos")
    assert first.shares[0] != first.shares[1]  # on a busy machine either is faster
    assert min(first.shares) > 0


@pytest.mark.parametrize(
    "job",
    [
        Job(options={"eval_strategy": "epoch"}),
        # a last step of one batch, and one of 4 samples, in shares of uneven parts
        Job(options={"gradient_accumulation_steps": 5, "max_grad_norm": 0.1}),
        Job("bert", options={"gradient_accumulation_steps": 2}),
        Job("plain", options={"train_sampling_strategy": "group_by_length"}),
        Job("lora", options={"dataloader_num_workers": 1}),
        Job(data="stream", options={"gradient_accumulation_steps": 2}),
    ],
    ids=lambda job: (
        f"{job.model} {job.data} {' '.join(map(str, job.options.values()))}"
    ),
)
def test_it_ends_as_on_one_device(ranks2: RankPool, job: Job, tmp_path: Path) -> None:
    job = replace(job, folder=str(tmp_path))
    ranks = ranks2.serve(train, job, env=FOUR_TO_ONE)
    check_equal(ranks, train(job))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_on_one_device_it_is_the_trainer_of_transformers(
    accumulation: int, tmp_path: Path
) -> None:
    """To the bit, and to rounding where gradients are accumulated."""
    job = Job(
        folder=str(tmp_path),
        options={"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch"},
    )
    ours, theirs = train(job), train(job, plain=True)
    assert difference(ours.state, theirs.state) <= (CLOSE if accumulation > 1 else 0.0)
    for name in ("loss", "eval_loss", "learning_rate"):
        assert ours.logged(name) == pytest.approx(theirs.logged(name), rel=1e-5)


def test_evaluation_inside_epochs_decides_for_all_ranks(
    ranks2: RankPool, tmp_path: Path
) -> None:
    """Best checkpoint, plateau and early stop follow rank 0's metrics everywhere."""
    options = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 4,
        "save_steps": 4,
        "num_train_epochs": 50,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    job = Job(options=options, callbacks=(EarlyStoppingCallback(2, 0.5),))
    shared = replace(job, folder=str(tmp_path / "ranks"))
    ranks = ranks2.serve(train, shared, env=FOUR_TO_ONE)
    alone = train(replace(job, folder=str(tmp_path / "alone")))
    check_equal(ranks, alone)
    assert alone.steps == 12
    kept = [sorted(path.name for path in each.iterdir()) for each in tmp_path.iterdir()]
    assert kept[0] == kept[1] != []


def test_a_callback_that_stops_one_rank_alone_is_named(
    ranks2: RankPool, tmp_path: Path
) -> None:
    job = Job(folder=str(tmp_path), callbacks=(StopsAlone(),), timeout_s=8.0)
    outcomes = ranks2.serve(train, job, expect_failure=True)
    assert any("a callback's stop after step 3" in str(each.error) for each in outcomes)


def test_a_run_goes_on_from_a_checkpoint(ranks2: RankPool, tmp_path: Path) -> None:
    """Inside an epoch and in whole steps: as without the interruption."""
    options = {
        "save_strategy": "steps",
        "save_steps": 4,
        "max_steps": 10,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
    }
    job = Job(folder=str(tmp_path), options=options)
    through = train(job)
    again = replace(job, resumes="checkpoint-4")
    ranks = ranks2.serve(train, again, env=FOUR_TO_ONE)
    assert difference(ranks[0].state, through.state) <= CLOSE
    for name in ("loss", "epoch", "learning_rate"):
        assert ranks[0].logged(name) == pytest.approx(through.logged(name), rel=1e-4)
    assert ranks[0].steps == 10


def test_lora_saves_its_adapter_on_rank_0(ranks2: RankPool, tmp_path: Path) -> None:
    """By the Trainer and in a loop of the user's."""
    trained, own = tmp_path / "trainer", tmp_path / "own"
    job = Job("lora", folder=str(trained), saves=True)
    found = ranks2.serve(train, job, env=FOUR_TO_ONE)
    ranks = ranks2.serve(own_loop, str(own), env=FOUR_TO_ONE)
    state, losses = own_loop(str(tmp_path / "alone"))
    assert difference(ranks[0][0], state) <= CLOSE
    assert ranks[0][1] == pytest.approx(losses, rel=1e-4)
    for folder, held in ((trained, found[0].state), (own, ranks[0][0])):
        loaded = loaded_adapter(str(folder))
        assert all(torch.equal(loaded[name], held[name]) for name in held)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fsdp": True}, "does not run with fsdp=: it shards the model itself"),
        ({"deepspeed": {"zero_optimization": {}}}, "does not run with deepspeed="),
        ({"auto_find_batch_size": True}, "lower per_device_train_batch_size"),
        ({"include_num_input_tokens_seen": "all"}, "the tokens of one rank"),
        ({"train_sampling_strategy": "batch_rebalance"}, "devices' speed, not by"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        make(Job(folder=str(tmp_path), options=options))


def test_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher asks for them; `elche_config` is asked first."""
    with pytest.raises(ConfigError, match=r"expected policy 'sync', got 'cadence'"):
        ElcheTrainer(build("gpt2"), elche_config=RunConfig(policy="cadence"))
    monkeypatch.setenv("ELCHE_POLICY", "async")
    with pytest.raises(ConfigError, match=r"expected policy 'sync', got 'async'"):
        ElcheTrainer(build("gpt2"))


def test_on_several_ranks_arguments_are_elches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    args = TrainingArguments(str(tmp_path), report_to=[])
    with pytest.raises(ConfigError, match=r"ElcheTrainingArguments, got TrainingArg"):
        ElcheTrainer(build("gpt2"), args, train_dataset=Sentences())
    ours = ElcheTrainingArguments(str(tmp_path), report_to=[])
    assert (ours.world_size, ours.process_index, ours.should_save) == (1, 1, False)
    search = ElcheTrainer(build("gpt2"), ours, train_dataset=Sentences())
    with pytest.raises(ConfigError, match="would draw other parameters on each rank"):
        search.hyperparameter_search()
    AcceleratorState._reset_state(reset_partial_state=True)  # knows rank 1


def test_the_device_is_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "elche.integrations.transformers.read_placement",
        lambda: Placement(device=torch.device("cuda", 1), rank=1),
    )
    with pytest.raises(ConfigError, match=r"the device of rank 1 is cuda:1; leave it"):
        ElcheTrainingArguments(str(tmp_path), report_to=[], use_cpu=True)


def test_without_transformers_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in sys.modules if each.startswith("elche.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'elche\[transformers\]'"):
        importlib.import_module("elche.integrations.transformers")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("hf_trainer", "loss per token: 3.*2.*"),
        ("hf_pipeline", r"epoch 1: loss .*, held out .*"),
    ],
)
def test_an_example_prints_the_same_on_two_devices(name: str, pattern: str) -> None:
    launcher = ("-m", "elche", "run", "--speeds", "1,0.3", "--ms-per-sample", "0.1")
    alone, shared = (
        printed(*options, f"examples/{name}.py") for options in ((), launcher)
    )
    assert re.search(pattern, alone)
    said = [re.findall("(?:epoch|loss per).*", each) for each in (alone, shared)]
    assert said[0] == said[1]
