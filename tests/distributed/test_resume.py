"""Runs that are saved inside epochs and resumed: each sample once, the same model."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elche.checkpoint.store import CheckpointStore
from tests.distributed.cases.resume_cases import Trained, breaks, train
from tests.distributed.cases.tasks import Task, difference, identical
from tests.harness.choices import ALONE
from tests.harness.choices import wanted as wanted
from tests.harness.rank_pool import RankPool

pytestmark = pytest.mark.distributed

POLICIES = ["sync", "cadence", "async"]
TASK = Task(samples=203, batch_size=8, epochs=3)
"""Of 26 steps an epoch, the last of 3 samples."""


def asking(policy: str, **options: object) -> Task:
    return dataclasses.replace(TASK, options={"policy": policy, **options})


def seen_before(
    folder: Path, ranks: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """What these ranks, or all, had trained on when the newest checkpoint was made."""
    found = CheckpointStore(folder).newest()
    assert found is not None
    everyone = range(found.manifest.world_size)
    held = [found.of_rank(rank) for rank in (everyone if ranks is None else ranks)]
    states = [
        {**(each["bound"] or {}).get("registered", {}), **(each["free"] or {})}
        for each in held
    ]
    return [(epoch, at) for each in states for epoch, at in each["seen"]["pairs"]]


def assert_once(pairs: Sequence[tuple[int, int]], epochs: int) -> None:
    expected = {(epoch, at): 1 for epoch in range(epochs) for at in range(TASK.samples)}
    assert Counter(pairs) == Counter(expected)


def all_pairs(ranks: Sequence[Trained]) -> list[tuple[int, int]]:
    return [pair for rank in ranks for pair in rank.pairs]


@pytest.mark.parametrize(
    ("policy", "codec"), [*((policy, "fp32") for policy in POLICIES), ("sync", "int4")]
)
def test_a_run_resumed_inside_an_epoch_sees_what_is_left(
    ranks2: RankPool, policy: str, codec: str, tmp_path: Path
) -> None:
    """And is that which went on, bit for bit, where nothing depends on time."""
    task = asking(policy, deterministic=True, codec=codec)
    saves = (random.Random(policy).randrange(14, 22),)
    first = ranks2.serve(train, task, str(tmp_path), saves, dropout=0.2)
    assert_once(all_pairs(first), 3)
    before = seen_before(tmp_path)
    assert 0 < len(before) < len(all_pairs(first))
    assert len(before) % TASK.samples, "the cut is not inside an epoch"
    again = ranks2.serve(train, task, str(tmp_path), (), True, 0.2)
    assert_once(all_pairs(again), 3)
    assert again[0].epochs[0] == first[0].epochs[0] + len(before) // TASK.samples
    for one, other in zip(first, again, strict=True):
        assert identical([one.state, other.state])
        assert (one.pairs, one.draws) == (other.pairs, other.draws)
        assert other.progress == one.progress == 3 * 26
        assert other.rates == one.rates[-len(other.rates) :]
    assert {rank.metrics for rank in first} == {TASK.samples}


def alone(folder: Path, task: Task = TASK, *args: object) -> Trained:
    """The same in this process."""
    return train(dataclasses.replace(task, options={}), str(folder), *args)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "early"), [(1, False), (1, True), (2, True)])
def test_one_device_or_an_early_loop_resumes_bit_for_bit(
    ranks2: RankPool, ranks: int, early: bool, tmp_path: Path
) -> None:
    """A batch whose backward pass was to come is trained on again.

    Its gradient was lost with the process, and it counted as done.
    """
    options = {"policy": "sync", "deterministic": True} if ranks == 2 else {}
    task, folder = dataclasses.replace(TASK, options=options), str(tmp_path)

    def run(saves: tuple[int, ...], resumes: bool) -> list[Trained]:
        given = task, folder, saves, resumes, 0.0 if early else 0.2
        if ranks == 1:
            return [train(*given, early=early)]
        return ranks2.serve(train, *given, early=early)

    first = run((37,), False)
    assert_once(all_pairs(first), 3)
    assert early or len(seen_before(tmp_path)) == 37 * 8 - 5
    again = run((), True)
    assert_once(all_pairs(again), 3)
    for one, other in zip(first, again, strict=True):
        assert identical([one.state, other.state])
        assert early or (one.pairs, one.draws) == (other.pairs, other.draws)
        assert other.progress == one.progress == 3 * 26
        assert other.epochs == [1, 2]


@pytest.mark.parametrize(
    ("policy", "saved_by"),
    [
        *(("sync", 1), ("sync", 2), ("cadence", 2)),
        *(
            pytest.param(policy, ranks, marks=pytest.mark.slow)
            for policy in ("cadence", "async", "auto")
            for ranks in (1, 2)
        ),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks2: RankPool, policy: str, saved_by: int, tmp_path: Path
) -> None:
    """Under ``sync`` it is what one process would have trained, to rounding."""
    folder = str(tmp_path)
    task = asking(policy, leave_out=policy != "auto")  # rank 0 asks in its loop
    if saved_by == 1:
        alone(tmp_path, TASK, (30,))
    else:
        ranks2.serve(train, task, folder, (30,))
    before = seen_before(tmp_path)
    if saved_by == 1:
        again = ranks2.serve(train, task, folder, (), True)
        own = [pair for rank in again for pair in rank.pairs]
    else:
        again = [alone(tmp_path, TASK, (), True)]
        own = again[0].pairs + seen_before(tmp_path, [1])
    assert_once(own, 3)
    assert len(before) < len(own)
    assert [rank.progress for rank in again] == [3 * 26] * len(again)
    if policy == "sync":
        plain = alone(tmp_path / "plain").state
        assert difference(again[0].state, plain) <= 1e-5


@pytest.mark.parametrize(
    ("first", "second", "codec"),
    [
        # Once: began as sync with each rank's own momentum, and replicas drifted apart.
        ("cadence", "auto", "fp32"),
        # Once: refused, as its residuals of gradients belonged to "other parameters".
        ("sync", "cadence", "int4"),
    ],
)
def test_a_run_goes_on_by_another_policy(
    ranks2: RankPool, first: str, second: str, codec: str, tmp_path: Path
) -> None:
    ranks2.serve(train, asking(first, codec=codec), str(tmp_path), (16,))
    task = asking(second, codec=codec)
    again = ranks2.serve(train, task, str(tmp_path), (), True)
    assert_once(all_pairs(again), 3)
    assert identical([rank.state for rank in again])


def test_rank_0_asks_for_checkpoints_where_another_trains_alone(
    ranks2: RankPool, wanted: Callable[..., None], tmp_path: Path
) -> None:
    # Once: rank 0 looked at its batches only, and had none.
    wanted(ALONE)
    by_time = {"ELCHE_CHECKPOINT_DIR": str(tmp_path), "ELCHE_CHECKPOINT_EVERY_S": "0.1"}
    env = [
        {"ELCHE_SPEED": speed, "ELCHE_MS_PER_SAMPLE": "0.5", **by_time}
        for speed in ("0.02", "1")
    ]
    task = Task(samples=4000, batch_size=8, epochs=1, options={"policy": "auto"})
    slow, fast = ranks2.serve(*(train, task, str(tmp_path)), env=env)
    assert len(slow.pairs) < 600 < len(fast.pairs)
    store, complete = CheckpointStore(tmp_path), tmp_path.glob("*/manifest.json")
    found = [store.open(path.parent.name).manifest.info for path in complete]
    assert any(2000 < info["samples"] < 4000 for info in found)  # after its last batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_three_ranks_then_two_then_four(policy: str, tmp_path: Path) -> None:
    """Every sample of each epoch once, whichever rank had it."""
    task = asking(policy, leave_out=False)  # rank 0 asks in its loop
    draws, pairs = random.Random(policy), []
    for world_size, left in ((3, 2), (2, 2), (4, 4)):
        with RankPool(world_size) as pool:
            saves = (draws.randrange(4, 9),) if world_size < 4 else ()
            ranks = pool.serve(train, task, str(tmp_path), saves, world_size != 3)
        if saves:
            assert len(seen_before(tmp_path)) < len(all_pairs(ranks))
            pairs += seen_before(tmp_path, range(left, world_size))  # ranks to come
    assert_once(pairs + all_pairs(ranks), 3)
    assert identical([rank.state for rank in ranks])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_may_break_off_while_its_epoch_is_cut(
    ranks2: RankPool, policy: str, rank: int, tmp_path: Path
) -> None:
    """Whichever comes first: the epoch ends, the others follow, nothing hangs."""
    draws = random.Random(f"{policy} {rank}")
    for number in range(4):
        at, folder = draws.randrange(2, 8), tmp_path / str(number)
        given = asking(policy), str(folder), rank, (at, at + draws.randrange(4))
        ranks = ranks2.serve(breaks, *given)
        assert [epochs for epochs, _ in ranks] == [[0, 1, 2], [0, 1, 2]]
        _, has_asked = ranks[0]  # the other may have ended the epoch before
        assert (CheckpointStore(folder).newest() is not None) == has_asked
