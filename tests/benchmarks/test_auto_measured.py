"""What a sample is worth in the benchmark of `auto` is the table's, lag counted."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from elche.cadence.convergence import sample_efficiency

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(policy: str, late: list[float]) -> dict[str, Any]:
    per_seed = {
        "choices": [[]],
        "window_samples": [14.0 * 16],
        "late_batches": [late],
        "efficiency": [0.95],
    }
    return {
        "contenders": {f"elche-{policy}": {"per_seed": per_seed}},
        "speeds": [0.25, 1.0],
        "batch_size": 32,
    }


@pytest.mark.parametrize(("policy", "late"), [("async", 6.5), ("cadence", 0.0)])
def test_a_late_average_costs_samples_under_async_alone(
    monkeypatch: pytest.MonkeyPatch, policy: str, late: float
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("auto_measured")
    found = measured(policy, [1.0, 6.5])  # rank 1 is the fastest
    row = benchmark.goodput(found, policy, 0)
    worth = sample_efficiency(policy, 2, 14.0, late)
    assert row["late_batches"] == late
    assert row["sample_efficiency"] == worth
    assert row["product"] == 0.95 * worth
    assert row["goodput"] == pytest.approx(0.95 * worth * 1.25)
    if policy == "async":
        assert worth < sample_efficiency(policy, 2, 14.0)
    found["gate"] = {"control_efficiency": 1.0}
    assert f"{late:.1f}" in benchmark.report(found, {policy: [row]})
