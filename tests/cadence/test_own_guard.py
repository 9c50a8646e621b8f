"""The user's own guard: how it is named, found, made and watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from elche.cadence.divergence import DivergenceGuard, Guard, NoGuard, Verdict
from elche.cadence.own_guard import OwnGuard, guard_maker, no_own_guards
from elche.config import RunConfig
from elche.coordination.pacing import Pacing
from elche.errors import ConfigError, DeadlineError
from tests.harness import guards

HALVING = "tests.harness.guards:Halving"


class Counting(Guard):
    """Has a state."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.seen = 0

    def observe(self, divergences: Sequence[float], window_batches: int) -> Verdict:
        self.seen += window_batches
        return Verdict(hold=False, nudge=None, reason=f"{self.seen} batches")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def test_a_class_is_kept_as_the_place_where_it_is() -> None:
    config = RunConfig(guard=guards.Halving)
    assert config.guard == config.guard_setting == HALVING
    assert RunConfig(guard=HALVING) == config
    assert RunConfig(**config.as_dict()) == config
    inner = RunConfig.from_options({"guard": guards.Outer.Inner})
    assert inner.guard == "tests.harness.guards:Outer.Inner"
    assert RunConfig().guard_setting is True


def test_a_class_that_nobody_else_can_import_is_refused_with_the_way_out() -> None:
    class Local(Counting):
        pass

    with pytest.raises(ConfigError, match=r"inside a function.*module of its own"):
        RunConfig(guard=Local)
    in_script = type("Mine", (Counting,), {"__module__": "__main__"})
    for given in (in_script, "__main__:Mine", "__mp_main__:Mine"):
        with pytest.raises(ConfigError, match=r"Mine is defined in the script.*beside"):
            RunConfig(guard=given)


@pytest.mark.parametrize(
    ("script", "spec"),
    [("/home/me/train.py", None), ("train.py", ModuleSpec("train", None))],
)
def test_the_script_is_not_run_again_to_find_a_guard_in_it(
    monkeypatch: pytest.MonkeyPatch, script: str, spec: ModuleSpec | None
) -> None:
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = script, spec
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ConfigError, match=r"train:Mine is defined in the script"):
        RunConfig(guard="train:Mine")
    assert RunConfig(guard="trained:Mine").guard == "trained:Mine"


@pytest.mark.parametrize(
    "given",
    [
        *(Counting(), guards.NoSubclass, None, 1, "", "guards", "guards:", ":Mine"),
        *("my guards:Mine", "guards:Mine()", "a..b:Mine", "a:b:c"),
    ],
)
def test_what_names_no_guard_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"True or False, a subclass of elche\.Guard"):
        RunConfig(guard=given)


def test_the_settings_make_the_guard_they_say() -> None:
    assert type(guard_maker(True, no_own_guards)()) is DivergenceGuard
    assert type(guard_maker(False, no_own_guards)()) is NoGuard
    with pytest.raises(ConfigError, match=r"guard 'a:B' cannot be looked up here"):
        guard_maker("a:B", no_own_guards)
    with pytest.raises(ConfigError, match=r"cannot be looked up here"):
        Pacing(RunConfig(policy="async", guard=HALVING), [0, 1], overlapped=True)


def test_a_guard_is_made_once_to_see_that_it_can_be_and_used() -> None:
    asked: list[str] = []

    def find(name: str) -> object:
        asked.append(name)
        return Counting

    before = Counting.made
    make = guard_maker("a:Counting", find)
    assert Counting.made == before + 1
    first = make()
    assert Counting.made == before + 1
    first.observe([0.1], 7)
    second = make()  # of windows that begin anew: knows nothing
    assert Counting.made == before + 2
    assert (first.state_dict(), second.state_dict()) == ({"seen": 7}, {"seen": 0})
    second.load_state_dict(first.state_dict())
    assert second.observe([0.1], 1).reason == "8 batches"
    assert asked == ["a:Counting"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (guards.NoSubclass, r"expected guard 'a:B' to name a subclass of elche\.Guard"),
        (len, r"subclass of elche\.Guard, found <built-in function len>"),
        (Counting(), r"subclass of elche\.Guard, found <"),
        (guards.Demanding, r"'a:B' cannot be made: TypeError.*without arguments"),
        (guards.Unfinished, r"'a:B' cannot be made: TypeError.*abstract"),
    ],
)
def test_what_is_no_guard_is_refused_at_once(kind: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        guard_maker("a:B", lambda name: kind)


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        (
            guards.Raising(),
            r"'a:B' raised in observe\(\): ZeroDivisionError: no spread",
        ),
        (guards.Raising(), r"\(.*guards\.py, line \d+\)"),
        (guards.Leaving(), r"'a:B' raised in observe\(\): SystemExit: 3"),
        (guards.Mute(), r"guard 'a:B' to return an elche\.Verdict.*got None"),
    ],
)
def test_a_guard_that_fails_is_named(guard: Guard, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        OwnGuard("a:B", guard).observe([0.1, 0.2], 4)


def test_a_guard_that_hangs_is_named() -> None:
    given_s: list[float] = []

    def ask(question: Callable[[], object], within_s: float) -> object:
        given_s.append(within_s)
        raise DeadlineError("no answer came within 3 s")

    with pytest.raises(ConfigError, match=r"'a:B' hangs in observe\(\).*within 3 s"):
        OwnGuard("a:B", Counting(), ask, 3.0).observe([0.1, 0.2], 4)
    with pytest.raises(ConfigError, match=r"'a:B' cannot be made.*within 3 s"):
        guard_maker("a:B", lambda name: Counting, ask, 4.0)
    assert given_s == [3.0, 4.0]
