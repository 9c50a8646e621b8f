"""Properties draw fresh examples where asked to, and come to the states they name."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.harness.reached import REACHED, check_reached, reach


@pytest.mark.reaches("a commit", "a death")
def test_a_state_that_no_example_reached_is_named(
    request: pytest.FixtureRequest,
) -> None:
    reach("a commit")
    reach("a death", 0)
    with pytest.raises(AssertionError, match=r"no example reached \['a death'\]"):
        check_reached(request.node)
    reach("a death", 2)
    check_reached(request.node)


def test_what_another_test_reached_does_not_count() -> None:
    assert not REACHED


def test_only_a_fuzzing_run_draws_fresh_examples() -> None:
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("fuzz").derandomize
