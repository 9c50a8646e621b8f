"""Recorded runs come to what they came to when they were recorded.

Ends and exactly once: never renewed. Efficiency and commits: renewed by
``python -m tests.sim.golden.record`` in the commit that changes them, with the reason.
"""

from __future__ import annotations

import pytest

from tests.sim.golden import recorded
from tests.sim.golden.playing import outcome
from tests.sim.golden.stories import Story, stories

STORIES = stories()
RECORDED = recorded.read()
EFFICIENCY_TOLERANCE = 0.005
EVERY = pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)


def test_all_stories_are_recorded() -> None:
    assert [story.name for story in STORIES] == list(RECORDED)


@EVERY
def test_ends_and_exactly_once(story: Story) -> None:
    found, kept = outcome(story), RECORDED[story.name]
    assert (found.ends, found.epochs) == (kept.ends, kept.epochs)


@EVERY
def test_efficiency(story: Story) -> None:
    kept = RECORDED[story.name].efficiency
    wanted = None if kept is None else pytest.approx(kept, abs=EFFICIENCY_TOLERANCE)
    assert outcome(story).efficiency == wanted


@EVERY
def test_commits(story: Story) -> None:
    """See the difference by ``python -m tests.sim.golden.record --show NAME``."""
    assert outcome(story).commits == RECORDED[story.name].commits
