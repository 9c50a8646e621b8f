"""``elche schedule``: the drawing, the figures, files, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elche.cli.main import main
from elche.schedule.costs import RankTimes, equal_costs
from elche.schedule.drawing import draw
from elche.schedule.formats import from_csv
from elche.schedule.generators.schedules import FIXED_SCHEDULES, make_schedule
from elche.schedule.timing import simulate

ARGUMENTS = ("--ranks", "4", "--microbatches", "8", "--times", "1,1,1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments])


@pytest.mark.parametrize("name", [*FIXED_SCHEDULES, "auto"])
def test_the_figures_are_written_as_json(name: str) -> None:
    result = run(name, *ARGUMENTS, "--json", "-")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert figures["makespan"] == pytest.approx(24 / (1 - figures["bubble_makespan"]))
    assert figures["bubble_span"] <= figures["bubble_makespan"]
    assert len(figures["peak_activations"]) == figures["ranks"] == 4


@pytest.mark.parametrize(
    ("name", "placement", "ranks", "count", "columns", "drawn"),
    [
        (
            *("1f1b", (0, 1), 2, 2, 27),
            [
                "rank 0 F0-F1-······B0----···B1----",
                "rank 1 ···F0-B0----F1-B1----······",
            ],
        ),
        # Letters of the rank's second stage are small.
        ("gpipe", (0, 0), 1, 1, 24, ["rank 0 F0--f0--b0------B0------"]),
        # Too narrow for the numbers: in two parts.
        (
            *("gpipe", (0,), 1, 7, 32),
            [
                "time 0 to 10.5",
                "rank 0 F0-F1-F2-F3-F4-F5-F6-B0----B1---",
                "time 10.5 to 21",
                "rank 0 --B2----B3----B4----B5----B6----",
            ],
        ),
    ],
)
def test_the_drawing_is_to_scale(
    name: str,
    placement: tuple[int, ...],
    ranks: int,
    count: int,
    columns: int,
    drawn: list[str],
) -> None:
    costs = equal_costs(RankTimes(1.0, 1.0, 1.0), placement, ranks)
    made = make_schedule(name, costs, count)
    assert draw(made, simulate(made, costs), costs, 7 + columns).splitlines() == drawn


def test_the_figures_are_told() -> None:
    result = run("1f1b", "--ranks", "2", "--microbatches", "2", "--times", "1,1,1")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line[:9] for line in lines[:2]] == ["rank 0 F0", "rank 1 ··"]
    assert "1f1b: 2 ranks, 2 stages, 2 microbatches" in lines
    assert "makespan          9" in lines
    assert "bubble_makespan   0.3333" in result.output
    assert "bubble_span       0.3333" in result.output
    assert "peak_activations  2, 1" in lines


def test_auto_tries_as_many_stages_as_it_may() -> None:
    """Forwards twice as long as the rest: four stages per rank are worth 14 %."""
    arguments = ("--ranks", "6", "--microbatches", "5", "--times", "2,1,0.2")
    makespans = []
    for more in ((), ("--virtual-stages", "4")):
        result = run("auto", *arguments, *more, "--json", "-")
        assert result.exit_code == 0, result.output
        makespans.append(json.loads(result.output)["makespan"])
    assert makespans == [pytest.approx(24.1), pytest.approx(21.05)]
    fixed = run("interleaved-zb", *arguments, "--virtual-stages", "4", "--json", "-")
    assert json.loads(fixed.output)["makespan"] == pytest.approx(makespans[1])


def test_a_schedule_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert run("zb-h1", *ARGUMENTS, "--csv", str(path)).exit_code == 0
    assert from_csv(path.read_text()).num_ranks == 4
    result = run(str(path), "--times", "1,1,1", "--json", "-")
    assert result.exit_code == 0, result.output
    other = run(str(path), "--times", "1,1,1", "--ranks", "8")
    assert "is for 4 ranks, not for --ranks 8" in " ".join(other.output.split())
    figures = json.loads(result.output)
    assert (figures["schedule"], figures["makespan"]) == ("mine", 27.0)


def test_a_schedule_file_keeps_within_memory(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    assert run("zb-h1", *ARGUMENTS, "--csv", str(path)).exit_code == 0
    enough = run(str(path), "--times", "1,1,1", "--memory", "4")
    assert enough.exit_code == 0, enough.output
    result = run(str(path), "--times", "1,1,1", "--memory", "3")
    assert result.exit_code == 2
    told = "mine holds up to 4 units of activations on rank 0, above its memory limit"
    assert told in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "rank 1 stops at its action 1, 1F1"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n",
            "1F0 needs 0SEND_F0",
        ),
        ("0F0,0X0\n", "expected an action such as 2F0"),
        ("0F0\n", "lacks 0I0, 0W0"),
    ],
)
def test_schedule_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    result = run(str(path), "--times", "1,1,1")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", *ARGUMENTS), "expected gpipe, 1f1b"),
        (("auto", *ARGUMENTS, "--microbatches", "0"), "0 is not in the range x>=1"),
        (("auto", *ARGUMENTS, "--ranks", "0"), "0 is not in the range x>=1"),
        (("auto", *ARGUMENTS, "--memory", "0.5"), "its limit is 0.5"),
        (("auto", *ARGUMENTS, "--memory", "nan"), "--memory above 0"),
        (("zb-h2", *ARGUMENTS, "--memory", "4"), "its memory limit of 4"),
        (("auto", *ARGUMENTS, "--times", "1,1"), "three numbers F,I,W"),
        (("auto", *ARGUMENTS, "--times", "1,1,-1"), "a stage's weight_gradient"),
        (("auto", *ARGUMENTS, "--times", "0,0,0"), "that are not all 0"),
        (
            ("auto", *ARGUMENTS, "--comm", "-1"),
            "--comm to be a finite number >= 0, got -1",
        ),
        (("zb-v", *ARGUMENTS, "--virtual-stages", "3"), "zb-v has two stages per rank"),
        (("gpipe", *ARGUMENTS, "--virtual-stages", "0"), "not in the range x>=1"),
        (
            ("interleaved-1f1b", *ARGUMENTS, "--microbatches", "9"),
            "got 9 microbatches; use a multiple of 2, such as 8",
        ),
        (
            ("auto", "--stages", "stages.toml"),
            "`elche schedule --stages` was removed: `elche plan pipeline FILE`",
        ),
        (("no-such.csv", *ARGUMENTS), "cannot read no-such.csv"),
        (("auto", *ARGUMENTS, "--json", "/no/such/place"), "cannot write"),
    ],
)
def test_what_cannot_be_asked(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
