"""Tests on a Ray cluster of several nodes: only where Ray is installed.

`make test-ray` installs it. Nodes are Ray's own, all on this machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_DEDUP_LOGS"] = "0"
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # 15 starves busy ranks
os.environ["RAY_AUTH_MODE"] = "disabled"  # else a token in this user's home decides
collect_ignore_glob = ["test_*.py"] if find_spec("ray") is None else []
END_S = 30.0
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/ray/" in item.path.as_posix():  # of Ray itself, and its open sockets
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of one node, the head; tests add others, and take them away."""
    import ray
    from ray.cluster_utils import Cluster

    before = leaks.snapshot()
    head = {**NODE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=made.address)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        left = leaks.leaks_since(before, END_S)
    assert not left, "the cluster left behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a rank or a coordinator; Ray's own workers may idle."""
    yield
    deadline_s = time.monotonic() + END_S
    while (left := own_processes()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left, f"the test left behind: {left}"


def own_processes() -> dict[int, str]:
    """Commands of ranks and coordinators below this process, by their ids."""
    commands = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for pid in leaks.snapshot().pids
        if Path(f"/proc/{pid}").exists()
    }
    return {pid: text for pid, text in commands.items() if " -m elche" in text}
