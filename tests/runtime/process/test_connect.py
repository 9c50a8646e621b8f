"""Where a rank under torchrun takes the run's key from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from elche.errors import CommunicationError
from elche.runtime.process.connect import (
    _find_under_torchrun,
    _hide,
    _read_hidden,
    connect,
    stop_coordinator,
)
from elche.runtime.process.environment import Placement, read_placement
from tests.harness.ports import free_port


def test_a_key_is_this_users_alone_and_goes_with_the_coordinator() -> None:
    path = _hide("127.0.0.1:1/00")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert _read_hidden(path) == "127.0.0.1:1/00"
    stop_coordinator()
    assert not Path(path).exists()


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("127.0.0.1:1/00")
    path.chmod(0o644)
    with pytest.raises(CommunicationError, match="not a file of this user alone"):
        _read_hidden(str(path))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A default group of this process alone."""
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=100))
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for as long as the store of a default group waits."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    placement = Placement(world_size=2, device=torch.device("cpu"))
    begun_s = time.monotonic()
    with pytest.raises(CommunicationError, match="default group"):
        connect(placement, 0.5)
    assert time.monotonic() - begun_s < 50.0  # of the store's 100


def test_a_default_group_made_between_two_setups_starts_no_second_coordinator(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    placement = Placement(world_size=1, device=torch.device("cpu"))
    first = _find_under_torchrun(placement, os.environ, 60.0)
    request.getfixturevalue("group_of_one")
    assert _find_under_torchrun(placement, os.environ, 60.0) == first
    stop_coordinator()


@pytest.mark.usefixtures("group_of_one")
def test_elche_run_has_no_use_for_a_default_group() -> None:
    found = read_placement(
        {
            "ELCHE_COORDINATOR": "127.0.0.1:1",
            "ELCHE_KEY": "00" * 32,
            "RANK": "1",
            "WORLD_SIZE": "2",
        }
    )
    assert (found.rank, found.world_size) == (1, 2)
