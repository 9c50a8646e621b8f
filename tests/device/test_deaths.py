"""Ranks killed while the others wait for them in a sum, and ranks that are late."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from elche.comm.transport.device_group import DeviceGroupConfig, open_device_group
from elche.comm.transport.process_group import gather_texts
from elche.ddp.group import as_group
from elche.devices.backends import form_group
from elche.errors import CommunicationError
from tests import device as test_device
from tests.comm.joined import joined, meeting
from tests.device import build
from tests.device.test_process_group import here, torch_group
from tests.harness.rank_pool import RankPool

CASE = Path(__file__).parent / "cases" / "dies.py"
SAMPLES, EPOCHS = 256, 3  # the case's; imported, it would take torch's compiler away
AT = 4
ENDS_WITHIN_S = 60.0
LATE_S = 3.0
FORMED_WITHIN_S = 5.0


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if test_device.KIND != test_device.NAME:
        pytest.skip("only the test device has its backend")
    if compiler := build.missing_compiler():
        pytest.skip(f"the test device needs {compiler} to be built")
    build.built()


def await_file(path: Path, is_there: Callable[[str], bool], run: Any) -> str:
    """Text of a file once it is as asked."""
    until_s = time.monotonic() + 120.0
    while not (path.exists() and is_there(path.read_text())):
        assert run.poll() is None, run.communicate()[1][-4000:]
        assert time.monotonic() < until_s, f"{path.name} was not written"
        time.sleep(0.01)
    return path.read_text()


def killed(folder: Path, policy: str, way: str) -> tuple[int, str]:
    """Kills rank 1 while rank 0 waits for it in a sum; exit code and errors."""
    command = [sys.executable, "-m", "elche", "run", "--devices", "tdev:0,tdev:1"]
    run = subprocess.Popen(
        [*command, str(CASE), policy, way, str(AT), str(folder)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        pid = await_file(folder / "waits", bool, run)
        begun = await_file(
            folder / "begun", lambda text: text.startswith(f"{AT} "), run
        )
        os.kill(int(pid), signal.SIGKILL)
        said = run.communicate(timeout=ENDS_WITHIN_S)[1]
    finally:
        run.kill()
    # Windows average parameters on the host.
    assert begun == f"{AT} {way if policy == 'sync' else 'host'}"
    assert "137 (SIGKILL)" in said, said[-4000:]
    return run.returncode, said


@pytest.mark.parametrize(
    ("policy", "way"),
    [
        ("cadence", "own"),
        pytest.param("async", "own", marks=pytest.mark.slow),
        ("sync", "host"),
    ],
)
def test_the_others_survive_a_death_in_a_sum(
    tmp_path: Path, policy: str, way: str
) -> None:
    code, said = killed(tmp_path, policy, way)
    assert code == 0, said[-4000:]
    assert "elche: rank 1 died: continuing with rank 0;" in said
    found = json.loads((tmp_path / "rank0.json").read_text())
    assert found["progress"] == SAMPLES * EPOCHS
    assert found["is_finite"]
    if policy != "sync":  # whose counters are each rank's own
        assert found["seen"] == [EPOCHS] * SAMPLES
    mine, lost = (json.loads((tmp_path / f"trained{r}").read_text()) for r in (0, 1))
    for own, other in zip_longest(mine, lost, fillvalue=()):
        assert {*own, *other} == {*range(SAMPLES)}
    assert sorted(mine[-1]) == [*range(SAMPLES)]


def test_steps_that_devices_sum_end_with_a_death_by_name(tmp_path: Path) -> None:
    code, said = killed(tmp_path, "sync", "own")
    assert code == 137, said[-4000:]
    assert "the death of a rank ends policy='sync' over TDCCL" in said


def late_in_a_users_group() -> str:
    with torch_group() as store:
        group = as_group(None, LATE_S)
        dist.all_reduce(here(1))
        if dist.get_rank() == 1:
            store.get("seen")
            return ""
        with pytest.raises(CommunicationError) as raised:
            group.all_reduce(here(10), "a late sum")
        store.set("seen", "")
        return str(raised.value)


def late_in_a_run() -> str:
    test_device.register()
    with joined("gloo") as group:
        device = torch.device(test_device.NAME, group.rank)
        group.timeout_s = 2 * FORMED_WITHIN_S
        config = DeviceGroupConfig(group.timeout_s, partial(form_group, device))
        devices = open_device_group(group, device, config)
        assert devices is not None
        said = ""
        if group.rank == 0:
            torch.accelerator.set_device_index(device)
            with pytest.raises(CommunicationError) as raised:
                devices.all_reduce_async(here(10)).wait()
            said = str(raised.value)
        gather_texts(group, "", "leaving")
        devices.close()
        return said


@pytest.mark.parametrize("late", [late_in_a_users_group, late_in_a_run])
def test_a_late_sum_is_named_before_the_backend_ends_the_process(
    ranks2: RankPool, late: Callable[[], str]
) -> None:
    said, _ = ranks2.run(late, case_setup=meeting)
    assert "a sum among devices did not end within" in said
