"""Cluster descriptions: what a file may say, and what a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from elche.errors import ConfigError
from elche.sim.cluster import Device, Link
from elche.sim.cluster_file import read_cluster

GOOD: dict[str, Any] = {
    "run": {
        "policy": "async",
        "samples": 300_000,
        "epochs": 2,
        "batch_size": 24,
        "model_bytes": 40_000_000,
        "seed": 7,
        "windows": {"anchor": 3},
    },
    "device": [
        {"count": 3, "seconds_per_sample": 0.0007, "jitter": 0.2},
        {
            "count": 1,
            "seconds_per_sample": 0.0119,
            "drift": [{"at_s": 9.0, "factor": 3}, {"at_s": 5, "factor": 2.0}],
        },
    ],
    "link": {"latency_s": 0.002, "bytes_per_s": 125e6},
    "link_change": [{"at_s": 20, "bytes_per_s": 1e6}, {"at_s": 10, "latency_s": 0.1}],
    "fault": [
        {"at_s": 30.0, "kill_rank": 1},
        {"at_s": 40.0, "join": 0},
        {"at_s": 50.0, "join": {"seconds_per_sample": 0.001}},
    ],
}


def with_change(table: str, at: int | None, key: str, value: Any) -> dict[str, Any]:
    """The good file with one key of one table changed."""
    changed: dict[str, Any] = {
        name: [dict(each) for each in part] if isinstance(part, list) else dict(part)
        for name, part in GOOD.items()
    }
    (changed[table] if at is None else changed[table][at])[key] = value
    return changed


def test_a_file_is_read_with_its_defaults() -> None:
    cluster = read_cluster(GOOD)
    assert cluster.world_size == 4
    assert cluster.run.config.windows.anchor == 3
    assert cluster.run.sizes == ((24, 12_500),)
    assert [device.count for device in cluster.devices] == [3, 1]
    drifts = sorted(cluster.devices[1].drift, key=lambda one: one.at_s)
    assert [(drift.at_s, drift.factor) for drift in drifts] == [(5, 2.0), (9.0, 3)]
    assert isinstance(cluster.faults[2].join, Device)
    assert cluster.link_at(0.0) == Link(latency_s=0.002, bytes_per_s=125e6)
    assert cluster.link_at(15.0).latency_s == 0.1
    assert cluster.link_at(25.0).bytes_per_s == 1e6
    assert cluster.link_at(25.0).latency_s == 0.1


@pytest.mark.parametrize(
    ("table", "at", "key", "value", "said"),
    [
        ("run", None, "sample", 3, ": unknown key 'sample'"),
        ("run", None, "samples", 0, ": expected samples to be an int >= 1"),
        ("run", None, "samples", "many", "a whole number for samples, got 'many'"),
        ("run", None, "epochs", True, "a whole number for epochs, got True"),
        ("run", None, "policy", "best", ": unknown policy 'best'"),
        ("run", None, "windows", {"anchor": 0}, ": expected anchor"),
        ("run", None, "windows", {"anker": 1}, ": unknown option 'anker' of W"),
        ("run", None, "anchor", 3, ": anchor= is now windows="),
        ("run", None, "debug", {"replay": "plan.json"}, "replay"),
        ("device", 1, "speed", 3, ": unknown key 'speed'"),
        ("device", 0, "count", 0, ": expected count to be an int"),
        ("device", 0, "jitter", -0.1, ": expected jitter to be"),
        ("device", 1, "drift", [{"at_s": 1.0}], ", drift 0: the key 'factor' is missi"),
        ("device", 1, "drift", 3, ": drift must be a list"),
        ("device", 0, "spike_probability", 1.5, ": spike_probability must be at most"),
        ("link", None, "bytes_per_s", 0, ": expected bytes_per_s to be a"),
        ("link", None, "efficiency", 1.3, ": efficiency must be above 0 and"),
        ("link", None, "efficiency", 0, ": efficiency must be above 0 and"),
        (
            "device",
            0,
            "curve",
            [[1, 0.1], [2, 0.2]],
            ": give one of seconds_per_sample",
        ),
        ("link_change", 0, "bytes_per_s", "x", ": expected a number for bytes_per_s"),
        ("fault", 0, "kill_rank", 9, ": there is no rank 9"),
        ("fault", 0, "join", 0, ": give exactly one of"),
        ("fault", 1, "join", 2, ": join = 2 names no"),
        ("fault", 2, "join", {"count": 1}, ", join: give one of"),
        ("fault", 0, "at_s", float("nan"), ": expected at_s to be a"),
    ],
)
def test_a_mistake_is_named_with_its_table(
    table: str, at: int | None, key: str, value: Any, said: str
) -> None:
    name = rf"\[{table}\]" if at is None else rf"\[\[{table}\]\] {at}"
    with pytest.raises(ConfigError, match=f"{name}.*{said}"):
        read_cluster(with_change(table, at, key, value))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({}, r"needs a table \[run\]"),
        ({"run": {"samples": 8}}, r"at least one \[\[device\]\]"),
        ({**GOOD, "device": {"count": 1}}, r"write \[\[device\]\], a list"),
        ({**GOOD, "devices": []}, r"the file: unknown key 'devices'"),
        ({**GOOD, "run": {"epochs": 1}}, r"\[run\]: the key 'samples' is missing"),
        ({**GOOD, "link": 3}, r"\[link\]: expected a table, got 3"),
        (
            {**GOOD, "device": [{"count": 2}]},
            r"\[\[device\]\] 0: give one of seconds_per",
        ),
    ],
)
def test_a_file_without_the_needed_tables_is_refused(
    raw: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_cluster(raw)


def test_what_a_reduction_costs() -> None:
    link = Link(latency_s=0.001, bytes_per_s=2e6, efficiency=0.5)
    assert link.reduce_s(1e6, 1) == 0.0
    assert link.reduce_s(1e6, 2) == pytest.approx(0.002 + 1.0)
    assert link.reduce_s(1e6, 5) == pytest.approx(0.006 + 1.6)
    assert link.broadcast_s(1e6, 5) == pytest.approx(0.003 + 1.0)


def with_curve(curve: Any, **more: Any) -> dict[str, Any]:
    return {"run": {"samples": 8}, "device": [{"curve": curve, **more}]}


def test_a_curve_is_straight_between_its_points_and_goes_on_at_its_end() -> None:
    raw = with_curve([[2, 0.1], [4, 0.1], [8, 0.3]])
    [device] = read_cluster(raw).devices
    times_s = [device.compute_s(samples) for samples in (1, 2, 3, 4, 6, 8, 16)]
    assert times_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.2, 0.3, 0.7])
    assert device.mean_batch_s(6) == pytest.approx(0.2)
    steep = Device(curve=((4, 0.1), (8, 0.4)))  # its line is negative at 1
    assert steep.compute_s(1) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (3, "curve must be a list of .samples, seconds., got 3"),
        ([[1, 0.1], [2]], "curve must be a list of .samples, seconds."),
        ([[1, 0.1], [2, "x"]], "curve must be a list of .samples, seconds."),
        ([[1, 0.1]], "curve needs at least two points, got 1"),
        ([[1, 0.1], [2, 0.0]], r"finite and positive, got \[2, 0.0\]"),
        ([[1, 0.1], [2, float("inf")]], r"finite and positive, got \[2, inf\]"),
        ([[4, 0.1], [2, 0.2]], "curve must be sorted by samples, got 2 after 4"),
        ([[2, 0.1], [2, 0.2]], "curve must be sorted by samples, got 2 after 2"),
        ([[1, 0.2], [2, 0.1]], "curve must not fall at its end"),
    ],
)
def test_a_wrong_curve_is_named(curve: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[\[device\]\] 0: .*{said}"):
        read_cluster(with_curve(curve))


def test_a_curve_holds_the_fixed_time() -> None:
    with pytest.raises(ConfigError, match="omit seconds_per_batch"):
        read_cluster(with_curve([[1, 0.1], [2, 0.2]], seconds_per_batch=0.1))
