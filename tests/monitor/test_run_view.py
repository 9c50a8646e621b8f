"""What a run's progress shows, from the messages of the run."""

from __future__ import annotations

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elche.coordination.protocol.instructions import MetricsReported
from elche.monitor.live_run import LiveRun, ProgressLines
from elche.monitor.run_history import RunHistory, run_row
from elche.monitor.run_view import (
    RANKS_SHOWN,
    RankLine,
    rank_table,
    run_head,
    run_lines,
)
from tests.monitor.test_run_history import begin, end, join, recorded, report

Window = tuple[float, tuple[int, int]]


def window(
    duration_s: float, samples: tuple[int, int], busy_s: tuple[float, float]
) -> MetricsReported:
    waits_s = tuple(duration_s - each for each in busy_s)
    zeros = {"data_wait_s": (0.0, 0.0), "transfer_s": (0.0, 0.0)}
    times = {"duration_s": duration_s, "busy_s": busy_s, "sync_wait_s": waits_s}
    return report(0, samples, means=(), **times, **zeros)


def seen(*messages: object) -> RunHistory:
    """Of two ranks, which do not say how many epochs there will be."""
    history = RunHistory()
    show(history, join(0, ()), join(1, ()), *messages)
    return history


def show(history: RunHistory, *messages: object) -> None:
    for record in recorded(*messages):
        history.take(record)


def rate(history: RunHistory) -> float:
    return run_row(history.recent() or {})["samples_per_s"]


def efficiency(history: RunHistory) -> float:
    return run_row(history.recent() or {})["efficiency"]


def test_rate_efficiency_and_the_time_left() -> None:
    history = seen(*begin(0), window(1.0, (80, 20), (0.8, 0.5)))
    assert rate(history) == 100.0
    assert efficiency(history) == pytest.approx(100.0 / (80 / 0.8 + 20 / 0.5))
    head, _, first, second = run_lines(history)
    assert "epoch 0 (sync)" in head
    assert "100 of 1,000 samples  100/s, 71% of what the devices deliver" in head
    assert head.endswith("0:09 left")
    assert first.split() == ["0", "device", "0", "100", "80%", "20%"]
    assert second.split() == ["1", "device", "1", "40", "20%", "50%"]


def test_a_rank_that_was_left_out_counts_with_the_speed_it_had() -> None:
    alone = [window(1.0, (80, 0), (1.0, 0.0))] * 6
    history = seen(*begin(0), window(1.0, (80, 20), (1.0, 1.0)), *alone)
    assert rate(history) == 80.0
    assert efficiency(history) == pytest.approx(0.8)


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.tuples(*[st.integers(0, 99)] * 2))))
def test_rates_are_of_the_last_seconds(windows: list[Window]) -> None:
    history = seen(
        *(window(length_s, n, (length_s, length_s)) for length_s, n in windows)
    )
    recent = list[Window]()
    for each in windows:
        recent.append(each)
        while sum(each[0] for each in recent[1:]) >= 5.0:
            del recent[0]
    taken_s = sum(each[0] for each in recent)
    expected = sum(sum(each[1]) for each in recent) / taken_s if recent else 0.0
    assert not windows or rate(history) == pytest.approx(expected)


def test_epochs_and_policies_follow_each_other() -> None:
    messages = *begin(0), window(1.0, (80, 20), (1.0, 1.0)), *end(0)
    history = seen(*messages)
    assert "epoch 0 (sync)" in run_lines(history)[0]
    assert not history.is_training
    assert "left" not in run_lines(history)[0]
    history = seen(*messages, *begin(1))
    assert "epoch 1 (sync)" in run_lines(history)[0]
    assert " 0 of 1,000 samples" in run_lines(history)[0]


def test_of_many_ranks_the_first_are_shown() -> None:
    ranks = [RankLine(rank=rank, device="CPU") for rank in range(RANKS_SHOWN + 3)]
    heading, *shown, last = rank_table(ranks)
    assert heading.split() == ["rank", "device", "samples/s", "share", "waiting"]
    assert len(shown) == RANKS_SHOWN
    assert last == "  and 3 more"


def test_the_view_is_beneath_what_ranks_print_and_goes_in_the_end() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    live = LiveRun(console)
    joined, begun = recorded(join(0), *begin(0))
    history = RunHistory()
    history.take(joined)
    live.draw(history)
    assert screen.getvalue() == ""
    history.take(begun)
    live.draw(history)
    assert screen.getvalue().count("epoch 0 (sync)") == 1
    live.print_line("[bold] " + "long " * 40)
    drawn = screen.getvalue()
    assert "[bold] " + "long " * 40 + "\n" in drawn
    assert drawn.rpartition("long")[2].count("epoch 0 (sync)") == 1
    live.close()
    assert screen.getvalue().endswith("\x1b[2K")


def test_the_time_left_of_a_run_whose_epochs_are_known() -> None:
    history = RunHistory()
    assert run_head(history) == "no epoch has begun"
    show(history, join(0), *begin(0), window(1.0, (80, 20), (1.0, 1.0)))
    assert run_head(history).endswith(
        "deliver, 0:09 left in the epoch, 0:29 in the run"
    )


def test_a_log_gets_a_line_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, said = [0.0], list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    lines = ProgressLines(said.append, every_s=60.0)
    history = seen(*begin(0))
    for now_s[0] in (59.0, 61.0):
        lines.draw(history)
    assert said == []  # no window yet
    show(history, window(1.0, (80, 20), (1.0, 1.0)))
    for now_s[0] in (61.0, 90.0, 122.0):
        lines.draw(history)
    assert len(said) == 2
    assert said[0].startswith("epoch 0 (sync)  100 of 1,000 samples  100/s, ")
