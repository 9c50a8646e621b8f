"""``elche doctor``: what is found, predicted and printed."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from elche.cli import doctor_command
from elche.cli.doctor_findings import (
    MachineFacts,
    RankReport,
    cost_of_steps,
    findings,
    predictions,
)
from elche.cli.main import main

SOUND = MachineFacts(
    versions={"elche": "0.1.0", "python": "3.12.1", "torch": "2.13.0+cu130"},
    platform="Linux x86_64",
    cores=8,
    accelerators=(),
    has_nvidia=False,
    shm_bytes=1 << 34,
    open_files=4096,
    loopback_error="",
    environment={},
)
RANK = RankReport(
    rank=0,
    device="cpu",
    name="CPU",
    sample_s=1e-3,
    fixed_s=1e-3,
    overrun=0.0,
    links={},
    reduction_s=1e-3,
)


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert findings(SOUND, ["cpu", "cuda:0", "cuda:1"]) == []


@pytest.mark.parametrize(
    ("changed", "devices", "severity", "said"),
    [
        ({"versions": {"torch": "2.8.1"}}, [], "broken", "2.9 or newer"),
        ({"loopback_error": "no route"}, [], "broken", "loopback .* no route"),
        ({"shm_bytes": 64 << 20}, [], "warning", "64 MiB.*--shm-size"),
        ({"open_files": 256}, [], "warning", "ulimit -n"),
        ({"has_nvidia": True}, [], "warning", "CUDA build"),
        (
            {"has_nvidia": True, "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            [],
            "warning",
            "CUDA_VISIBLE_DEVICES=''",
        ),
        ({"environment": {"RANK": "0"}}, [], "warning", "RANK set in this shell"),
        ({"accelerators": ("cuda",)}, [], "note", "never been run on cuda"),
        ({"accelerators": ("mps",)}, [], "note", "never been run on mps"),
        ({}, ["cuda:0", "cpu", "cuda:0"], "warning", r"\[0, 2\] share cuda:0"),
        ({}, ["cpu"] * 9, "warning", "9 ranks compute on 8 cores"),
        (
            {"environment": {"OMP_NUM_THREADS": "8"}},
            ["cpu", "cpu"],
            "warning",
            "OMP_NUM_THREADS=8",
        ),
    ],
)
def test_what_is_wrong_is_named(
    changed: dict[str, object], devices: list[str], severity: str, said: str
) -> None:

    (found,) = findings(replace(SOUND, **changed), devices)  # type: ignore[arg-type]
    assert found.severity == severity
    assert re.search(said, found.text)


def test_the_worst_comes_first() -> None:
    machine = replace(SOUND, accelerators=("mps",), open_files=1)
    found = findings(machine, [], failure="rank 1 ended")
    assert [each.severity for each in found] == ["broken", "warning", "note"]


@given(
    sample_s=st.floats(1e-6, 1.0), fixed_s=st.floats(0.0, 1.0), size=st.integers(2, 999)
)
def test_the_cost_of_steps_is_found_again(
    sample_s: float, fixed_s: float, size: int
) -> None:
    times_s = {n: fixed_s + n * sample_s for n in (size, max(1, size // 4))}
    found_s = cost_of_steps(times_s)
    assert found_s == pytest.approx((sample_s, fixed_s), rel=1e-6, abs=1e-9)


def test_policies_are_predicted_for_what_was_measured() -> None:
    slow = replace(RANK, rank=1, sample_s=4e-3)
    predicted, choice = predictions([RANK, slow], 128)
    assert [each.policy for each in predicted] == ["sync", "cadence", "async"]
    assert all(1.0 < each.goodput < 1.25 for each in predicted)
    assert choice.startswith("sync on 2 ranks")
    assert predictions([RANK], 128) == ([], "")


def test_devices_that_bring_nothing_together_are_named() -> None:
    ranks = [replace(RANK, rank=rank, reduction_s=10.0) for rank in range(2)]
    predicted, _ = predictions(ranks, 4)
    ranks = [replace(rank, overrun=0.5) for rank in ranks]
    found = findings(SOUND, ["cpu", "cpu"], ranks, predicted[:1])
    assert [each.text.split()[0] for each in found] == ["rank", "rank", "these"]


def test_what_is_broken_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> socket.socket:
        raise OSError("no loopback here")

    monkeypatch.setattr(doctor_command.socket, "create_server", refuse)
    path = tmp_path / "doctor.json"
    result = CliRunner().invoke(main, ["doctor", "--json", str(path)])
    assert result.exit_code == 1
    assert "broken: loopback (127.0.0.1) cannot be used: no loopback" in result.output
    (found, *_) = json.loads(path.read_text())["findings"]
    assert found["severity"] == "broken"


@pytest.mark.slow
@pytest.mark.distributed
def test_devices_and_links_are_measured() -> None:
    options = ["--speeds", "1,0.5", "--parameters", "20000", "--batch-size", "16"]
    result = CliRunner().invoke(main, ["doctor", *options, "--json", "-"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    first, second = figures["ranks"]
    assert set(first["links"]) >= {"gloo"}
    assert second["reduction_s"] > 0
    assert first["sample_s"] > 0
    assert {"sync", "cadence", "async"} == set(figures["policies"])
    assert figures["auto"]
