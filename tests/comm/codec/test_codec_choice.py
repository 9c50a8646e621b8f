"""``codec="auto"``: exact where the link is fast, fewer bytes where it is slow."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elche.comm.codec.codec_choice import (
    CODING_S,
    choose_codec,
    clearly_beats,
    predicted_s,
)

ELEMENTS = 10_000_000
MBIT_S = 1e6 / 8


def plain_s(mbit: float, world_size: int = 2) -> float:
    """Seconds of moving a plain sum's bytes over such a link."""
    return 4 * ELEMENTS * 2 * (world_size - 1) / world_size / (mbit * MBIT_S)


@pytest.mark.parametrize(
    ("mbit", "codec"), [(100_000, "fp32"), (2000, "fp32"), (100, "int8"), (10, "int8")]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_slower_the_link_the_fewer_bytes(
    mbit: float, codec: str, world_size: int
) -> None:
    assert choose_codec(plain_s(mbit, world_size), ELEMENTS, world_size) == codec


def test_between_them_lies_half_precision() -> None:
    chosen = {choose_codec(plain_s(mbit), ELEMENTS, 2) for mbit in range(200, 2000, 20)}
    assert chosen == {"fp32", "bf16", "int8"}


@given(
    seconds=st.floats(1e-6, 1e3),
    numel=st.integers(1, 10**9),
    world_size=st.integers(2, 16),
)
@example(seconds=1.5, numel=30_714_247, world_size=2)
@example(seconds=0.05, numel=10_000, world_size=2)
def test_what_is_more_exact_is_clearly_beaten_and_the_choice_is_not(
    seconds: float, numel: int, world_size: int
) -> None:
    chosen = choose_codec(seconds, numel, world_size)
    times = {name: predicted_s(name, seconds, numel, world_size) for name in CODING_S}
    names = list(CODING_S)
    beaten = {
        name: any(clearly_beats(times[less], times[name]) for less in names[at + 1 :])
        for at, name in enumerate(names)
    }
    assert not beaten[chosen]
    assert all(beaten[name] for name in names[: names.index(chosen)])


def test_small_messages_are_left_alone_on_any_link() -> None:
    assert choose_codec(plain_s(10) / ELEMENTS * 5000, 5000, 2) == "fp32"


@pytest.mark.parametrize(("numel", "world_size"), [(ELEMENTS, 1), (0, 4)])
def test_nothing_is_encoded_where_nothing_travels(numel: int, world_size: int) -> None:
    assert choose_codec(1e3, numel, world_size) == "fp32"
