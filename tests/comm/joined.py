"""Groups of ranks in processes of their own, without a run around them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed as dist

from elche.comm.transport.process_group import Group
from tests.harness.rank_main import this_place

STORE = "ELCHE_TEST_STORE"


@contextmanager
def meeting(world_size: int) -> Iterator[Sequence[Mapping[str, str]]]:
    """A folder where the ranks of a case find each other."""
    with tempfile.TemporaryDirectory() as folder:
        yield [{STORE: folder}] * world_size


@contextmanager
def joined(
    transport: str,
    timeout_s: float = 60.0,
    members: tuple[int, ...] | None = None,
    name: str = "",
) -> Iterator[Group]:
    """A group of all ranks of the case, or of some of them; or another such group."""
    place = this_place()
    ranks = tuple(range(place.world_size)) if members is None else members
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    rank = ranks.index(place.rank)
    path = os.path.join(os.environ[STORE], name + "-".join(map(str, ranks)))
    store = dist.FileStore(path, len(ranks))
    made = dist.ProcessGroupGloo(store, rank, len(ranks), options)
    group = Group(made, rank, len(ranks), timeout_s)
    del made  # a test may close the group, and with it the connections
    group.shares_host = transport == "shared"
    try:
        yield group
    finally:
        group.close()
