"""Pipelines that are saved and go on elsewhere, as one process would have gone on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import elche
from elche.errors import ConfigError, MismatchError
from elche.pipeline.pipeline import Pipeline
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.pipeline_cases import CALM, loss_of
from tests.pipeline.cases.pipeline_state_cases import (
    BATCHES,
    StateWork,
    continued,
    leave_a_run_that_fails,
    load_other_ties,
    make_layers,
    make_loader,
    make_optimizer,
    overflowing,
    train,
    trained_alone,
)

pytestmark = pytest.mark.distributed

FOUR = StateWork((2, 2, 2, 2))


def resumed_on(
    pool: RankPool, given: StateWork, folder: Path, first: int, **more: bool
) -> None:
    expected = trained_alone()[first:]
    for at, losses in pool.run(
        train, given, str(folder), resumes=True, case_setup=serve_in_thread, **more
    ):
        assert at == first
        assert losses == pytest.approx(expected, rel=1e-9)


def test_saved_on_four_ranks_resumed_on_two_and_three(
    ranks2: RankPool, ranks3: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    """Inside an epoch; clipped, scaled, with a scheduler and a shared weight."""
    saved = ranks4.run(
        *(train, FOUR, str(tmp_path)),
        save_after=5,
        leave_after=8,
        case_setup=serve_in_thread,
    )
    expected = trained_alone()
    for _, losses in saved:
        assert losses == pytest.approx(expected[:8], rel=1e-9)
    (folder,) = tmp_path.glob("checkpoint-*")
    parts = [load_file(path) for path in sorted(folder.glob("model-rank*"))]
    assert [len(part) for part in parts] == [4, 4, 4, 4], "each rank its stages"
    whole = nn.Sequential(*make_layers())
    whole.load_state_dict({n: v for part in parts for n, v in part.items()})
    # Asked for after step 5, made when the loop comes back from the next one.
    resumed_on(ranks2, StateWork((5, 3), "zb-h1"), tmp_path, 6)
    resumed_on(ranks3, StateWork((1, 2, 1, 1, 1, 2), "zb-v"), tmp_path, 6)


def test_two_values_of_a_shared_weight(ranks2: RankPool) -> None:
    """Every rank takes the last one, as torch does."""
    given = load_other_ties, StateWork((4, 4))
    first, last = ranks2.run(*given, case_setup=serve_in_thread)
    assert torch.equal(first[0], last[0])


def test_resumed_on_more_ranks_and_between_epochs(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    """After other runs of the same processes have failed."""
    for pool, of_trainer in ((ranks2, False), (ranks4, True)):
        pool.run(leave_a_run_that_fails, of_trainer, case_setup=serve_in_thread)
    ranks2.run(
        *(train, StateWork((3, 5)), str(tmp_path)),
        save_after=BATCHES,
        leave_after=BATCHES + 1,
        registers=False,
        case_setup=serve_in_thread,
    )
    resumed_on(ranks4, FOUR, tmp_path, BATCHES, registers=False)


def test_dropout_follows_the_steps_of_the_whole_run(
    ranks2: RankPool, ranks3: RankPool, tmp_path: Path
) -> None:
    def losses(found: list[tuple[int, list[float]]]) -> list[float]:
        return found[0][1]

    given = StateWork((3, 5), dropout=True)
    whole = losses(
        ranks2.run(train, given, str(tmp_path / "none"), case_setup=serve_in_thread)
    )
    assert whole != pytest.approx(trained_alone(), rel=1e-3)
    asked = {"save_after": 6, "leave_after": 9}
    ranks2.run(train, given, str(tmp_path), **asked, case_setup=serve_in_thread)
    other = StateWork((3, 3, 2), dropout=True)
    found = ranks3.run(
        train, other, str(tmp_path), resumes=True, case_setup=serve_in_thread
    )
    assert losses(found) == pytest.approx(whole[7:], rel=1e-9)


def test_replicas_are_saved_once(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
) -> None:
    ranks4.run(
        *(train, StateWork((4, 4), replicas=2), str(tmp_path)),
        save_after=2,
        leave_after=5,
        case_setup=serve_in_thread,
    )
    names = {path.name for path in tmp_path.glob("*/model-rank*")}
    assert names == {"model-rank0.safetensors", "model-rank1.safetensors"}
    resumed_on(ranks2, StateWork((6, 2)), tmp_path, 3)


@pytest.mark.parametrize("other", [StateWork((1, 7)), StateWork((2, 2, 2, 2), "zb-v")])
def test_optimizer_state_by_name_under_another_partition(
    ranks2: RankPool, other: StateWork
) -> None:
    given = StateWork((5, 3))
    found = ranks2.run(continued, given, 3, case_setup=serve_in_thread)
    state, expected = found[0]
    names = set(nn.Sequential(*make_layers()).state_dict()) - {"5.0.weight"}
    assert set(state[1]["state"]) == names, "a shared weight has one state"
    assert [len(group["params"]) for group in state[1]["param_groups"]] == [7, 8]
    for _, loss in found[1:]:
        assert loss == expected
    for again, loss in ranks2.run(
        continued, other, 0, state, case_setup=serve_in_thread
    ):
        assert loss == pytest.approx(expected, rel=1e-9)
        for name, one in state[1]["state"].items():
            for key, value in one.items():
                assert torch.equal(again[1]["state"][name][key], value)


def test_optimizer_state_goes_to_one_process(ranks2: RankPool) -> None:
    """In which elche is not needed to load it."""
    state, expected = ranks2.run(
        continued, StateWork((5, 3)), 3, case_setup=serve_in_thread
    )[0]
    whole = nn.Sequential(*make_layers())
    whole.load_state_dict(state[0])
    optimizer = make_optimizer(whole.parameters())
    set_optimizer_state_dict(whole, optimizer, state[1])
    x, y = next(iter(make_loader(torch.Generator().manual_seed(2))))
    loss_of(whole(x), y).backward()
    optimizer.step()
    assert loss_of(whole(x), y).item() == pytest.approx(expected, rel=1e-9)


def test_a_scaler_skips_on_every_rank(ranks2: RankPool) -> None:
    (first, losses), (other, _) = ranks2.run(
        overflowing, StateWork((1, 7)), case_setup=serve_in_thread
    )
    assert first == other == [2.0**40, 2.0**39, 2.0**39, 2.0**39]
    assert losses[2] < losses[0]
    assert losses[2] == pytest.approx(losses[1], rel=1e-5), "the step was skipped"


def one_rank() -> Pipeline:
    layers = make_layers()
    return Pipeline(layers, loss_of, micro_batches=4, **CALM)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call elche.setup first, or make a Pipel"):
        elche.save(tmp_path)
    with one_rank() as pipe:
        with pytest.raises(ConfigError, match="no registered optimizer h"):
            elche.save(tmp_path)
        with one_rank(), pytest.raises(ConfigError, match="of one pipeline, and 2 are"):
            elche.save(tmp_path)
        optimizer = make_optimizer(pipe.parameters())
        pipe.register_optimizer(optimizer)
        for _ in elche.epochs(2):
            for x, y in make_loader():
                pipe.step(x, y)
                with pytest.raises(ConfigError, match=r"in pipe.batches\(loader\)`, o"):
                    elche.save(tmp_path)
        elche.save(tmp_path)
        state = pipe.optimizer_state_dict(optimizer)
        with pytest.raises(ConfigError, match=r"what pipe.optimizer_state_dict retur"):
            pipe.load_optimizer_state_dict(optimizer, optimizer.state_dict()["state"])
        one_group = torch.optim.AdamW(pipe.parameters())
        with pytest.raises(MismatchError, match=r"has the groups \[0, 1\], the AdamW"):
            pipe.load_optimizer_state_dict(one_group, state)
        state["param_groups"][0]["params"].remove("3.0.weight")
        with pytest.raises(MismatchError, match=r"has no 3.0.weight in group 0; load"):
            pipe.load_optimizer_state_dict(optimizer, state)
        foreign = torch.optim.AdamW(nn.Linear(2, 2).parameters())
        with pytest.raises(ConfigError, match="that no layer of this rank has: make"):
            pipe.optimizer_state_dict(foreign)
    manifest = json.loads(next(tmp_path.glob("*/manifest.json")).read_text())
    assert manifest["manifest"]["info"] == {"epoch": 2, "kind": "pipeline", "steps": 8}


def test_what_does_not_fit(tmp_path: Path) -> None:
    with one_rank() as pipe:
        pipe.register_optimizer(make_optimizer(pipe.parameters()))
        elche.save(tmp_path)
    layers = [*make_layers(), nn.Linear(3, 3).double()]
    with Pipeline(layers, loss_of, micro_batches=4, **CALM) as pipe:
        pipe.register_optimizer(make_optimizer(pipe.parameters()))
        with pytest.raises(ConfigError, match=r"has no 8.weight, 8.bias, which rank 0"):
            elche.resume(tmp_path)
    with Pipeline(make_layers()[:7], loss_of, micro_batches=4, **CALM) as pipe:
        pipe.register_optimizer(make_optimizer(pipe.parameters()))
        with pytest.raises(ConfigError, match=r"has 7.0.\w+, 7.0.\w+, which the model"):
            elche.resume(tmp_path)
    with one_rank() as pipe:
        pipe.register_optimizer(torch.optim.SGD(pipe.parameters(), lr=0.1))
        with pytest.raises(MismatchError, match=r"of \['AdamW'\], but this script"):
            elche.resume(tmp_path)
    model = nn.Sequential(*make_layers())
    elche.setup(model, make_optimizer(model.parameters()), make_loader())
    try:
        with pytest.raises(MismatchError, match="saved by a Pipeline, but this run"):
            elche.resume(tmp_path)
    finally:
        elche.shutdown()
