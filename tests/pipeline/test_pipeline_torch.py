"""Where torch.distributed.pipelining of torch 2.13 fails, silently or not, and elche.

Each test of torch says what it does and asserts it: when torch mends a case, its test
fails and has served its purpose. elche's gradients are those of one process in all.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.pipeline.cases.torch_pipeline_cases import (
    ELCHE_NAMES,
    Beside,
    Outcome,
    elche_step,
    expected_gradients,
    torch_step,
)

pytestmark = pytest.mark.distributed

SCHEDULES = tuple(ELCHE_NAMES)
MENDED = "torch has mended it; this test has served its purpose"
of_torch = pytest.mark.skipif(
    version("torch").startswith(("2.9.", "2.10.", "2.11.", "2.12.")),
    reason="says what torch 2.13 does; 2.9 aborts at its first message over gloo, 2.11 "
    "is right or wrong in other cases",
)
COMPARED = (
    *(Beside("frozen-first", schedule) for schedule in SCHEDULES),
    *(Beside(model) for model in ("tied-around", "sequence", "shared", "lstm")),
)
LONGER = (Beside("mlp", samples=(12, 16)), Beside("mlp", compiled=True))


def check_elche(pool: RankPool, asked: Beside) -> None:
    """elche's gradients, of all ranks together, are those of one process."""
    found = pool.run(elche_step, asked, case_setup=serve_in_thread)
    expected = expected_gradients(asked)
    assert {name for one in found for name in one.gradients} == expected.keys()
    assert wrong(found, expected) == set()


def wrong(
    found: list[Outcome], expected: dict[str, torch.Tensor | None]
) -> set[tuple[str, str]]:
    """Parameters whose gradient is missing, or is another; and which of both."""
    faults = set()
    for one in found:
        for name, gradient in one.gradients.items():
            wanted = expected[name]
            if (gradient is None) != (wanted is None):
                faults.add((name, "missing" if gradient is None else "unexpected"))
            elif gradient is not None and wanted is not None:
                away = float((gradient - wanted).norm() / wanted.norm())
                if away > 1e-12:
                    faults.add((name, "far" if away > 0.1 else "near"))
    return faults


@pytest.mark.parametrize(
    "asked",
    [
        *(pytest.param(one, id=f"{one.model}-{one.schedule}") for one in COMPARED),
        *(pytest.param(one, id=str(one), marks=pytest.mark.slow) for one in LONGER),
    ],
)
def test_elche(ranks2: RankPool, asked: Beside) -> None:
    check_elche(ranks2, asked)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_elche_in_replicas(ranks4: RankPool, schedule: str) -> None:
    check_elche(ranks4, Beside("mlp", schedule, replicas=2, samples=(24,)))


@of_torch
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_frozen_first_stage(ranks2: RankPool, tmp_path: Path, schedule: str) -> None:
    """torch: the stage after it gets no gradient at all, and nothing is said."""
    asked = Beside(model="frozen-first", schedule=schedule)
    found = ranks2.run(torch_step, asked, str(tmp_path / "store"))
    assert [one.error for one in found] == ["", ""]
    assert wrong(found, expected_gradients(asked)) == {
        ("5.weight", "missing"),
        ("5.bias", "missing"),
    }, MENDED


@of_torch
@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("tied-around", "Trying to backward through the graph a second time"),
        ("sequence", "Can't detach views in-place"),
    ],
)
def test_a_shared_weight_and_a_recurrent_layer(
    ranks2: RankPool, tmp_path: Path, model: str, complaint: str
) -> None:
    """torch: an error, for a weight used before and after another one, or for a stage
    that returns a view, such as the last step of an LSTM.
    """
    asked = Beside(model=model)
    found = ranks2.run(torch_step, asked, str(tmp_path / "store"))
    assert any(complaint in one.error for one in found), [one.error for one in found]


@of_torch
@pytest.mark.parametrize("model", ["shared", "lstm"])
def test_shared_weights_and_recurrent_layers_that_torch_can_do(
    ranks2: RankPool, tmp_path: Path, model: str
) -> None:
    """Not all of them fail: neighbours that share, and an LSTM with a sum after it."""
    asked = Beside(model=model)
    found = ranks2.run(torch_step, asked, str(tmp_path / "store"))
    assert wrong(found, expected_gradients(asked)) == set()


@of_torch
@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_data_parallel_replicas(
    ranks4: RankPool, tmp_path: Path, schedule: str
) -> None:
    """torch (pytorch #144530): stages in DistributedDataParallel, whose reduction
    does not see weight gradients that come later. Some are wrong by 0.7 to 2 times
    their size, and nothing is said. Its 1F1B is right.
    """
    asked = Beside("mlp", schedule, replicas=2, samples=(24,))
    found = ranks4.run(torch_step, asked, str(tmp_path / "store"))
    assert [one.error for one in found] == [""] * 4
    assert {how for _, how in wrong(found, expected_gradients(asked))} == {"far"}, (
        MENDED
    )
    right = Beside("mlp", "ScheduleInterleaved1F1B", replicas=2, samples=(24,))
    found = ranks4.run(torch_step, right, str(tmp_path / "other"))
    assert wrong(found, expected_gradients(right)) == set()


@of_torch
@pytest.mark.slow
def test_a_batch_of_another_size(tmp_path: Path) -> None:
    """torch: gloo finds a message of another length and aborts the process."""
    asked = Beside(model="mlp", samples=(12, 16))
    with RankPool(2) as pool:
        ends = pool.run(torch_step, asked, str(tmp_path / "store"), expect_failure=True)
        died = [end.error.text for end in ends if end.error is not None]
        assert died == ["exit code -6"], MENDED


@of_torch
@pytest.mark.slow
def test_compiled_stages(ranks2: RankPool, tmp_path: Path) -> None:
    """torch: its split backward refuses compiled stages."""
    asked = Beside(model="mlp", compiled=True)
    found = ranks2.run(torch_step, asked, str(tmp_path / "store"))
    assert all(one.error.startswith("RuntimeError") for one in found), MENDED
