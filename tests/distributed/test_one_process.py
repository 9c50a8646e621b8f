"""Every setting with every other, in real processes and as one process does the same.

Under ``sync`` that is plain training on the union batch; under the other policies what
`one_process` writes out of the windows that the run had.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from elche.comm.transport.host_exchange import HostExchange
from elche.config import RunConfig
from elche.errors import ConfigError
from tests.distributed.cases.one_process import local_batches, replay
from tests.distributed.cases.tasks import (
    Task,
    Trace,
    build,
    difference,
    identical,
    plain,
    positions,
    shared,
)
from tests.distributed.test_host_sums import CAP_MB, by_hosts, of
from tests.harness.rank_pool import RankPool
from tests.harness.settings import nested
from tests.harness.window_record import Window, WindowRecord

pytestmark = pytest.mark.distributed

Case = dict[str, Any]
FACTORS: dict[str, Sequence[Any]] = {
    "way": ("sync", "gradients", "cadence", "async"),
    "world_size": (2, 3, 4),
    "transport": ("auto", "gloo", "hosts"),
    "codec": ("fp32", "bf16", "int8", "int4"),
    "outer": ("auto", "average", "nesterov", "slowmo"),
    "dtype": ("float32", "float64"),
    "optimizer": ("sgd", "adamw"),
    "model": ("mlp", "norm", "unused", "tied", "frozen"),
    "loop": ("plain", "clip", "accumulate", "scaler", "autocast"),
    "planned": (True, False),
    "weighs": (False, True),
}
OF_AVERAGES = ("codec", "outer")
HOSTS = {3: "aab", 4: "abba"}
BOUNDS = {"fp32": 2e-6, "bf16": 5e-3, "int8": 2e-2, "int4": 0.1}
"""Relative L2 difference of the model at the end, in float32."""
ENCODED = 2.1e-6
"""What is encoded is at least so far from what is not."""


def task_of(case: Case, **more: Any) -> Task:
    way = case["way"]
    options = {"policy": "cadence" if way == "gradients" else way}
    if case["transport"] == "hosts":
        options["bucket_cap_mb"] = CAP_MB
    else:
        options["transport"] = case["transport"]
    if way != "sync":
        options["max_anchor"] = 2
    if case["planned"]:
        options["deterministic"] = True
        options["speed_hints"] = (1.0, 0.5, 1.0, 0.5)[: case["world_size"]]
    if way == "gradients":
        options["update"] = "gradients"
        if case["loop"] == "clip":
            options["windows_max_grad_norm"] = 0.1
    elif way == "sync":
        options["codec"] = case["codec"]
    else:
        options |= {name: case[name] for name in OF_AVERAGES}
    if way != "sync" and is_whole(case):
        options["local_batch_size"] = 6
    return Task(
        samples=100,
        batch_size=6,
        dtype=case["dtype"],
        optimizer=case["optimizer"],
        model=case["model"],
        loop="plain" if way == "gradients" and case["loop"] == "clip" else case["loop"],
        weighs=case["weighs"],
        options={**options, **more},
    )


def is_whole(case: Case) -> bool:
    """Whether local batches are whole ones, where parts of six samples are too small.

    For BatchNorm four of them; for its statistics and a codec together any; and to
    weigh something: of two labels none may be above zero.
    """
    is_magnified = case["model"] == "norm" and case["codec"] != "fp32"
    return bool(case["world_size"] == 4 or case["weighs"] or is_magnified)


def is_possible(case: Case) -> bool:
    """Whether the settings go together, and one process can do the same."""
    way, loop = case["way"], case["loop"]
    is_flat = way == "async" or case["world_size"] == 2 or case["codec"] != "fp32"
    if case["transport"] == "hosts" and is_flat:
        return False  # nothing is summed inside a host first
    try:
        RunConfig(**nested(task_of(case).options))
    except ConfigError:
        return False
    if way == "gradients" and loop not in ("plain", "clip"):
        return False  # the loop's own steps are none
    if way == "sync" and (loop == "autocast" or case["model"] == "norm"):
        return False  # depend on how a batch is divided
    if way == "sync" and case["weighs"]:
        return False  # another mean than the loss takes: see test_weights
    is_exact, is_coded = case["dtype"] == "float64", case["codec"] != "fp32"
    if case["model"] == "norm":  # few samples to a batch: statistics magnify
        if not is_exact and case["optimizer"] == "adamw":
            return False  # a bias before BatchNorm: Adam scales up mere rounding
        if is_coded and not case["planned"]:
            return False
    return not (is_exact and (is_coded or loop == "autocast"))


def bound_of(case: Case) -> float:
    """How far one process may be from it."""
    has_norm = case["model"] == "norm"
    if case["dtype"] == "float64":
        return 1e-7 if has_norm and case["optimizer"] == "adamw" else 1e-11
    if case["codec"] == "fp32" and case["loop"] == "autocast":
        return 2e-2 if has_norm else 2e-3
    return BOUNDS[case["codec"]] * (50 if has_norm and case["codec"] == "fp32" else 1)


def drawn(draw: random.Random) -> Case:
    """A case, possible or not."""
    case = {name: draw.choice(values) for name, values in FACTORS.items()}
    if case["way"] in ("sync", "gradients"):
        codec = case["codec"]
        case |= {name: FACTORS[name][0] for name in OF_AVERAGES}
        if case["way"] == "sync":
            case["codec"] = codec
    return case


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(case.items(), 2))


def pairwise() -> list[Case]:
    """Few cases in which every two settings that can meet do."""
    draw = random.Random(0)
    pool = [case for case in (drawn(draw) for _ in range(4000)) if is_possible(case)]
    every = [(case, pairs_of(case)) for case in pool]
    missing: set[tuple[Any, ...]] = set().union(*(pairs for _, pairs in every))
    chosen: list[Case] = []
    while missing:
        some = draw.sample(every, 300)
        case, pairs = max(some, key=lambda each: len(each[1] & missing))
        if not pairs & missing:
            case, pairs = next(each for each in every if each[1] & missing)
        chosen.append(case)
        missing -= pairs
    return chosen


def check(ranks: RankPool, case: Case) -> None:
    """Runs it, and compares it with one process."""
    record, task = WindowRecord(), task_of(case)
    traces = trained(ranks, case, task, record)
    assert identical([trace.state for trace in traces])
    for epoch in range(task.epochs):
        assert positions(traces, epoch) == list(range(task.samples))
    if case["way"] == "sync":
        known = plain(task).state
    else:
        check_plans(case, task, record.epochs)
        known = replay(task, record.epochs, len(traces))
    apart = difference(traces[0].state, known)
    assert apart <= bound_of(case)
    assert apart > ENCODED or case["codec"] == "fp32"


def trained(
    ranks: RankPool, case: Case, task: Task, record: WindowRecord
) -> list[Trace]:
    """The task on ranks; those of several hosts have summed inside these first."""
    if case["transport"] != "hosts":
        return ranks.run(shared, task, case_setup=record.serve)
    env = of(HOSTS[case["world_size"]])
    found = ranks.run(by_hosts, task, case_setup=record.serve, env=env)
    assert all(kinds == {HostExchange.__name__} for _, kinds in found)
    return [trace for trace, _ in found]


def check_plans(case: Case, task: Task, epochs: list[list[Window]]) -> None:
    """The windows were reduced as the settings say, and as often as planned."""
    outer = "nesterov" if case["outer"] == "auto" else case["outer"]
    trained = [any(window.parts.values()) for epoch in epochs for window in epoch]
    reductions = [window.reduce for epoch in epochs for window in epoch]
    kinds = {each.outer for each in itertools.compress(reductions, trained) if each}
    assert kinds == {outer}
    if case["planned"]:
        per_window = sum((2, 1, 2, 1)[: case["world_size"]])
        batches = local_batches(task, build(task)[2], case["world_size"])
        assert sum(trained) == 2 * -(-len(batches) // per_window)


def named(case: Case) -> str:
    return "-".join(str(case[name]) for name in FACTORS)


CASES = pairwise()
ALL = [drawn(random.Random(number)) for number in range(1000)]
MORE = [case for case in ALL if is_possible(case)][:150]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> RankPool:
    case: Case = request.getfixturevalue("case")
    made = request.getfixturevalue(f"ranks{case['world_size']}")
    assert isinstance(made, RankPool)
    return made


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.every(3)
def test_ranks_are_as_one_process(case: Case, pool: RankPool) -> None:
    check(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=named)
def test_more_of_all_cases(case: Case, pool: RankPool) -> None:
    check(pool, case)
