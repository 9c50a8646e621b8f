"""Profiles for hypothesis, rank pools per world size, and the check for leaks."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.harness import leaks
from tests.harness.rank_pool import RankPool, pool_pids, renew_pools
from tests.harness.reached import REACHED, check_reached

ROOT = str(Path(__file__).parents[1])
# Scripts that tests start may import from tests.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
)
LEAK_GRACE_S = 60.0
QUICK_EXAMPLES = 30
"""Most examples of a property without the slow tests; with them it has its own number.
"""
FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "10000"))
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")

# How fast examples are drawn depends on what else the machine does: no failure.
settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=FUZZ_EXAMPLES,
    deadline=None,
    derandomize=False,  # profiles take over what "default" says
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(PROFILE)

leaks.adopt_orphans()


def pytest_configure() -> None:
    # A shell ignores it in its background, and so would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, help="run this tenth of the tests: 0 to 9")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Examples of properties: more under the profile `fuzz`, fewer in a quick run."""
    mark_slow_cases(items)
    if (tenth := config.option.tenth) is not None:
        others = [i for i in items if crc32(i.nodeid.encode()) % 10 != tenth]
        config.hook.pytest_deselected(items=others)
        items[:] = [i for i in items if i not in others]
    is_quick = "not slow" in config.option.markexpr
    for item in items:
        function = getattr(item, "function", None)
        if not is_hypothesis_test(function):
            continue
        own = function._hypothesis_internal_use_settings
        if PROFILE == "fuzz":
            examples = FUZZ_EXAMPLES
        elif is_quick:
            examples = min(own.max_examples, QUICK_EXAMPLES)
        else:
            continue
        function._hypothesis_internal_use_settings = settings(
            own, max_examples=examples
        )


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Of a test marked ``every(n)`` the first, the n-th next, ... case is not slow."""
    cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("every")
        if marker and item.get_closest_marker("slow") is None:
            name = item.nodeid.partition("[")[0]
            if cases[name] % marker.args[0]:
                item.add_marker("slow")
            cases[name] += 1


def pytest_collection_finish() -> None:
    """What is there for all tests no collection of garbage looks at any more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ends what a test left open; fails one that leaves a process or a thread."""
    before = leaks.snapshot(pool_pids())
    yield
    leaks.end_runs()
    left = leaks.leaks_since(before, LEAK_GRACE_S, pool_pids)
    assert not left, "the test left behind:\n" + "\n".join(left)


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One device, as no launcher is around; a run that the test begins is ended."""
    from elche.session.process import shutdown  # pure tests import no torch

    for name in ("RANK", "WORLD_SIZE", "ELCHE_COORDINATOR", "ELCHE_SPEED"):
        monkeypatch.delenv(name, raising=False)
    yield
    shutdown()


@pytest.fixture(autouse=True)
def all_states_reached(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test whose examples have not come to what its marker names."""
    REACHED.clear()
    yield
    check_reached(request.node)


@pytest.fixture(autouse=True, scope="module")
def new_ranks(request: pytest.FixtureRequest) -> None:
    """Gives a module with ``NEW_RANKS`` ranks that have served no other module.

    Workers of a DataLoader are forked from the rank. Forked from ranks that had run
    cases of many other modules they have crashed by a segmentation fault.
    """
    if getattr(request.module, "NEW_RANKS", False):
        renew_pools()


def _pool(world_size: int) -> Iterator[RankPool]:
    with RankPool(world_size) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[RankPool]:
    yield from _pool(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    yield from _pool(4)
