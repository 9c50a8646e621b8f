"""Loops drawn from seeds, on devices whose kernels are late: equal to plain PyTorch.

FUZZ_LOOPS and FUZZ_PAIRS are the seeds of one device and of two ranks, from FUZZ_FIRST.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import elche
from tests.device import autoloaded, delays
from tests.device.cases import draws

FIRST = int(os.environ.get("FUZZ_FIRST", "0"))
LOOPS = range(FIRST, FIRST + int(os.environ.get("FUZZ_LOOPS", "24")))
PAIRS = range(FIRST, FIRST + int(os.environ.get("FUZZ_PAIRS", "8")))
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Largest distance of parameters, of their norm."""


def check(
    found: dict[str, Any],
    expected: dict[str, Any],
    loop: draws.Loop,
    bound: float | None = None,
) -> None:
    ours, theirs = (
        torch.cat([each.double().flatten() for each in one["state"].values()])
        for one in (found, expected)
    )
    distance = float((ours - theirs).norm() / theirs.norm())
    bound = BOUNDS[loop.dtype] if bound is None else bound
    assert distance <= bound, loop
    bound *= 100
    assert found["scores"] == pytest.approx(expected["scores"], bound, bound), loop


@pytest.mark.usefixtures("plain_environment")
@pytest.mark.parametrize("seed", LOOPS)
def test_a_loop_on_late_streams(device: torch.device, seed: int) -> None:
    loop = draws.drawn(seed)
    expected = draws.train(seed, loop)
    with delays(loop.pattern, loop.longest_us, seed + 1):
        found = draws.train(seed, loop, elche)
    check(found, expected, loop)
    if loop.dtype != torch.float32:  # sharper than what rounding leaves
        check(found, draws.train(seed, loop, elche), loop, bound=0.0)
    assert found["samples"] == expected["samples"]


def trained(folder: Path, devices: str, seeds: list[int]) -> list[list[dict[str, Any]]]:
    """What both ranks have left of each seed."""
    folder.mkdir()
    command = [sys.executable, "-m", "elche", "run", "--devices", devices]
    done = subprocess.run(
        [*command, draws.__file__, str(folder), *map(str, seeds)],
        env={**os.environ, "PYTHONPATH": autoloaded()},
        capture_output=True,
        text=True,
        timeout=600 + 30 * len(seeds),
    )
    assert done.returncode == 0, (seeds, done.stderr[-4000:])
    return [
        [torch.load(folder / f"{seed}.{rank}.pt") for rank in range(2)]
        for seed in seeds
    ]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("devices", ["tdev:0,tdev:1", "tdev:0,cpu", "tdev:0,tdev:0"])
def test_two_ranks_on_late_streams(tmp_path: Path, devices: str) -> None:
    """Under `auto`, which may choose any policy, ranks are only equal."""
    third = ["tdev:0,tdev:1", "tdev:0,cpu", "tdev:0,tdev:0"].index(devices)
    seeds = [seed for seed in PAIRS if seed % 3 == third]
    loops = {seed: draws.drawn(seed, policies=True) for seed in seeds}
    windowed = [s for s in seeds if loops[s].policy in ("cadence", "async")]
    on_cpus = trained(tmp_path / "cpus", "cpu,cpu", windowed) if windowed else []
    expected = {s: each[0] for s, each in zip(windowed, on_cpus, strict=True)}
    found = trained(tmp_path / "devices", devices, seeds)
    for seed, (first, second) in zip(seeds, found, strict=True):
        loop = loops[seed]
        assert first["samples"] + second["samples"] == 2 * loop.samples, loop
        check(second, first, loop)
        if loop.policy == "sync":
            expected[seed] = draws.train(seed, loop)
        if loop.policy != "auto":
            check(first, expected[seed], loop)
