"""Starting contenders, reading their results, and saying why one failed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elche.demo import compare
from elche.demo.compare import Devices, run_contender, whole_batches
from elche.demo.contender import ContenderSpec, starved_total_s
from elche.demo.workload import SegmentSampler, SplitBatches, split_edges
from elche.errors import ConfigError, RemoteRankError
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult
from tests.demo.fake_runs import rank_result, run_of

DEVICES = Devices(speeds=(1.0, 0.5), ms_per_sample=0.5)


def test_devices_are_emulated_or_real() -> None:
    with pytest.raises(ConfigError, match="either speeds"):
        Devices()
    with pytest.raises(ConfigError, match="either speeds"):
        Devices(speeds=(1.0,), names=("cpu",))
    spec, wrong = ContenderSpec(kind="solo", samples=32), (1.0, float("nan"))
    with pytest.raises(ConfigError, match="expected --speeds"):
        run_contender("solo", spec, Devices(speeds=wrong))
    assert Devices(names=("cuda:0", "cpu")).only(1).names == ("cpu",)
    assert DEVICES.only(1).speeds == (0.5,)
    assert DEVICES.nominal_samples_per_s(32) == (2000.0, 1000.0)


def test_samples_make_whole_batches_in_equal_segments() -> None:
    assert whole_batches(1000) == 992
    assert whole_batches(1000, segments=8) == 1024
    assert whole_batches(1, segments=8) == 256


def test_parts_of_a_batch_meet_and_cover_it() -> None:
    shares = (1.0, 0.25, 0.4)
    parts = [
        list(SplitBatches(SegmentSampler(96, 1, seed=0), 32, list(shares), rank))
        for rank in range(3)
    ]
    whole = list(iter(SegmentSampler(96, 1, seed=0)))
    joined = [[sample for part in parts for sample in part[i]] for i in range(3)]
    assert [sorted(batch) for batch in joined] == [
        sorted(whole[i * 32 : i * 32 + 32]) for i in range(3)
    ]
    assert split_edges(32, (1.0, 0.25))[1:] == [26, 32]


def test_disturbance_is_overrun_or_waiting_for_a_core_of_the_worst_rank() -> None:
    starved = rank_result(100.0, starved_s=2.0)  # of 10 s
    overrun = rank_result(100.0, overrun_s=1.0, nominal_s=5.0)
    assert run_of("x", overrun, starved).disturbance == pytest.approx(0.2)
    assert run_of("x", rank_result(), overrun).disturbance == pytest.approx(0.1)
    assert starved_total_s() >= 0.0


def test_a_failure_names_contender_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: LaunchConfig) -> LaunchResult:
        Path(config.command[-1]).with_name("stderr-1.txt").write_text("a\nno text")
        return LaunchResult((0, 1), "rank 1 ended\nmore", (), 1)

    monkeypatch.setattr(compare, "launch", fail)
    spec = ContenderSpec(kind="solo", samples=32)
    with pytest.raises(
        RemoteRankError,
        match=r"(?s)ddp failed: ranks \[1\].*: rank 1 ended\n.*of rank 1.*no text",
    ) as caught:
        run_contender("ddp", spec, DEVICES)
    assert caught.value.failed_rank == 1


@pytest.mark.parametrize(
    "result",
    [
        LaunchResult((1, 1), "interrupted: SIGTERM", (0, 1), 0, signal.SIGTERM),
        LaunchResult((130,), "", (), 0),
    ],
)
def test_an_interrupted_run_interrupts(
    result: LaunchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "launch", lambda config: result)
    spec = ContenderSpec(kind="solo", samples=32)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run_contender("solo-0", spec, DEVICES)


@pytest.mark.distributed
def test_devices_alone_side_by_side_each_train_everything() -> None:
    spec = ContenderSpec(kind="solo", samples=128, segments=2)
    seen: set[int] = set()
    run = run_contender("solo", spec, DEVICES, lambda rank, done: seen.add(rank))
    assert seen == {0, 1}
    assert [rank["samples"] for rank in run.ranks] == [128, 128]
    assert [point[1] for point in run.curve(1)] == [0, 64, 128]
    assert [point[2] for point in run.curve(0)] == [point[2] for point in run.curve(1)]
