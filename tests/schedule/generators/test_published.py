"""The published bubble tables, and what the papers say about memory."""

from __future__ import annotations

import pytest

from elche.schedule.costs import RankTimes, equal_costs
from elche.schedule.generators.schedules import make_schedule, placement_for
from elche.schedule.timing import Timing, simulate

# Zero Bubble Pipeline Parallelism (ICLR 2024), efficiency.py of its repository: ranks,
# microbatches, TF, TB, TW, Tcomm in ms; bubble rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2.
TABLE = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 0.1323, 0.0698),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 0.1045, 0.0559),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 0.0554, 0.0294),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 0.0516),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 0.0266),
]
# The arXiv version: times are of half a rank's stage; 1F1B, ZB-H1, ZB-H2, ZB-V.
TABLE_V = [
    (16, 48, 14.407, 14.380, 9.676, 1.610, 0.2668, 0.1536, 0.0823, 0.0697),
    (16, 64, 14.412, 14.393, 9.688, 1.621, 0.2206, 0.1198, 0.0630, 0.0533),
    (16, 128, 14.316, 14.306, 9.639, 1.619, 0.1390, 0.0637, 0.0325, 0.0274),
]
# Layers per rank of the 6.2B model and of the others: 1F1B-I's virtual stages.
LAYERS_6B, LAYERS = 4, 3


def timed(
    name: str, ranks: int, count: int, times: RankTimes, chunks: int | None = None
) -> Timing:
    costs = equal_costs(times, placement_for(name, ranks, chunks), ranks)
    return simulate(make_schedule(name, costs, count), costs)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_bubble_rates_of_the_paper(row: tuple[float, ...]) -> None:
    ranks, count, times = int(row[0]), int(row[1]), RankTimes(*row[2:6])
    for name, rate in (("1f1b", row[6]), ("zb-h1", row[8]), ("zb-h2", row[9])):
        assert round(timed(name, ranks, count, times).bubble_span, 4) == rate


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_interleaved_bubble_rates_of_the_paper(row: tuple[float, ...]) -> None:
    """Up to 0.0036 above the paper's, and by a known amount: p messages, in all rows.

    Here the critical path has all 2(vp - 1) messages of the two ramps, in the paper's
    script 2(vp - 1) - p.
    """
    ranks, count, times = int(row[0]), int(row[1]), RankTimes(*row[2:6])
    chunks = LAYERS_6B if times.forward > 20 else LAYERS
    rate = timed("interleaved-1f1b", ranks, count, times, chunks).bubble_span
    assert rate == pytest.approx(row[7], abs=0.0036)
    work = count * sum(row[2:5])
    bubble = work * rate / (1 - rate) - ranks * row[5]
    assert bubble / (bubble + work) == pytest.approx(row[7], abs=0.00006)


@pytest.mark.parametrize("row", TABLE_V, ids=str)
def test_v_placement_of_the_paper(row: tuple[float, ...]) -> None:
    ranks, count = int(row[0]), int(row[1])
    times = RankTimes(2 * row[2], 2 * row[3], 2 * row[4], row[5])
    for name, rate in (("1f1b", row[6]), ("zb-h1", row[7]), ("zb-h2", row[8])):
        assert round(timed(name, ranks, count, times).bubble_span, 4) == rate
    assert timed("zb-v", ranks, count, times).bubble_span == pytest.approx(
        row[9], abs=0.003
    )


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 5])
def test_memory_and_bubbles_of_the_v_schedules(ranks: int) -> None:
    """1, 1/2 and 1/3 of 1F1B's memory at about 0, 1/2 and 2/3 of its bubble."""
    count = 6 * ranks
    times = RankTimes(1.0, 1.0, 1.0)
    bubble = timed("1f1b", ranks, count, times).bubble_makespan
    for name, share, share_of_bubble in (
        ("zb-v", ranks, 0.25),
        ("v-half", (ranks + 2) // 2, 0.56),
        ("v-min", (ranks + 4) // 3, 0.78),
    ):
        timing = timed(name, ranks, count, times)
        assert max(timing.peak_activations) <= share
        assert timing.bubble_makespan <= share_of_bubble * bubble
