"""`elche demo`: what is made of the figures, bad input, and a short real run."""

from __future__ import annotations

import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elche.cli.main import main
from elche.demo import demo
from elche.demo.compare import ContenderRun, Devices
from elche.demo.demo import SPEEDS, DemoConfig, choose_devices, run_contenders
from elche.demo.outcome import DemoOutcome, draw
from elche.devices import choice
from elche.monitor.progress import TaskProgress
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
    honest = DemoOutcome(EMULATED, runs_with(overrun_s=0.05))
    assert "stretched by sleeping to 1.25 ms and 5 ms per sample" in honest.emulated
    assert "by 4.8% of the training time at most (in elche-cadence)" in honest.emulated
    assert not honest.warning
    real = DemoOutcome(Devices(names=("cuda:0", "cpu")), runs_with()).emulated
    assert real.startswith("Nothing was emulated: a device and a device.")


@pytest.mark.parametrize("planted", [{"overrun_s": 0.6}, {"starved_s": 0.2}])
def test_a_disturbed_run_gets_no_verdict(planted: dict[str, float]) -> None:
    runs = runs_with()
    worst = rank_result(910.0, **planted)
    runs["elche-auto"] = run_of("elche-auto", rank_result(910.0), worst)
    outcome = DemoOutcome(EMULATED, runs)
    rows = {row.name: row for row in outcome.table}
    auto, sync = rows["elche-auto"], rows["elche-sync"]
    assert outcome.disturbed == {"elche-auto"}
    assert outcome.headline.startswith("DISTURBED by a busy machine:\n")
    marked = re.match(r"DISTURBED .* machine: elche-auto \((\d+)%\)", outcome.warning)
    said = re.search(r"by ([0-9.]+)% of .* \(in elche-auto\)", outcome.emulated)
    assert marked
    assert said
    assert round(float(said[1])) == int(marked[1])  # one measure
    assert auto.note == "DISTURBED, both devices"
    assert (auto.gain, auto.efficiency, auto.time_to_loss_s) == (None, None, None)
    assert (auto.samples_per_s, sync.gain) == (pytest.approx(910), pytest.approx(1.15))
    assert "elche-auto" not in " ".join(outcome.sentences)


@pytest.mark.parametrize("name", ["solo", "ddp", "elche-sync"])
def test_without_its_controls_the_demo_gives_no_verdict(name: str) -> None:
    runs = runs_with()
    ranks = [rank | {"starved_s": rank["train_s"] / 10} for rank in runs[name].ranks]
    outcome = DemoOutcome(EMULATED, runs | {name: run_of(name, *ranks)})
    lost = {row.name for row in outcome.table if row.gain is None}
    assert lost == ({*outcome.curves} if name == "solo" else {name})
    assert outcome.sentences == ["No verdict: a run that it needs was disturbed."]
    assert f"{name} (10%)" in outcome.warning


def test_a_slow_device_alone_may_stop_early() -> None:
    runs = runs_with()
    slow = rank_result(200.0, (4.0, 3.5), samples=400)
    outcome = DemoOutcome(
        EMULATED, runs | {"solo": run_of("solo", rank_result(), slow)}
    )
    row = outcome.table[1]
    assert outcome.target_loss == 2.1
    assert (row.efficiency, row.eval_loss, row.gain) == (pytest.approx(0.2), None, None)
    assert row.note == "a device, stopped early"


@pytest.mark.parametrize("step_s", [30.0, 47.0, 60.0, 100.0])
@pytest.mark.parametrize(("second_s", "share"), [(0.0, 0.0), (9.0, 0.9)])
def test_a_disturbed_run_is_repeated_once_within_twice_the_estimate(
    step_s: float,
    second_s: float,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun: list[str] = []

    def run(name: str, spec: Any, devices: Any, show: Any, trace: Any) -> ContenderRun:
        begun.append(name)
        show(1, 32)
        show(0, 8000)
        starved_s = {"ddp": 2.0 if begun.count(name) == 1 else second_s}.get(name, 0.0)
        return run_of(name, *[rank_result(100.0, starved_s=starved_s)] * 2)

    monkeypatch.setattr(demo, "run_contender", run)
    monkeypatch.setattr("time.monotonic", lambda: step_s * len(begun))
    caplog.set_level(logging.INFO, "elche.monitor.progress")
    config = DemoConfig(out=Path())
    with TaskProgress() as progress:
        runs = run_contenders(config, EMULATED, (800.0, 200.0), 16_000, progress)
    assert [*runs] == ["solo", "ddp", "elche-sync", "elche-auto", "elche-cadence"]
    if step_s > 30.0:  # of 143 s for all; 6 of 47 s end before 286 s
        assert begun == [*runs, *["ddp"] * (step_s == 47.0)]
        return
    assert begun == [*runs, "ddp"]
    assert runs["ddp"].disturbance == pytest.approx(share)
    assert bool(DemoOutcome(EMULATED, runs).warning) == (share > 0)
    assert "demo: 12 %, 1 of 5, about 4 min left (solo)" in caplog.messages
    assert "demo: 88 %, 6 of 6, about 20 s left (ddp)" in caplog.messages


def test_the_picture_shows_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = pytest.importorskip("matplotlib.figure")
    draw(DemoOutcome(EMULATED, runs_with()), tmp_path / "loss.png")
    assert 10_000 < (tmp_path / "loss.png").stat().st_size < 80_000
    seen: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, path: seen.append(self))
    busy = runs_with() | {"ddp": run_of("ddp", rank_result(400.0, starved_s=1.0))}
    for runs in (runs_with(), busy):
        draw(outcome := DemoOutcome(EMULATED, runs), tmp_path)
        left, right = seen[-1].axes
        (x_min, x_max), (y_min, y_max) = left.get_xlim(), left.get_ylim()
        for line, (name, curve) in zip(
            left.lines, outcome.curves.items(), strict=False
        ):
            assert line.get_label() == name
            assert line.get_linestyle() == (":" if name in outcome.disturbed else "-")
            assert all(x_min <= x <= x_max and y_min <= y <= y_max for x, _, y in curve)
        assert seen[-1].get_suptitle() == outcome.headline
        shares = [text.get_text().strip() for text in right.texts[2:4]]
        assert shares == ["disturbed" if outcome.disturbed else "40%", "92%"]
    assert "1.15 times as fast as the fastest device" in seen[0].get_suptitle()


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
        (["--text", str(tmp_path / "none"), *out], "does not exist"),
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
    last = done.stdout.rstrip().splitlines()[-1]
    if done.stdout.startswith("DISTURBED"):
        assert last.startswith("These figures say little.")
    else:
        assert last.startswith("Emulated: ")
    assert re.search(r"demo: \d+ %, \d of \d+, about .* left", done.stderr)
    assert "demo: finished after" in done.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"batch", "data wait", "sync"} <= {e.get("cat") for e in events}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {0, 1}
    values = json.loads((tmp_path / "table.json").read_text())
    assert values["contenders"]["elche-sync"]["eval_loss"] == pytest.approx(
        values["contenders"]["solo-0"]["eval_loss"], rel=1e-3
    )
