"""Waits of whole runs on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.test_ranks import TWO, run


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_host_is_at_most_two_batches_ahead(tmp_path: Path, policy: str) -> None:
    slow = {"TEST_DEVICE_KERNEL_US": "0:3000,1:3000"}
    found = run(tmp_path, TWO, "paces.py", policy, **slow)
    assert sum(each["batches"] for each in found) == 64
    assert [each["late"] for each in found] == [0, 0]
