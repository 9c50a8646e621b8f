"""``elche simulate``: report, JSON, timeline, and what goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from elche.cli.main import main

CLUSTER = """
[run]
policy = "async"
samples = 6_000
batch_size = 24
model_bytes = 4_000_000
seed = 7
[[device]]
count = 3
name = "fast"
seconds_per_sample = 0.0007
jitter = 0.2
[[device]]
seconds_per_sample = 0.0119
[link]
latency_s = 0.002
bytes_per_s = 125e6
"""
KILL = """
[[fault]]
at_s = 0.5
kill_rank = 1
"""


def simulate(tmp_path: Path, text: str, *options: str) -> Result:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return CliRunner().invoke(main, ["simulate", str(path), *options])


@pytest.mark.parametrize("policy", ["sync", "cadence", "async", "auto"])
def test_a_cluster_is_simulated_and_told(tmp_path: Path, policy: str) -> None:
    result = simulate(tmp_path, CLUSTER, "--policy", policy)
    assert result.exit_code == 0, result.output
    assert f"policy {policy}, 4 ranks: 6000 samples" in result.output
    assert "µs per event" in result.output
    assert "rank 0 fast" in result.output
    assert "times the fastest device alone" in result.output
    chosen = re.findall(r"at +[\d.]+ s +auto: (\w+) on ", result.output)
    assert len(chosen) == (policy == "auto")


def test_the_figures_are_written_as_json(tmp_path: Path) -> None:
    result = simulate(tmp_path, CLUSTER + KILL, "--json", "-")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert 0.5 < figures["efficiency"] <= 1.0
    # Long windows, at twice their price in a run so short; on three ranks after 0.5 s.
    assert figures["sample_efficiency"] == pytest.approx(0.67, abs=0.03)
    assert [phase["policy"] for phase in figures["phases"]] == ["async"]
    assert figures["choices"] == []
    assert set(figures["waits"]) >= {"data", "lease", "window end", "reduction"}
    assert figures["coordinator_us_per_event"] > 0
    assert figures["messages_per_s"] > 0
    assert len(figures["recovery_s"]) == 1
    assert 0.0 < figures["recovery_s"][0] < 2.0
    assert [rank["has_died"] for rank in figures["ranks"]] == [
        False,
        True,
        False,
        False,
    ]
    path = tmp_path / "figures.json"
    result = simulate(tmp_path, CLUSTER, "--json", str(path))
    assert json.loads(path.read_text())["policy"] == "async"
    assert "efficiency" in result.output


def test_the_timeline_is_a_trace_as_of_a_real_run(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = simulate(tmp_path, CLUSTER, "--trace", str(path))
    assert result.exit_code == 0, result.output
    trace = json.loads(path.read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    batches = [span for span in spans if span["cat"] == "batch"]
    assert len(batches) == 6_000 // 24 * 4  # local ones of four ranks
    assert {span["pid"] for span in batches} == {0, 1, 2, 3}


def test_a_run_that_ends_early_says_so(tmp_path: Path) -> None:
    fault = KILL.replace("kill_rank", "fail_rank")
    result = simulate(tmp_path, CLUSTER + fault, "--policy", "sync")
    assert result.exit_code == 1
    assert "the run was aborted: rank 1 failed: ValueError" in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run", "is not TOML"),
        (CLUSTER.replace("jitter", "jitters"), "[[device]] 0: unknown key 'jitters'"),
        (CLUSTER.replace("async", "best"), "unknown policy 'best'"),
    ],
)
def test_a_wrong_file_is_a_usage_error_that_names_it(
    tmp_path: Path, text: str, said: str
) -> None:
    result = simulate(tmp_path, text)
    assert result.exit_code == 2
    assert said in result.output
    assert "cluster.toml" in result.output


def test_stories_are_printed_after_the_report(tmp_path: Path) -> None:
    asked = ("rank:1", "lease:12", "lease:0/12", "lease:9/12")
    options = [part for one in asked for part in ("--story", one)]
    result = simulate(tmp_path, CLUSTER + KILL, *options)
    assert result.exit_code == 0, result.output
    report, *stories = re.split(r"story of (\S+):\n", result.output)
    assert "efficiency" in report
    told = dict(zip(stories[::2], stories[1::2], strict=True))
    assert tuple(told) == asked
    assert "<- Join(rank=1" in told["rank:1"]
    assert "!! lost (disconnected); the others continue" in told["rank:1"]
    assert "rank=0" not in told["rank:1"]
    assert "-> GrantBatches(rank=" in told["lease:12"]
    assert told["lease:12"] == told["lease:0/12"]
    assert "nothing among the last 50000" in told["lease:9/12"]


@pytest.mark.parametrize("wanted", ["rank", "rank:x", "lease:", "lease:1/2/3", "me"])
def test_a_story_of_nothing_is_a_usage_error(tmp_path: Path, wanted: str) -> None:
    result = simulate(tmp_path, CLUSTER, "--story", wanted)
    assert result.exit_code == 2
    assert "expected --story all, rank:1, lease:12" in result.output


def test_a_story_of_no_rank_is_a_usage_error(tmp_path: Path) -> None:
    result = simulate(tmp_path, CLUSTER, "--story", "rank:9")
    assert result.exit_code == 2
    assert "--story rank:9: there is no rank 9; ranks are 0 to" in result.output
