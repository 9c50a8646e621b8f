"""Ranks that want different codecs are refused, whoever asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elche
from elche.comm.codec.codec_opening import open_coded_exchange
from elche.errors import ElcheError, MismatchError
from tests.comm.averaging.cases.overlap_cases import joined, meeting
from tests.distributed.cases.tasks import Task, build
from tests.harness.rank_main import this_place
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread
from tests.harness.settings import nested

pytestmark = pytest.mark.distributed

WANTS = {
    "codec": ((torch.float32, "int8", 1), (torch.float32, "fp32", 1)),
    "dtype": ((torch.float64, "int8", 1), (torch.float32, "int8", 1)),
    "sides": ((torch.float32, "fp32", 1), (torch.float32, "fp32", 2)),
}
SAYS = {
    "codec": "rank 0 has 11 elements in int8, blocks of 128, rank 1 has 11 elements in "
    "fp32, blocks of 1",
    "dtype": "rank 0 has 11 elements of float64 in int8",
    "sides": "rank 1 has 11 elements in fp32, blocks of 1, overlapped",
}


def _open(transport: str, case: str) -> str:
    """What a rank is told that opens a message of its own kind."""
    dtype, codec, sides = WANTS[case][this_place().rank]
    with joined(transport) as group:
        try:
            open_coded_exchange(group, 11, dtype, codec, sides)
        except MismatchError as error:
            return str(error)
    return "opened"


@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("case", WANTS)
def test_a_message_of_another_kind_is_named(
    ranks2: RankPool, transport: str, case: str
) -> None:
    for text in ranks2.run(_open, transport, case, case_setup=meeting):
        assert SAYS[case] in text, text


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
