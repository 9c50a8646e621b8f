"""Data of the page's charts and tables: bounded, complete, without markup of a run."""

from __future__ import annotations

import math

import pytest

from elche.monitor.page.rows import (
    PARTS,
    ChartRows,
    bar_columns,
    event_columns,
    row_columns,
)
from elche.monitor.page.words import events_html, head_html, ranks_html
from elche.monitor.run_history import RunHistory
from tests.harness.event_lines import START_S, event, records


def history_of(*found: object, **sizes: float) -> RunHistory:
    history = RunHistory()
    for record in (*records(**sizes), *found):  # type: ignore[arg-type]
        history.take(record)
    return history


def test_columns_show_each_rank_and_the_run() -> None:
    history = history_of(windows=3)
    found = row_columns(history, ChartRows(history).rows, 2, ["loss", "other"])
    assert found["time"] == [1, 2, 3]
    assert found["samples"] == [120, 240, 360]
    assert found["samples_per_s"] == [120] * 3
    assert found["device_samples_per_s"] == [150] * 3
    assert found["samples_per_s_1"] == [50] * 3
    assert found["share_0"] == pytest.approx([2 / 3] * 3)
    assert found["busy_0"] == found["busy_1"] == pytest.approx([0.8] * 3)
    assert found["data_wait_0"] == found["sync_wait_1"] == pytest.approx([0.2] * 3)
    assert found["value_0"] == pytest.approx([1, 1 / 2, 1 / 3])
    assert all(math.isnan(value) for value in found["value_1"])


def test_short_windows_are_merged_to_a_second() -> None:
    history = history_of(windows=25, window_s=0.1)
    rows = ChartRows(history).rows
    assert [len(rows), rows[-1]["samples"]] == [2, 20 * 12]
    found = row_columns(history, rows, 2, ["loss"])
    assert found["samples_per_s"] == pytest.approx([120, 120])


@pytest.mark.parametrize("windows", [1, 10, 11, 100, 1000])
def test_rows_are_bounded_and_lose_no_sample(windows: int) -> None:
    last = {**list(records(windows))[-1], "duration_s": 10_000.0}
    rows = ChartRows(history_of(last, windows=windows), most=10).rows
    assert len(rows) <= 10
    assert sum(sum(row["rank_samples"]) for row in rows) == (windows + 1) * 120


def test_later_rows_begin_with_the_earlier_ones_until_they_double() -> None:
    history = history_of(windows=8)
    before = ChartRows(history, most=10).rows
    for record in list(records(11))[-3:]:
        history.take(record)
        *earlier, _ = found = ChartRows(history, most=10).rows
        if len(found) > 5:
            assert earlier == before
        before = found
    assert [row["duration_s"] for row in before] == [2] * 5


def test_the_line_over_samples_continues_where_a_restart_begins() -> None:
    """Two of five rows are trained again; time shows them, samples do not."""
    found, later = [*records(5)], [*records(8)][-3:]
    again = [{**row, "samples": row["samples"] - 4 * 120} for row in later]
    history = history_of(*again, windows=len(found) - 5)
    found_columns = row_columns(history, ChartRows(history).rows, 2, ["loss"])
    samples, times_s = found_columns["samples"], found_columns["time"]
    assert samples[:2] + samples[5:] == [120, 240, 240, 360, 480]
    assert all(map(math.isnan, samples[2:5]))
    assert times_s == [1, 2, 3, 4, 5, 6, 7, 8]


def test_events_have_a_place_on_both_axes() -> None:
    early, late = event("joined", 0.5), event("died", 2.5, rank=1)
    found = event_columns(history_of(early, late, windows=4), most=5)
    assert found["time"] == [0.5, 2.5]
    assert found["samples"] == [0, 240]
    assert found["text"][1].startswith("rank 1 died: ")


def test_timeline_covers_the_last_minute_only() -> None:
    found = bar_columns(history_of(windows=100), ranks=2)
    assert min(found["left"]) >= 40
    assert max(found["right"]) == pytest.approx(100)
    assert {*found["rank"]} == {"0", "1"}
    lengths = dict.fromkeys(PARTS, 0.0)
    pairs = zip(found["left"], found["right"], strict=True)
    for part, (left, right) in zip(found["part"], pairs, strict=True):
        lengths[part] += right - left
    assert lengths["compute"] == pytest.approx(2 * 60 * 0.6)
    assert lengths["sync_wait"] == pytest.approx(2 * 60 * 0.2)


def test_nothing_of_a_run_becomes_markup() -> None:
    history = history_of(event("<died>", 3.0, rank=0))
    pages = head_html(history, START_S), ranks_html(history, None), events_html(history)
    for page in pages:
        assert not {"<b>", "<i>cpu", "<script", "<died>"} & {*page.split()}
        assert "&lt;" in page
        assert "nan" not in page


def test_settings_and_links_are_in_tables() -> None:
    history = history_of(windows=3)
    history.settings["lr"] = [0.1, "<b>"]
    listed = events_html(history)
    assert (
        "<tr><td>epochs<td>2</tr><tr><td>lr<td>[0.1, &#x27;&lt;b&gt;&#x27;]" in listed
    )
    ranks = ranks_html(history, history.recent())
    assert "<th>ms per reduction</tr>" in ranks
    assert ranks.count("<td>200.0</tr>") == 2


def test_head_line_says_where_the_run_is() -> None:
    assert "has not begun" in head_html(RunHistory(), START_S)
    history = history_of(windows=10)
    text = head_html(history, START_S + 10)
    assert "The run is training" in text
    assert "epoch 0 (sync)  1,200 of 1,200 samples  120/s, 80% of what" in text
    assert "0:10 in the run" in text
    assert "last record 1:00 ago" in head_html(history, START_S + 70)
    history.take({"t": START_S, "kind": "end", "exit_codes": [1], "reason": "oops"})
    assert "has failed" in head_html(history, START_S)
    assert "oops" in head_html(history, START_S)
