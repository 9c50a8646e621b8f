"""`elche demo`: what is made of the figures, bad input, and a short real run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from elche.cli.main import main
from elche.demo.compare import ContenderRun, Devices
from elche.demo.demo import SPEEDS, choose_devices
from elche.demo.outcome import DemoOutcome
from elche.devices import choice
from tests.demo.fake_runs import rank_result, run_of

EMULATED = Devices(speeds=(1.0, 0.25))


def runs_with(
    cadence_rate: float = 950.0,
    cadence_losses: tuple[float, ...] = (4.0, 3.0, 2.1),
    sync_rate: float = 920.0,
    auto_rate: float = 910.0,
    overrun_s: float = 0.0,
) -> dict[str, ContenderRun]:
    def both(rate: float, losses: tuple[float, ...] = (4.0, 3.0, 2.0)) -> list:
        return [rank_result(rate, losses, overrun_s=overrun_s)] * 2

    def chose(policy: str, ranks: list) -> list:
        return [rank | {"choices": [("sync", ""), (policy, "why")]} for rank in ranks]

    return {
        "solo": run_of("solo", rank_result(800.0), rank_result(200.0)),
        "ddp": run_of("ddp", *both(400.0)),
        "elche-sync": run_of("elche-sync", *both(sync_rate)),
        "elche-auto": run_of("elche-auto", *chose("async", both(auto_rate))),
        "elche-cadence": run_of("elche-cadence", *both(cadence_rate, cadence_losses)),
    }


def test_the_table_holds_both_efficiencies_and_the_gain() -> None:
    outcome = DemoOutcome(EMULATED, runs_with())
    rows = {row.name: row for row in outcome.table}
    names = ["solo-0", "solo-1", "ddp", "elche-sync", "elche-auto", "elche-cadence"]
    assert list(rows) == names
    assert outcome.target_loss == 2.1
    assert rows["solo-0"].efficiency == pytest.approx(0.8)
    assert rows["elche-cadence"].efficiency == pytest.approx(0.95)
    assert rows["elche-cadence"].sample_efficiency == pytest.approx(0.95)
    assert rows["elche-cadence"].time_to_loss_s == pytest.approx(1000 / 950)
    assert rows["elche-cadence"].gain == pytest.approx(0.95 * 950 / 800)
    assert rows["solo-1"].gain == pytest.approx(0.25)
    assert rows["elche-sync"].note == "both devices"
    assert rows["elche-auto"].note == "both devices, chose async"


def test_the_words_follow_the_figures() -> None:
    good = " ".join(DemoOutcome(EMULATED, runs_with()).sentences)
    assert (
        "elche-sync, the default, trains 920 samples per second on both devices, 92%"
        in good
    )
    assert "1.15 times as fast as the fastest device alone" in good
    assert "2.30 times as fast as DistributedDataParallel" in good
    assert "did not pay" not in good
    bad = " ".join(
        DemoOutcome(
            EMULATED, runs_with(cadence_rate=500, sync_rate=400, auto_rate=450)
        ).sentences
    )
    assert "only 0.59 times as fast as the fastest device alone" in bad
    assert "elche-sync, elche-auto, elche-cadence did not pay" in bad
    same = " ".join(
        DemoOutcome(
            EMULATED, runs_with(sync_rate=800, cadence_rate=1, auto_rate=1)
        ).sentences
    )
    assert "just as fast as the fastest device alone" in same


def test_a_diverged_contender_has_no_time_to_the_loss() -> None:
    runs = runs_with(cadence_losses=(4.0, 5.0, math.nan))
    outcome = DemoOutcome(EMULATED, runs)
    row = next(row for row in outcome.table if row.name == "elche-cadence")
    assert outcome.target_loss == 2.0
    assert row.time_to_loss_s is None
    assert row.gain is None
    assert "elche-cadence did not pay" in " ".join(outcome.sentences)


def test_it_says_what_was_emulated_and_how_well() -> None:
    honest = DemoOutcome(EMULATED, runs_with(overrun_s=0.05)).emulated
    assert "stretched by sleeping to 1.25 ms and 5 ms per sample" in honest
    assert "by 0.5% at most" in honest
    assert "too much" not in honest
    busy = DemoOutcome(EMULATED, runs_with(overrun_s=0.5)).emulated
    assert "by 5.0% at most (in ddp). That is too much" in busy
    real = DemoOutcome(Devices(names=("cuda:0", "cpu")), runs_with()).emulated
    assert real.startswith("Nothing was emulated: a device and a device.")


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([], Devices(speeds=SPEEDS)),
        (["A"], Devices(names=("cuda:0", "cpu"))),
        (["A", "A", "B"], Devices(names=("cuda:0", "cuda:2"))),
        (["A", "A"], Devices(speeds=SPEEDS)),
    ],
)
def test_unequal_accelerators_are_taken_where_there_are_any(
    cards: list[str], expected: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"cuda:{index}" for index in range(len(cards))]
    monkeypatch.setattr(choice, "device_names", lambda: names)
    monkeypatch.setattr(choice, "product_name", lambda device: cards[device.index])
    assert choose_devices() == expected


def test_figures_hold_the_table_and_the_facts() -> None:
    values = DemoOutcome(EMULATED, runs_with()).figures({"text": "a poem"})
    assert (values["emulated"], values["text"]) == (True, "a poem")
    assert values["contenders"]["ddp"]["efficiency"] == pytest.approx(0.4)


def test_a_bad_text_or_directory_ends_with_code_2(tmp_path: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text("too short")
    out = ["--out", str(tmp_path / "out")]
    for options, message in (
        (["--text", str(tmp_path / "none"), *out], "cannot read the text"),
        (["--text", str(small), *out], "give a longer text"),
        (["--out", str(small)], "is a file"),
        (["--seconds", "0", *out], "expected --seconds to be a positive"),
        (["--out", str(small / "below")], "cannot make the directory"),
    ):
        result = CliRunner().invoke(main, ["demo", *options])
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "elche", "demo", "--seconds", "0.5"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    ours = ("elche-cadence", "elche-sync", "elche-auto")
    for name in ("solo-0", "solo-1", "ddp", *ours):
        assert f"\n{name} " in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].startswith("Emulated: ")
    assert "elche cadence: finished" in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"batch", "data wait", "sync"} <= {e.get("cat") for e in events}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
    values = json.loads((tmp_path / "table.json").read_text())
    assert values["contenders"]["elche-sync"]["eval_loss"] == pytest.approx(
        values["contenders"]["solo-0"]["eval_loss"], rel=1e-3
    )
