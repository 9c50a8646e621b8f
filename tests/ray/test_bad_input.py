"""What `elche.ray` refuses by name, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import elche.ray
from elche.errors import ConfigError


@pytest.mark.parametrize(
    "wrong",
    [
        {"resources": [("CPU", 1)]},
        {"resources": {"CPU": "one"}},
        {"resources": {"CPU": True}},
        {"label_selector": ["fast"]},
        {"label_selector": {"kind": 1}},
        {"speed_hint": -1.0},
        {"speed_hint": "fast"},
    ],
)
def test_a_wrong_spec_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"expected .*{next(iter(wrong))}"):
        elche.ray.RankSpec(**wrong)


@pytest.mark.parametrize("ranks", [2, elche.ray.RankSpec(), [{"CPU": 1}]])
def test_ranks_that_are_no_specs_are_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError, match="RankSpec"):
        elche.ray.run(print, ranks)


def test_a_variable_that_is_no_text_is_refused() -> None:
    wrong: dict[str, Any] = {"SEED": 1}
    with pytest.raises(ConfigError, match="'SEED'"):
        elche.ray.run(print, [elche.ray.RankSpec()], environment=wrong)


def test_a_function_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ConfigError, match="pickle"):
        elche.ray.run(print, [elche.ray.RankSpec()], args=(sys._getframe(),))


def test_without_ray_the_extra_is_named() -> None:
    code = "import sys; sys.modules['ray'] = None; import elche.ray"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'elche[ray]'" in ended.stderr


def test_an_actor_that_ended_takes_its_rank_along() -> None:
    """Its process may still have been importing, and asked for its parent too late."""
    command = [sys.executable, "-m", "elche.launching.remote_rank", "0", "1", "-c", ""]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
    assert ended.returncode == 1
