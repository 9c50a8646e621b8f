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


@pytest.mark.parametrize(
    ("ranks", "options", "says"),
    [
        (2, {}, "RankSpec"),
        (elche.ray.RankSpec(), {}, "RankSpec"),
        ([{"CPU": 1}], {}, "RankSpec"),
        ([elche.ray.RankSpec()], {"environment": {"SEED": 1}}, "'SEED'"),
        ([elche.ray.RankSpec()], {"args": (sys._getframe(),)}, "pickle"),
    ],
)
def test_wrong_arguments_are_refused(
    ranks: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        elche.ray.run(print, ranks, **options)


def test_without_ray_the_extra_is_named() -> None:
    code = "import sys; sys.modules['ray'] = None; import elche.ray"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'elche[ray]'" in ended.stderr


def test_an_actor_that_ended_takes_its_rank_along() -> None:
    """Its process may still have been importing, and asked for its parent too late."""
    command = [sys.executable, "-m", "elche.launching.remote_rank", "0", "1", "-c", ""]
    silent = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    ended = subprocess.run(command, check=False, **silent)
    assert (ended.returncode, ended.stderr) == (1, b"")
