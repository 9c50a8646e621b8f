"""One run in which hosts are cut off, leave, come late, and come back.

Each host is a network namespace of this machine. Host 1 is cut off for 5 s, which is a
wait; host 2 is preempted; host 3 joins; host 1 is cut off for longer, which is a death,
and joins anew.
"""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from benchmarks.links.namespaces import Link
from tests.harness.printing import Printing
from tests.runtime.hosts.joining import OpenRun, linked

pytestmark = [pytest.mark.distributed, pytest.mark.faults, pytest.mark.slow]

OF_3 = r"epoch \d+ of 3 by gloo"


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_every_position_counts_once_whatever_happens_to_hosts(
    tmp_path: Path, policy: str
) -> None:
    with linked(4) as link:
        run = OpenRun(tmp_path, policy, f"{link.ranks[0][1]}:29400")
        try:
            _live_through(run, link)
        finally:
            run.close()


def _live_through(run: OpenRun, link: Link) -> None:
    first = run.begin(prefix=link.command(0))
    cut = _join(run, link, 1)
    first.wait_for(r"host 1 \(.*\) is here; its ranks \[1\] will join")
    leaves = _join(run, link, 2)
    first.wait_for(OF_3, 2)

    link.turn(1, "down")
    before = len(first.wait_for(OF_3))
    time.sleep(5.0)  # how long the fault lasts
    after = len(re.findall(OF_3, first.output))
    link.turn(1, "up")
    assert after <= before + 1  # an epoch takes a fraction of a second
    first.wait_for(OF_3, after + 3)
    assert "died" not in first.output

    leaves.process.send_signal(signal.SIGTERM)
    assert leaves.end() == 143, leaves.output
    first.wait_for(r"rank 2 left: going on with ranks 0, 1\n")
    late = _join(run, link, 3)
    first.wait_for(r"rank 3 joined: going on with ranks 0, 1, 3\n")

    link.turn(1, "down")
    first.wait_for(r"rank 1 died: going on with ranks 0, 3;")
    assert cut.end() == 1, cut.output
    assert "silent for 12 s, and others may go on" in cut.output
    link.turn(1, "up")
    back = _join(run, link, 1)
    first.wait_for(r"rank 4 joined: going on with ranks 0, 3, 4\n")
    first.wait_for(OF_3, len(re.findall(OF_3, first.output)) + 2)
    run.tell("stop")
    run.check([first, late, back], deaths=1)


def _join(run: OpenRun, link: Link, host: int) -> Printing:
    """A host in its namespace."""
    return run.join("", prefix=link.command(host))
