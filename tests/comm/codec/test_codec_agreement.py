"""Ranks that want different codecs are refused, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest

import elche
from elche.errors import ElcheError
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed


def _setup(codecs: tuple[str, str]) -> str:
    options: dict[str, Any] = {"policy": "cadence", "codec": codecs[this_place().rank]}
    try:
        elche.setup(*build(Task()), **nested(options))
    except ElcheError as error:
        return str(error)
    finally:
        elche.shutdown()
    return "set up"


@pytest.mark.parametrize("codecs", [("fp32", "int4"), ("bf16", "int8")])
def test_a_run_names_the_codecs_of_its_ranks(
    ranks2: RankPool, codecs: tuple[str, str]
) -> None:
    for text in ranks2.run(_setup, codecs, case_setup=serve_in_thread):
        assert "codec" in text, text
        assert all(f"'{codec}'" in text or codec in text for codec in codecs), text
        assert "rank 0" in text, text
        assert "rank 1" in text, text
