"""The harness itself: if it misjudged a case, every distributed test would."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.harness import rank_main, rank_pool
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool, pool_pids
from tests.harness.rank_process import Outcome, RankCaseFailed

pytestmark = pytest.mark.distributed


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int) -> str:
    if this_place().rank == rank:
        print("a word before the end")
        raise ArithmeticError(f"planted on rank {rank}")
    return "fine"


def hang_while_seen(path: str) -> str:
    """Rank 1 hangs; rank 0 is through when rank 1 does."""
    if this_place().rank == 1:
        Path(path).touch()
        threading.Event().wait()
    while not Path(path).exists():
        threading.Event().wait(0.01)
    return "fine"


class JumpingClock:
    """Stands still until it was read twice, and is far beyond any deadline then."""

    def __init__(self) -> None:
        self.read = 0

    def monotonic(self) -> float:
        self.read += 1
        return 0.0 if self.read <= 2 else 1e9


def die_on(rank: int) -> str:
    if this_place().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"


def read_and_spoil_environment(name: str) -> str | None:
    value = os.environ.get(name)
    os.environ[name] = "spoiled"
    return value


def leave_a_thread() -> None:
    rank_main.LEAK_GRACE_S = 0.0
    threading.Thread(target=threading.Event().wait, name="left-over").start()


def sum_of_ranks(store: str, keep_group: bool = False) -> float:
    place = this_place()
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
    )
    total = torch.tensor(float(place.rank + 1))
    distributed.all_reduce(total)
    if not keep_group:
        distributed.destroy_process_group()
    return total.item()


def draw() -> tuple[float, int]:
    return torch.rand(()).item(), torch.get_num_threads()


@pytest.fixture(scope="module")
def own_pool() -> Iterator[RankPool]:
    """A pool to break; the session's pools stay whole for the other tests."""
    with RankPool(2, failure_grace_s=0.5) as pool:
        yield pool


def ways(outcomes: Sequence[Outcome]) -> list[str | None]:
    return [outcome.error and outcome.error.way for outcome in outcomes]


def test_cases_draw_alike_and_on_one_thread(ranks2: RankPool) -> None:
    (first, threads), other = ranks2.run(draw)
    assert threads == 1
    assert other == (first, 1)
    assert ranks2.run(draw)[0] == (first, 1)


def test_exception_is_collected_from_its_rank(own_pool: RankPool) -> None:
    with pytest.raises(RankCaseFailed, match="rank 1 raised: ") as caught:
        own_pool.run(fail_on, 1)
    first, second = caught.value.outcomes
    assert (first.value, first.error) == ("fine", None)
    assert second.error is not None
    assert "ArithmeticError: planted on rank 1" in second.error.text
    assert "in fail_on" in second.error.text
    assert "a word before the end" in second.error.log
    assert "rank 0" not in str(caught.value)


def test_expected_failure_returns_outcomes_and_keeps_the_ranks(
    ranks2: RankPool,
) -> None:
    before = ranks2.run(process_id)
    outcomes = ranks2.run(fail_on, 0, expect_failure=True)
    assert ways(outcomes) == ["raised", None]
    assert outcomes[1].value == "fine"
    assert ranks2.run(process_id) == before


def test_timeout_kills_names_and_shows_the_stack(
    own_pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline passes when the first rank is through."""
    before = own_pool.run(process_id)
    monkeypatch.setattr(rank_pool, "time", JumpingClock())
    with pytest.raises(RankCaseFailed, match="rank 1 hung: not through") as caught:
        own_pool.run(hang_while_seen, str(tmp_path / "hangs"))
    error = caught.value.outcomes[1].error
    assert error is not None
    assert "in hang_while_seen" in error.log
    assert caught.value.outcomes[0].value == "fine"
    assert own_pool.pids == []
    for pid in before:
        with pytest.raises(ProcessLookupError, match="No such process"):
            os.kill(pid, 0)
    assert not set(before) & pool_pids()


def test_pool_respawns_after_a_death(own_pool: RankPool) -> None:
    before = own_pool.run(process_id)
    with pytest.raises(RankCaseFailed, match="rank 0 died: exit code -9"):
        own_pool.run(die_on, 0)
    after = own_pool.run(process_id)
    assert not set(before) & set(after)


def test_environment_is_set_per_rank_and_restored(ranks2: RankPool) -> None:
    name = "ELCHE_TEST_HARNESS"
    given = ranks2.run(read_and_spoil_environment, name, env=[{name: "a"}, {name: "b"}])
    assert given == ["a", "b"]
    assert ranks2.run(read_and_spoil_environment, name) == [None, None]
    with pytest.raises(ValueError, match=r"one environment per rank \(2\), got 1"):
        ranks2.run(read_and_spoil_environment, name, env=[{}])


def test_case_that_leaves_a_thread_fails(own_pool: RankPool) -> None:
    with pytest.raises(RankCaseFailed, match="non-daemon thread 'left-over'"):
        own_pool.run(leave_a_thread)
    own_pool.run(die_on, 0, expect_failure=True)  # those threads would never end


def test_case_that_leaves_a_group_fails(ranks2: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankCaseFailed, match="left torch's default process group"):
        ranks2.run(sum_of_ranks, str(tmp_path / "a"), keep_group=True)
    assert ranks2.run(sum_of_ranks, str(tmp_path / "b")) == [3.0, 3.0]


def test_unclean_exit_is_an_error() -> None:
    pool = RankPool(1)
    pool.run(exit_badly_later)
    with pytest.raises(RankCaseFailed, match="exit code 3, at exit"), pool:
        pass


def exit_badly_later() -> None:
    import atexit

    atexit.register(os._exit, 3)
