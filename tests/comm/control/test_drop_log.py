"""Lines about connections that are dropped."""

from __future__ import annotations

import pytest

from elche.comm.control.drop_log import DropLog


@pytest.mark.parametrize(("drops", "lines"), [(1, 1), (2, 2), (3, 2), (1000, 10)])
def test_lines_get_rarer_and_say_how_many_there_were(
    caplog: pytest.LogCaptureFixture, drops: int, lines: int
) -> None:
    log = DropLog()
    for number in range(drops):
        log.add(f"a launcher at {number}", "no Hello came")
    assert log.count == drops
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "dropped a launcher at 0: no Hello came"
    assert said[1:] == [
        f"dropped a launcher at {2**n - 1}: no Hello came ({2**n} so far)"
        for n in range(1, lines)
    ]
