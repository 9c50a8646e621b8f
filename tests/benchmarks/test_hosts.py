"""Pairs of runs on several hosts and on one: what is run, and which pairs count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts.__main__ import ALONE, ONE, SEVERAL, STANDBY, report
from benchmarks.hosts.bench import HostsConfig, HostsRun
from benchmarks.hosts.pairs import ratio_of, undisturbed
from benchmarks.links.bench import LinkBenchConfig
from benchmarks.links.namespaces import SENT_BYTES
from elche.demo.verdict import CONTROL
from elche.errors import ConfigError


def config(*speeds: float, **settings: Any) -> HostsConfig:
    bench = LinkBenchConfig(
        speeds=speeds, contenders=(CONTROL,), link_mbit=100.0, solo_seconds=4.0
    )
    return HostsConfig(bench=bench, **settings)


def test_a_pair_counts_between_two_controls_that_were_not_disturbed() -> None:
    assert undisturbed([100.0, 98.0, 96.0, 97.0, 100.0], 101.0) == [0, 3]
    assert undisturbed([100.0, 90.0], 100.0) == []
    assert undisturbed([75.0, 75.0], 100.0) == []  # busy all the time


def test_a_ratio_is_over_pairs_and_not_over_means() -> None:
    found = ratio_of([90.0, 180.0], [100.0, 200.0])
    assert found is not None
    assert found.mean == pytest.approx(0.9)
    assert found.low == pytest.approx(found.high) == pytest.approx(0.9)
    wide = ratio_of([90.0, 110.0], [100.0, 100.0])
    assert wide is not None
    assert wide.low is not None
    assert wide.high is not None
    assert wide.low < 0.9 < 1.1 < wide.high
    single = ratio_of([90.0], [100.0])
    assert single is not None
    assert single.low is None
    assert ratio_of([], []) is None


def test_a_sum_is_between_hosts() -> None:
    ranks, hosts = config(1, 1, 1, 1), config(1, 1, 1, 1, ranks_per_host=2)
    assert (ranks.hosts, hosts.hosts) == (4, 2)
    assert hosts.reduction_s == pytest.approx(ranks.reduction_s * (1 / 2) / (3 / 4))


def test_ranks_fill_two_hosts_or_more() -> None:
    with pytest.raises(ConfigError, match="two or more hosts with 2 ranks each, got 3"):
        config(1, 1, 1, ranks_per_host=2)
    with pytest.raises(ConfigError, match="two or more hosts with 2 ranks each, got 2"):
        config(1, 1, ranks_per_host=2)
    with pytest.raises(ConfigError, match="without a standby, which 3 have"):
        config(1, 1, 1, has_witness=True)


def test_all_train_the_same_but_for_the_place(tmp_path: Path) -> None:
    three = config(1, 0.5, 0.25, overhead_target=0.01)
    here = three.spec("cadence", 3, tmp_path, linked=False)
    there = three.spec("cadence", 3, tmp_path, linked=True)
    assert here.sent_counter is None
    assert there.sent_counter == str(SENT_BYTES)
    assert (here.samples, here.options) == (there.samples, there.options)
    assert here.options["windows"] == {"overhead_target": 0.01}
    assert here.max_seconds is None  # all samples, the last reduction included
    assert three.spec("sync", 0, tmp_path, linked=True).max_seconds == 60.0
    alone = three.spec(CONTROL, 0, tmp_path, linked=False)
    assert (alone.kind, alone.max_seconds, alone.options) == ("solo", 4.0, {})


def test_the_table_is_of_undisturbed_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    def pair(one: float, several: float) -> dict[str, HostsRun]:
        return {
            ONE: HostsRun(one, 20, 12, 0.0, 0.001),
            SEVERAL: HostsRun(several, 10, 24, 5e5, 0.02),
        }

    runs = {
        "async": [pair(100.0, 1.0), pair(200.0, 196.0), pair(100.0, 98.0)],
        "sync": [pair(100.0, 50.0)],  # beside the first control, which was disturbed
    }
    three = config(1, 0.5, 0.25)
    best = sum(three.bench.rates)
    found = report(three, [best * part for part in (0.9, 1.0, 0.99, 1.0)], runs)
    assert set(found) == {"async"}
    assert found["async"]["pairs"] == 2
    assert found["async"]["ratio"] == pytest.approx(0.98)
    assert found["async"]["of_indep"] == pytest.approx(147.0 / best)
    shown = capsys.readouterr().out
    assert "2 of 3 pairs undisturbed" in shown
    assert "0.980 to 0.980" in shown
    assert "sync     no pair is left" in shown


def test_a_standby_is_beside_none(capsys: pytest.CaptureFixture[str]) -> None:
    two = config(1, 0.5, has_witness=True)
    best = sum(two.bench.rates)
    pair = {
        ALONE: HostsRun(100.0, 20, 12, 5e5, 0.001),
        STANDBY: HostsRun(98.0, 20, 12, 5e5, 0.002),
    }
    found = report(two, [best] * 3, {"sync": [pair, pair]})
    assert found["sync"]["ratio"] == pytest.approx(0.98)
    assert found["sync"]["of_indep"] == pytest.approx(98.0 / best)
    heads = capsys.readouterr().out.splitlines()[3].split()
    assert heads[:4] == ["policy", *ALONE.split(), STANDBY]
