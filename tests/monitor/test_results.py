"""The table of contenders."""

from __future__ import annotations

import json
import math

import pytest

from elche.monitor.results import (
    ContenderResult,
    contenders_to_json,
    plain_table,
    time_to_loss,
)

RESULTS = [
    ContenderResult(name="solo-0", samples_per_s=741.26, eval_loss=1.4711, gain=1.0),
    ContenderResult(
        name="elche-cadence",
        samples_per_s=905.0,
        samples_per_s_spread=0.02,
        efficiency=0.9662,
        bound=0.97,
        sample_efficiency=0.98,
        eval_loss=math.nan,
        time_to_loss_s=12.34,
        gain=1.18,
    ),
]


def test_plain_text_is_aligned_and_omits_what_nobody_has() -> None:
    head, solo, cadence = plain_table(RESULTS).splitlines()
    assert len(head) == len(solo) == len(cadence)
    assert head.startswith("contender")
    assert head.endswith("gain")
    assert solo.split() == ["solo-0", "741.3", *"---", "1.4711", "-", "1.00x"]
    assert " 905.0 ±1.0%  " in cadence
    assert cadence.split()[3:] == ["96.6%", "97.0%", "98%", "nan", "12.3", "s", "1.18x"]
    assert plain_table([]) == ""


def test_json_has_no_numbers_that_json_lacks() -> None:
    values = json.loads(json.dumps(contenders_to_json(RESULTS), allow_nan=False))
    assert values["elche-cadence"]["efficiency"] == 0.9662
    assert values["elche-cadence"]["eval_loss"] is None
    assert "name" not in values["solo-0"]


def test_time_to_loss_interpolates() -> None:
    curve = [(0.0, 4.0), (10.0, 2.0), (20.0, 2.5), (30.0, 1.0)]
    assert time_to_loss(curve, 3.0) == pytest.approx(5.0)
    assert time_to_loss(curve, 2.0) == pytest.approx(10.0)
    assert time_to_loss(curve, 1.75) == pytest.approx(25.0)
    assert time_to_loss(curve, 5.0) == 0.0
    assert time_to_loss(curve, 0.5) is None
    assert time_to_loss([], 1.0) is None
    assert time_to_loss([(0.0, 3.0), (1.0, math.nan), (2.0, 1.0)], 2.0) == 1.0
