"""States that the examples of a property test have come to.

A property that holds of runs in which nothing happens says nothing. Tests note with
`reach` what happened, and the marker ``reaches`` names what must have, at least once
over all examples of a test; the fixture in `tests/conftest.py` looks at the end.
"""

from __future__ import annotations

from collections import Counter

import pytest

REACHED: Counter[str] = Counter()
"""Of the test under way."""


def reach(state: str, times: int = 1) -> None:
    """Notes that an example came to a state, so many times."""
    REACHED[state] += times


def check_reached(node: pytest.Item) -> None:
    """Asserts that a test has come to every state that its marker names."""
    marker = node.get_closest_marker("reaches")
    if marker is None:
        return
    missing = [state for state in marker.args if not REACHED[state]]
    assert not missing, f"no example reached {missing}; reached were {dict(REACHED)}"
