"""`benchmarks.hetero`: settings, statistics, rejection, and a short real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.hetero import bench
from benchmarks.hetero.__main__ import hetero
from benchmarks.hetero.bench import BenchConfig, run_bench
from benchmarks.hetero.verdict import BenchVerdict
from elche.config import POLICIES
from elche.demo.compare import ContenderRun
from elche.monitor.results import ContenderResult
from tests.demo.fake_runs import rank_result, run_of

ALL_KINDS = (
    "solo-0",
    "indep",
    "ddp",
    "ddp-split",
    *(f"elche-{policy}" for policy in POLICIES),
)


@pytest.fixture(autouse=True)
def nothing_starts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails a test that starts a contender without being marked for it."""
    if request.node.get_closest_marker("distributed") is None:

        def refuse(*args: Any, **more: Any) -> None:
            raise AssertionError("a contender was started")

        monkeypatch.setattr(bench, "run_contender", refuse)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--speeds 1,-1", "expected positive numbers"),
        ("--speeds 1,nan", "expected positive numbers"),
        ("--speeds fast", "expected numbers like"),
        ("--speeds 1", "expected 2 to 32"),
        ("--speeds 1,0.5 --model none", "unknown model 'none'"),
        ("--speeds 1,1,1,1,1,1,1,1,1 --model gpt-10m", "expected 2 to 8"),
        ("--speeds 1,0.5 --contenders ddp,none", "unknown contender 'none'"),
        ("--speeds 1,0.5 --seconds 0", "expected positive --seconds"),
        ("--speeds 1,0.5 --seconds nan", "expected positive --seconds"),
        ("--speeds 1,0.5 --seeds 0", "--seeds of at least 1"),
        ("--speeds 1,0.5 --ms-per-sample 0", "expected --ms-per-sample to be a pos"),
        ("--speeds 1,0.5 --fixed-ms -1", "expected --fixed-ms to be a finite number"),
        ("--speeds 1,1,1 --batch-size 2", "expected 2 to 2 --speeds"),
        ("--speeds 1,0.001", "leave ddp-split out"),
        ("--speeds 1,0.5 --json /", "cannot write /"),
        ("--speeds 1,0.5 --json /no/such/folder/x.json", "cannot write /no/such"),
        ("", "Missing option '--speeds'"),
        ("--speeds 1,0.5 --optimizer x", "unknown optimizer 'x'; choose one of adamw"),
    ],
)
def test_bad_settings_end_with_code_2(options: str, message: str) -> None:
    result = CliRunner().invoke(hetero, options.split())
    assert result.exit_code == 2
    assert message in result.output


def test_a_checked_file_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bench.json"

    def interrupted(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "run_contender", interrupted)
    options = ["--speeds", "1,0.5", "--json", str(path)]
    result = CliRunner().invoke(hetero, options)
    assert result.exit_code == 130
    assert "interrupted" in result.output
    assert not path.exists()


def test_the_same_samples_for_all_but_the_capped() -> None:
    config = BenchConfig(speeds=(1.0, 0.25), seconds=10)
    specs = {name: config.spec(name, seed=3) for name in config.names}
    assert {spec.samples for spec in specs.values()} == {9984}  # whole batches
    assert {spec.seed for spec in specs.values()} == {3}
    capped = [name for name, spec in specs.items() if spec.max_seconds is not None]
    assert capped == ["solo-1", "indep"]
    assert config.run_on("solo-1").speeds == (0.25,)
    assert specs["ddp"].shares == ()
    assert specs["ddp-split"].shares == (1.0, 0.25)
    assert config.names[-4:] == tuple(f"elche-{policy}" for policy in POLICIES)


def test_a_workload_may_have_batches_of_its_own() -> None:
    config = BenchConfig(
        speeds=(1.0, 0.25),
        model="gpt-10m",
        seconds=61,
        ms_per_sample=40,
        time_capped=True,
    )
    specs = [config.spec(name, 0) for name in config.names]
    assert {spec.batch_size for spec in specs} == {8}
    assert config.samples == 1904  # 1906.25 in whole batches


def test_batches_and_their_fixed_time_make_the_run_as_long_as_asked() -> None:
    config = BenchConfig(
        speeds=(1.0, 0.25), ms_per_sample=1.0, fixed_ms=28.0, batch_size=112, seconds=10
    )
    # 112 samples in 140 ms and in 476 ms
    assert config.rates == pytest.approx((800.0, 112 / 0.476))
    assert config.samples == round(10 * sum(config.rates) / 112) * 112
    assert {config.spec(name, 0).batch_size for name in config.names} == {112}


def test_each_kind_has_its_bound() -> None:
    config = BenchConfig(speeds=(1.0, 0.25), ms_per_sample=1.0, contenders=ALL_KINDS)
    alone = (32 / 0.036, 32 / 0.132)  # 4 ms a batch beside its samples
    bound = {name: config.bound(name, alone) for name in config.names}
    whole = 32 / sum(alone)
    assert bound["solo-0"] is None
    assert bound["indep"] is None
    assert bound["ddp"] == pytest.approx(whole / 0.068)  # 16 samples of 4 ms
    assert bound["ddp-split"] == pytest.approx(whole / 0.030)  # 26 and 6
    assert bound["elche-sync"] == pytest.approx(whole / 0.030)
    windows = (16 / 0.020 + 16 / 0.068) / sum(alone)
    assert bound["elche-async"] == pytest.approx(windows)
    assert bound["elche-auto"] == pytest.approx(max(windows, whole / 0.030))


def test_time_capped_gives_ddp_what_it_can_do_in_time() -> None:
    config = BenchConfig(speeds=(1.0, 0.25), seconds=10, time_capped=True)
    assert config.spec("ddp", 0).samples == 4000
    assert config.spec("solo-0", 0).max_seconds == 10


def fake_results(
    config: BenchConfig, control: float = 1.0, cadence_loss: float = 2.0
) -> dict[str, list[ContenderRun]]:
    """Devices of 800 and 200 samples/s, seeds that differ by one per cent."""
    runs: dict[str, list[ContenderRun]] = {name: [] for name in config.names}
    for seed in range(config.seeds):
        quick = 1 + seed / 100
        both = {
            "ddp": 400 * quick,
            "ddp-split": 900 * quick,
            "elche-sync": 940 * quick,
            "elche-cadence": 970 * quick,
            "elche-async": 980 * quick,
            "elche-auto": 960 * quick,
        }
        for name in config.names:
            if name == "indep":
                rates = [800 * quick * control, 200 * quick * control]
            elif name.startswith("solo-"):
                rates = [(800.0, 200.0)[int(name[-1])] * quick]
            else:
                rates = [both[name]] * 2
            last = cadence_loss + seed / 1000 if name == "elche-cadence" else 2.0
            ranks = [
                rank_result(rate, (4.0, last), windows=250 if "elche" in name else 0)
                for rate in rates
            ]
            runs[name].append(run_of(name, *ranks))
    return runs


def verdict_of(config: BenchConfig, **settings: Any) -> BenchVerdict:
    return BenchVerdict(fake_results(config, **settings), config.devices.count)


def rows_of(verdict: BenchVerdict) -> dict[str, ContenderResult]:
    """The table by contender."""
    return {row.name: row for row in verdict.table}


def test_efficiency_is_paired_by_seed() -> None:
    verdict = verdict_of(BenchConfig(speeds=(1.0, 0.25), seeds=3))
    rows = rows_of(verdict)
    assert rows["elche-cadence"].efficiency == pytest.approx(0.97)
    assert rows["ddp"].efficiency == pytest.approx(0.4)
    assert rows["solo-0"].samples_per_s == pytest.approx(808)
    assert rows["solo-0"].samples_per_s_spread == pytest.approx(16 / 808)
    assert verdict.control == pytest.approx(1.0)
    assert not verdict.rejected
    assert verdict.warnings == []


def test_the_median_is_that_of_the_seeds_efficiencies() -> None:
    rates = {"solo-0": (100.0, 200.0, 300.0), "elche-sync": (50.0, 40.0, 90.0)}
    runs = {
        name: [run_of(name, rank_result(rate)) for rate in seeds]
        for name, seeds in rates.items()
    }
    # 0.5, 0.2 and 0.3; the median rates would give 0.25
    assert rows_of(BenchVerdict(runs, 1))["elche-sync"].efficiency == pytest.approx(0.3)


def test_the_bound_stands_beside_the_measured_value() -> None:
    config = BenchConfig(speeds=(1.0, 0.25))
    runs = fake_results(config)
    verdict = BenchVerdict(runs, 2, bound=lambda name, alone: sum(alone) / 1250)
    assert rows_of(verdict)["ddp"].bound == pytest.approx(1000 / 1250)


def test_a_loss_is_compared_only_where_all_samples_were_trained() -> None:
    rows = rows_of(verdict_of(BenchConfig(speeds=(1.0, 0.25))))
    without = [name for name, row in rows.items() if row.eval_loss is None]
    assert without == ["solo-1", "indep"]


def test_the_interval_of_paired_losses() -> None:
    config = BenchConfig(speeds=(1.0, 0.25), seeds=2)
    said = "\n".join(verdict_of(config, cadence_loss=2.02).remarks)
    # 1.000 and 1.050 %: the half is 12.7062 times 0.025 %
    assert (
        "elche-cadence: evaluation loss +1.02% against solo-0 at equal samples"
        " (95 % interval +0.71% to +1.34%, 2 seeds)"
    ) in said
    assert "ddp: evaluation loss" not in said
    one_seed = verdict_of(BenchConfig(speeds=(1.0, 0.25)))
    assert "evaluation loss" not in "\n".join(one_seed.remarks)


def test_without_all_devices_alone_there_is_no_efficiency() -> None:
    config = BenchConfig(speeds=(1.0, 0.25), contenders=("solo-0", "elche-cadence"))
    verdict = verdict_of(config)
    assert rows_of(verdict)["solo-0"].efficiency is None
    assert any("no control" in warning for warning in verdict.warnings)


@pytest.mark.parametrize(("allow_noise", "code"), [(False, 3), (True, 0)])
def test_a_noisy_run_is_rejected(
    allow_noise: bool,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = BenchConfig(speeds=(1.0, 0.25), allow_noise=allow_noise)
    runs = fake_results(config, control=0.9)
    monkeypatch.setattr(
        bench, "run_contender", lambda name, *args, **more: runs[name][0]
    )
    path = tmp_path / "bench.json"
    assert run_bench(config, str(path)) == code
    values = json.loads(path.read_text())
    assert values["rejected"] is not allow_noise
    assert "the machine was busy" in values["remarks"][-1]
    assert [*values["runs"]] == [*values["contenders"]] == [*config.names]
    shown = capsys.readouterr().out
    assert ("REJECTED" in shown) is not allow_noise
    assert "90.0% of the sum" in shown
    assert "Emulated" in shown


def test_few_windows_and_overruns_are_said() -> None:
    cadence = rank_result(windows=199, overrun_s=1.0)
    runs = {"elche-cadence": [run_of("elche-cadence", cadence, cadence)]}
    said = "\n".join(BenchVerdict(runs, 2).warnings)
    assert "had 199 windows; the standard gate wants 200" in said
    assert "exceeded the emulated time by 10.0%" in said


@pytest.mark.slow
@pytest.mark.distributed
def test_a_short_run_prints_the_table_and_keeps_what_ranks_measured(
    tmp_path: Path,
) -> None:
    options = "--speeds 1,0.5 --seconds 0.3 --seeds 1 --contenders solo-0,elche-sync"
    command = [sys.executable, "-m", "benchmarks.hetero", *options.split()]
    path = tmp_path / "bench.json"
    done = subprocess.run(
        [*command, "--json", str(path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(path.read_text())
    assert list(values["contenders"]) == ["solo-0", "elche-sync"]
    assert values["settings"]["speeds"] == [1.0, 0.5]
    assert values["rejected"] is False
    ours, alone = (values["contenders"][name] for name in ("elche-sync", "solo-0"))
    assert ours["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-3)
    (rank, _) = values["runs"]["elche-sync"][0]
    assert rank["windows"] == rank["samples"] / 32
    assert "samples/s" in done.stdout
    assert "hardware eff." not in done.stdout  # one device alone is missing
    assert "elche-sync: finished" in done.stderr
