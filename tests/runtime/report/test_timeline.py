"""What a rank did, as spans of a timeline."""

from __future__ import annotations

import pytest

from elche.monitor.trace import BATCH, DATA_WAIT, SYNC, Span
from elche.runtime.report import timeline as timeline_module
from elche.runtime.report.timeline import Timeline


def test_a_batch_is_a_wait_for_data_and_what_followed() -> None:
    timeline = Timeline(2)
    timeline.record(("step", 7, 1.0, 1.25, 3.0, 16, 0.0))
    timeline.add("sync 3", SYNC, 3.0, 3.5)
    assert timeline.spans == [
        Span(2, DATA_WAIT, DATA_WAIT, 1.0, 0.25),
        Span(2, "step 7", BATCH, 1.25, 1.75, {"samples": 16}),
        Span(2, "sync 3", SYNC, 3.0, 0.5),
    ]
    assert timeline.spans == timeline.spans  # reading takes nothing away


def test_only_the_newest_records_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MOST_RECORDS", 2)
    timeline = Timeline(0)
    for number in range(3):
        timeline.record(("batch", number, 0.0, 0.0, 1.0, 1, 0.0))
    names = [span.name for span in timeline.spans if span.category == BATCH]
    assert names == ["batch 1", "batch 2"]
