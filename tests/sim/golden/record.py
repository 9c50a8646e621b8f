"""Renew the recorded outcomes: ``python -m tests.sim.golden.record``.

Renews efficiency and commits, and adds new stories. Refuses a story whose ends or
epochs differ: exactly once is never renewed. ``--show NAME`` prints a story's commits,
to compare them before and after a change. The commit that renews says why.
"""

from __future__ import annotations

import sys

from tests.sim.golden import recorded
from tests.sim.golden.playing import Outcome, commits_of, outcome, play
from tests.sim.golden.stories import stories


def record() -> int:
    """Plays all stories and writes what they came to; the number of those refused."""
    before = recorded.read()
    after: dict[str, Outcome] = {}
    refused = 0
    for story in stories():
        old, new = before.get(story.name), outcome(story)
        after[story.name] = new
        if old == new:
            continue
        if old is None:
            print(f"new: {story.name}")
        elif (old.ends, old.epochs) != (new.ends, new.epochs):
            refused += 1
            print(f"REFUSED: {story.name}: {old.ends} {old.epochs} were recorded, got")
            print(f"    {new.ends} {new.epochs}")
        else:
            print(
                f"renewed: {story.name}: {old.efficiency} -> {new.efficiency}", end=""
            )
            print(", other commits" if old.commits != new.commits else "")
    for name in before.keys() - after.keys():
        print(f"removed: {name}")
    if not refused:
        recorded.write(after)
    return refused


def show(name: str) -> None:
    """Prints the commits of one story, a line for each."""
    (story,) = (each for each in stories() if each.name == name)
    for kind, number, epoch, rank, start, stop in commits_of(play(story)):
        print(f"{kind} {number} epoch {epoch} rank {rank} [{start}, {stop})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--show"]:
        show(sys.argv[2])
    else:
        sys.exit(min(1, record()))
