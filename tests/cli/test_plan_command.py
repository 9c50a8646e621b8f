"""``elche plan pipeline``: the report, the figures, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elche.cli.main import main
from elche.schedule.generators.schedules import FIXED_SCHEDULES

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipeline_devices.toml"
LAYERS = """
microbatches = 8

[[layer]]
name = "embedding"
times_s = { gpu = [0.001, 0, 0.001], cpu = [0.004, 0, 0.004] }
activation_bytes = 1e3
output_bytes = 1e6
parameter_bytes = 4e6

[[layer]]
name = "block"
count = 10
times_s = { gpu = [0.01, 0.01, 0.01], cpu = [0.1, 0.1, 0.1] }
backward_s = { gpu = 0.018 }
activation_bytes = 4e6
output_bytes = 1e6
parameter_bytes = 1e6

[[device]]
name = "card"
count = 2
kind = "gpu"
memory_bytes = 100e6

[[device]]
name = "host"
kind = "cpu"
speed = 0.5

[link]
latency_s = 20e-6
bytes_per_s = 1e9

[[link_between]]
devices = ["card-0", "host"]
bytes_per_s = 1e8
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", "pipeline", *arguments])


def figures(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json", "-")
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.output)
    return read


@pytest.fixture
def layers(tmp_path: Path) -> str:
    path = tmp_path / "layers.toml"
    path.write_text(LAYERS)
    return str(path)


def test_the_figures_of_the_example() -> None:
    read = figures(str(EXAMPLE))
    assert read["microbatches"] == 16
    assert read["layers"] == 26 == sum(read["partition"])
    assert read["ideal_s"] <= read["step_time_s"] <= 1.12 * read["ideal_s"]
    assert read["step_time_s"] >= read["makespan_s"]
    assert len(read["placement"]) == len(read["partition"])
    assert read["unused_devices"] == []
    assert {each["device"] for each in read["ranks"]} == {
        *("fast-0", "fast-1", "far", "slow")
    }
    layers = sorted(
        layer
        for each in read["ranks"]
        for first, last in each["layers"]
        for layer in range(first, last + 1)
    )
    assert layers == list(range(26))
    for each in read["ranks"]:
        assert each["memory_bytes"] <= each["memory_limit_bytes"]
        assert each["memory_bytes"] == (
            each["state_bytes"] + each["peak_activation_bytes"]
        )
    names = [each["schedule"] for each in read["alternatives"]]
    assert names == [*FIXED_SCHEDULES, "auto"]
    for each in read["alternatives"]:
        if each["fits"]:
            assert each["step_time_s"] >= read["step_time_s"] * (1 - 1e-8)
            assert each["missing_bytes"] == 0
        else:
            assert each["reason"]
    assert read["equal_split"]["partition"] == [7, 7, 6, 6]
    assert read["equal_split"]["step_time_s"] > 2 * read["ideal_s"]


def test_the_report_says_what_the_json_says(layers: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run(layers, "--json", str(path))
    assert result.exit_code == 0, result.output
    read = json.loads(path.read_text())
    lines = result.output.splitlines()
    assert lines[0].startswith("time 0 to ")
    assert lines[1].startswith("rank 0 F")
    for key in ("step_time_s", "ideal_s", "sum_bound_s"):
        assert any(line.split()[:2] == [key, f"{read[key]:.6g}"] for line in lines)
    for rank, each in enumerate(read["ranks"]):
        first, last = each["layers"][0]
        assert f"  rank {rank} {each['device']}: layers {first} to {last}" in (
            result.output
        )
    assert read["unused_devices"] == ["host"]
    assert "host gets no layers" in result.output
    for each in read["alternatives"]:
        shown = [
            line.split() for line in lines if line.split()[:1] == [each["schedule"]]
        ]
        assert shown[0][1] == f"{each['step_time_s']:.6g}"
    assert any(line.endswith("(the plan)") for line in lines)


def test_the_host_is_used_when_asked(layers: str) -> None:
    without, forced = figures(layers), figures(layers, "--all-devices")
    assert forced["unused_devices"] == []
    assert forced["step_time_s"] > without["step_time_s"]
    assert {each["device"] for each in forced["ranks"]} == {"card-0", "card-1", "host"}


def test_one_schedule_is_asked_for(layers: str) -> None:
    read = figures(layers, "--schedule", "zb-v", "--microbatches", "5")
    assert (read["schedule"], read["microbatches"]) == ("zb-v", 5)
    looped = figures(
        layers, "--schedule", "interleaved-1f1b", "--stages-per-device", "3"
    )
    assert len(looped["partition"]) == 6


def test_the_format_in_the_help_is_one_that_can_be_read(tmp_path: Path) -> None:
    """It is a file, once a second device is there."""
    result = run("--help")
    assert result.exit_code == 0
    _, found = result.output.split("The file; ")
    path = tmp_path / "help.toml"
    table, links = found.split("\n", 1)[1].split("  [link]")
    path.write_text(f"{table}[[device]]\nname = 'b'\n[link]{links}")
    assert sum(figures(str(path))["partition"]) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--microbatches", "0"), "microbatches to be an int >= 1, got 0"),
        (("--stages-per-device", "0"), "stages_per_device to be an int >= 1, got 0"),
        (("--draw", "plan.svg"), "--draw` was removed: the terminal shows"),
        (("--json", "/no/such/place"), "cannot write"),
        (("--schedule", "2f2b"), "'2f2b' is not one of"),
        (
            ("--schedule", "interleaved-zb", "--stages-per-device", "9"),
            "9 stages on each of 2 devices exceed 11 layers",
        ),
        (
            ("--microbatches", "32", "--schedule", "gpipe"),
            "the schedule gpipe cannot run here: device card-",
        ),
    ],
)
def test_what_cannot_be_asked(
    layers: str, arguments: tuple[str, ...], message: str
) -> None:
    result = run(layers, *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


DEVICE = "[[device]]\nname='a'\n"
LAYER = "[[layer]]\ntimes_s=[1, 1, 1]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "is not TOML"),
        (
            "[gpt]\nblocks = 2\n" + DEVICE,
            "[gpt] and flops_per_s were removed: write [[layer]]",
        ),
        ("speed = 1\n" + LAYER, "the file: unknown key 'speed'"),
        (LAYER, "no devices to plan for"),
        ("layer = []\n" + DEVICE, "the model has no layers"),
        (LAYER + DEVICE, "give the number of --microbatches"),
        (
            "microbatches = 0\n" + LAYER + DEVICE,
            "of at least 1 for microbatches, got 0",
        ),
        ("state_factor = 0\n" + LAYER + DEVICE, "state_factor of at least 1"),
        (LAYER + "count = true\n" + DEVICE, "[[layer]] 0: expected a whole number"),
        (LAYER + "cost = 1\n" + DEVICE, "[[layer]] 0: unknown key 'cost'"),
        (LAYER + "name = 3\n" + DEVICE, "0: expected a string for name, got 3"),
        (
            LAYER + DEVICE.replace("'a'", "''"),
            "[[device]] 0: expected a name of at least one character",
        ),
        (LAYER + "name = ''\n" + DEVICE, "[[layer]] 0: expected a name of at least"),
        (LAYER + "backward_s = 'x'\n" + DEVICE, "a number for backward_s"),
        (
            LAYER + "activation_bytes = -1\n" + DEVICE,
            "activation_bytes to be a finite number >= 0",
        ),
        ("[[layer]]\ntimes_s = [1, 1]\n" + DEVICE, "expected times_s = [F, I, W]"),
        (
            "[[layer]]\ntimes_s = [1, 1, -1]\n" + DEVICE,
            "[[layer]] 0: expected weight_gr",
        ),
        (
            "[[layer]]\ntimes_s = { gpu = 3 }\n" + DEVICE,
            "[[layer]] 0, kind 'gpu': expected times_s = [F, I, W], got 3",
        ),
        (
            "[[layer]]\ntimes_s = { gpu = [1, 1, 1] }\n" + DEVICE,
            "has times for devices of kind 'gpu', none for ''",
        ),
        (
            LAYER + DEVICE + "speed = 0",
            "[[device]] 0: expected speed of device a to be",
        ),
        (
            LAYER + DEVICE + "kind = 3",
            "[[device]] 0: expected a string for kind, got 3",
        ),
        (LAYER + DEVICE + "memory_bytes = 0", "expected memory_bytes above 0"),
        (LAYER + DEVICE + DEVICE, "two devices are called 'a'"),
        (LAYER + DEVICE + "[link]\nlatency_s = -1", "[link]: expected latency_s to be"),
        (LAYER + DEVICE + "[link]\nefficiency = 2", "[link]: efficiency must be above"),
        (
            LAYER + DEVICE + "[[link_between]]\ndevices = ['a', 'b']",
            "[[link_between]] 0: expected devices = two of a, got ['a', 'b']",
        ),
        (
            "microbatches = 1\n"
            + LAYER
            + "parameter_bytes = 9\n"
            + DEVICE
            + "memory_bytes = 30",
            "the layers need 36 bytes for their parameters",
        ),
    ],
)
def test_plan_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    result = run(str(path))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
