"""Metrics of windows and epochs: exact means, in any order, at any world size."""

from __future__ import annotations

import json
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elche.coordination.accounts.metrics import (
    EpochMetrics,
    MetricsBook,
    RankReport,
    WeightedMean,
    WindowMetrics,
)
from elche.coordination.policy import EpochTotals
from elche.coordination.protocol.instructions import EndEpoch, MetricsReported
from elche.errors import ProtocolError
from elche.monitor.event_records import EventRecorder
from elche.monitor.run_history import run_row

FLOATS = st.floats(
    allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30
)
WEIGHTS = st.integers(1, 4096).map(float)


@pytest.mark.parametrize(
    ("samples", "discarded", "busy_s", "efficiency"),
    [
        ((80, 20), (0, 0), (0.8, 0.5), 100 / 140),
        ((80, 10), (0, 10), (0.8, 0.5), 90 / 140),  # what is lost took its time
        ((100, 0), (0, 0), (1.0, 0.0), 1.0),  # a rank without work counts as nothing
        ((0, 0), (0, 0), (0.0, 0.0), 0.0),
    ],
)
def test_efficiency_is_the_rate_over_what_all_ranks_deliver(
    samples: tuple[int, int],
    discarded: tuple[int, int],
    busy_s: tuple[float, float],
    efficiency: float,
) -> None:
    book = opened()
    for rank in (0, 1):
        work = {"samples": samples[rank], "discarded_samples": discarded[rank]}
        book.add(0, RankReport(rank=rank, busy_s=busy_s[rank], **work))
    window = book.close_window(0, 11.0)
    report = MetricsReported(rank=0, epoch=3, window=0, values=window.to_json())
    (record,) = EventRecorder().see(report, 11.0)
    recorded = run_row(record)["efficiency"]
    found = window.efficiency, book.end_epoch(11.0).efficiency, recorded
    assert found == pytest.approx((efficiency,) * 3)


def opened(world_size: int = 2, now_s: float = 10.0) -> MetricsBook:
    return MetricsBook(world_size, 3, now_s)


@given(
    st.lists(st.tuples(FLOATS, WEIGHTS, st.integers(0, 6)), min_size=1),
    st.randoms(use_true_random=False),
)
def test_means_are_exact_in_any_order(
    logged: list[tuple[float, float, int]], order: random.Random
) -> None:
    """Whoever reports first, and in however many reports."""
    exact = sum((Fraction(value) for value, _, _ in logged), start=Fraction(0)) / sum(
        Fraction(weight) for _, weight, _ in logged
    )
    seen = []
    for _ in range(2):
        order.shuffle(logged)
        book = opened(world_size=7)
        for weighted_sum, weight, rank in logged:
            entry = (("loss", weighted_sum, weight),)
            book.add(0, RankReport(rank=rank, scalars=entry))
        seen.append(book.close_window(0, 11.0))
    assert seen[0] == seen[1]
    mean = seen[0].scalars["loss"]
    smallest = Fraction(5e-324)  # what rounding costs where numbers are that small
    assert abs(Fraction(mean) - exact) <= abs(exact) * Fraction(2, 2**52) + smallest


def test_window_says_what_every_rank_did() -> None:
    book = opened()
    fast = RankReport(rank=0, samples=48, busy_s=1.5, data_wait_s=0.25, transfer_s=0.25)
    book.add(5, fast)
    book.add(5, RankReport(rank=0, samples=48, busy_s=0.5, sync_wait_s=0.125))
    book.add(5, RankReport(rank=1, samples=32, busy_s=2.0, sync_wait_s=0.5))
    for batches in (2, 3):
        book.add(5, RankReport(rank=0, late_batches=batches))
    window = book.close_window(5, 12.0, synchronisations=4)
    assert window == WindowMetrics(
        epoch=3,
        window=5,
        synchronisations=4,
        duration_s=2.0,
        rank_samples=(96, 32),
        discarded_samples=(0, 0),
        busy_s=(2.0, 2.0),
        data_wait_s=(0.25, 0.0),
        transfer_s=(0.25, 0.0),
        sync_wait_s=(0.125, 0.5),
        late_batches=(5, 0),
    )
    assert window.totals().late_batches == (5,)
    assert window.samples == 128
    assert window.samples_per_s == 64.0
    assert window.rank_samples_per_s == (48.0, 16.0)
    assert window.shares == (0.75, 0.25)
    assert window.compute_s == (1.5, 2.0)


def test_an_epoch_is_the_sum_of_its_windows() -> None:
    book = opened()
    for number in range(3):
        for rank in range(2):
            report = RankReport(
                rank=rank,
                samples=8 + rank,
                busy_s=0.5,
                sync_wait_s=0.25,
                divergence=0.1 * (number + rank),
                parameter_norm=float(number),
                scalars=(("loss", 8.0 * number, 8.0), ("rare", 1.0, 1.0))[: 2 - rank],
            )
            book.add(number, report)
        assert book.close_window(number, 11.0 + number).duration_s == 1.0
    epoch = book.end_epoch(14.0)
    assert isinstance(epoch, EpochMetrics)
    assert (epoch.epoch, epoch.synchronisations, epoch.duration_s) == (3, 3, 4.0)
    assert epoch.rank_samples == (24, 27)
    assert epoch.busy_s == (1.5, 1.5)
    assert epoch.sync_wait_s == (0.75, 0.75)
    assert epoch.divergence == (0.2, pytest.approx(0.3))
    assert epoch.parameter_norm == 2.0
    assert epoch.scalars == {"loss": 1.0, "rare": 1.0}


def test_an_epoch_in_parts_is_all_of_them() -> None:
    """The second one has a rank more."""
    first, rest = opened(world_size=1), opened(now_s=20.0)
    first.add(0, RankReport(rank=0, samples=1))
    first.close_window(0, 11.0)
    assert first.end_epoch(12.0).duration_s == 2.0
    rest.add(1, RankReport(rank=1, samples=2))
    whole = rest.end_epoch(24.0, first)
    assert (whole.rank_samples, whole.synchronisations) == ((1, 2), 1)
    assert (whole.duration_s, rest.samples) == (14.0, 2)


def test_a_late_report_counts_in_the_next_window_or_the_epoch() -> None:
    book = opened()
    book.add(0, RankReport(rank=0, samples=1))
    book.close_window(0, 11.0)
    book.add(0, RankReport(rank=1, scalars=(("loss", 6.0, 2.0),)))
    assert book.close_window(1, 12.0).scalars == {"loss": 3.0}
    book.add(1, RankReport(rank=1, samples=5))
    assert book.end_epoch(13.0).rank_samples == (1, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_counted_and_left_out(bad: float) -> None:
    book = opened()
    scalars = (("loss", bad, 3.0), ("loss", 6.0, 2.0), ("norm", bad, 1.0))
    book.add(0, RankReport(rank=1, scalars=scalars))
    window = book.close_window(0, 11.0)
    assert window.scalars == {"loss": 3.0}
    assert window.non_finite == {"loss": 3, "norm": 1}
    assert book.end_epoch(12.0).non_finite == {"loss": 3, "norm": 1}


@pytest.mark.parametrize(
    ("entries", "value", "left_out"),
    [
        ([(1.0, 0.0)], None, 0),
        ([(1.0, -1.0)], None, 1),
        ([(1.0, math.nan)], None, 1),
        ([(1.0, math.inf)], None, 1),
        ([(math.inf, 1e300)], None, 1),
        ([(math.inf, 2.0**52)] * 3, None, 2**53),
        ([(1.7e308, 1.0), (1.7e308, 1.0)], None, 1),
        ([(1e300, 1e-300)], None, 1),
    ],
)
def test_strange_entries(
    entries: list[tuple[float, float]], value: float | None, left_out: int
) -> None:
    """Whatever a rank sends, the book holds, and its counts fit into 64 bits."""
    mean = WeightedMean()
    for entry in entries:
        mean.add(*entry)
    assert (mean.value, mean.excluded) == (value, left_out)


def test_divergence_is_there_when_all_have_said_it() -> None:
    book = opened()
    book.add(0, RankReport(rank=0, divergence=0.25))
    assert book.close_window(0, 11.0).divergence == ()
    book.add(1, RankReport(rank=0, divergence=0.5))
    book.add(1, RankReport(rank=1, divergence=math.nan))
    window = book.close_window(1, 12.0)
    assert window.divergence == (0.5, math.inf)
    assert window.as_dict()["divergence"] == [0.5, None]


@given(
    st.lists(st.just(0.0) | st.floats(1e-9, 1e9), min_size=2, max_size=2),
    st.floats(allow_nan=False),
    st.text(min_size=1),
)
def test_metrics_travel_as_text(times_s: list[float], value: float, name: str) -> None:
    book = opened()
    for rank, time_s in enumerate(times_s):
        report = RankReport(
            rank=rank,
            samples=3,
            busy_s=time_s,
            divergence=abs(value),
            parameter_norm=value,
            scalars=((name, value, 2.0),),
        )
        book.add(0, report)
    window, epoch = book.close_window(0, 12.0), book.end_epoch(13.0)
    assert WindowMetrics.from_json(window.to_json()) == window
    assert len({window, WindowMetrics.from_json(window.to_json())}) == 1
    assert EpochMetrics.from_json(epoch.to_json()) == epoch
    plain = window.as_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert opened().close_window(0, 10.0).samples_per_s == 0.0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch": 1, "strange": 2}'])
def test_text_that_is_no_metrics(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected EpochMetrics as JSON, got"):
        EpochMetrics.from_json(text)


def told_of_an_epoch(world_size: int) -> tuple[list[MetricsReported], list[EndEpoch]]:
    totals = EpochTotals(0, world_size, 0.0)
    for rank in range(world_size):
        report = RankReport(
            rank=rank,
            samples=8 + rank,
            busy_s=1.0 + rank,
            data_wait_s=0.25,
            sync_wait_s=0.5,
            divergence=0.001 * rank,
            scalars=(("loss", 16.0, 8.0),),
        )
        totals.add(0, report)
    totals.close_window(0, 10.0, reader=0, sync_s=0.5)
    told = [*totals.end_epoch(range(world_size), 20.0, anchor=3)]
    metrics = [one for one in told if isinstance(one, MetricsReported)]
    ends = [one for one in told if isinstance(one, EndEpoch)]
    assert [one.rank for one in metrics] == [one.rank for one in ends]
    assert [one.rank for one in ends] == list(range(world_size))
    return metrics, ends


def test_of_more_ranks_only_the_first_is_told_and_the_others_the_totals() -> None:
    assert len({one.values for one in told_of_an_epoch(64)[0]}) == 1
    metrics, ends = told_of_an_epoch(65)
    whole = EpochMetrics.from_json(metrics[0].values)
    assert whole.rank_samples == tuple(range(8, 73))
    for one, end in zip(metrics[1:], ends[1:], strict=True):
        small = EpochMetrics.from_json(one.values)
        assert small == whole.totals()
        assert (small.samples, small.samples_per_s) == (whole.samples, 130.0)
        assert (small.scalars, small.parameter_norm) == ({"loss": 2.0}, None)
        assert small.rank_samples_per_s == (2600 / 2145,)
        assert (small.divergence, small.shares) == ((0.064,), (1.0,))
        assert (end.samples, end.windows) == (2600, 1)
        assert (end.anchor, end.sync_s) == (3, 0.5)
