"""Changes of a rank's speed are found once, and noise is none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.protocol.events import RankLost
from elche.monitor.event_records import (
    FACTOR,
    KNOWN,
    LASTING,
    SpeedWatch,
)
from tests.monitor.test_run_history import begin, join, names, recorded, report

RANDOMS = st.randoms(use_true_random=False)
WINDOWS_S = st.sampled_from([0.1, 0.3, 1.0, 7.0])


def watched(
    speeds: Iterable[Mapping[int, float]], window_s: float = 1.0
) -> list[tuple[str, int]]:
    """Changes in these speeds of ranks, one for each window."""
    watch, found = SpeedWatch(), []
    for each in speeds:
        window = {"duration_s": window_s, "busy_s": [window_s] * len(each)}
        window["rank_samples"] = [speed * window_s for speed in each.values()]
        window["discarded_samples"] = [0] * len(each)
        found += watch.observe(window, {*each})
    return [(name, rank) for name, _, rank in found]


@given(RANDOMS, WINDOWS_S, st.floats(0.1, 1e6))
def test_noise_within_its_bound_is_no_change(
    rng: Random, window_s: float, speed: float
) -> None:
    bound = 0.99 * FACTOR**0.5
    noise = [rng.uniform(-1, 1) for _ in range(200)]
    noise += [rng.choice((-1, 1)) for _ in range(200)]
    assert watched([{0: speed * bound**each} for each in noise], window_s) == []


@given(RANDOMS, WINDOWS_S, st.lists(st.booleans(), max_size=6), st.floats(1.9, 100.0))
def test_each_lasting_change_is_found_once(
    rng: Random, window_s: float, rises: list[bool], factor: float
) -> None:
    """Noise is 10%; the other rank's speed stays."""
    windows, speed, speeds = round(20 * max(1.0, 1.0 / window_s)), 100.0, []
    for way in [0, *(1 if rise else -1 for rise in rises)]:
        speed *= factor**way
        for _ in range(windows):
            noise = [1.1 ** rng.uniform(-1, 1) for _ in range(2)]
            speeds.append({0: speed * noise[0], 1: 9.0 * noise[1]})
    found = [("faster" if rise else "slower", 0) for rise in rises]
    assert watched(speeds, window_s) == found


@pytest.mark.parametrize("lasts", [LASTING - 1, LASTING])
def test_a_change_must_last(lasts: int) -> None:
    speeds = [100.0] * (KNOWN + 1) + [50.0] * lasts + [100.0] * 9
    found = [("slower", 0), ("faster", 0)] if lasts == LASTING else []
    assert watched({0: speed} for speed in speeds) == found


def test_ranks_that_follow_a_changed_one_are_not_named() -> None:
    """Shares change, and with them what fixed costs leave of a speed."""
    before, after = {0: 100.0, 1: 100.0, 2: 90.0}, {0: 160.0, 1: 40.0, 2: 40.0}
    found = watched([before] * 9 + [after] * 9 + [before] * 9)
    assert found == [("slower", 1), ("slower", 2), ("faster", 1), ("faster", 2)]


def test_changes_are_events_while_the_same_ranks_share_the_work() -> None:
    ranks = join(0), join(1), *begin(0)
    both, less, more = ([report(0, (80, n))] * 9 for n in (20, 8, 24))
    records = recorded(*ranks, *both, *less, *more)
    assert names(records) == [("slower", 1), ("faster", 1)]
    texts = [each["text"] for each in records if each["kind"] == "event"]
    assert texts[0] == "2.5 times: 16.0 samples/s of its own work, 40.0 before"
    slow, fast = ([report(0, (n,))] * 9 for n in (20, 90))
    records = recorded(*ranks, *both, RankLost(rank=1), *slow, *fast)
    assert names(records) == [("died", 1), ("faster", 0)]
