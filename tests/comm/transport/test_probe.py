"""How long a message the probe of a link sends, on links that are told in advance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from elche.comm.transport import probe
from elche.comm.transport.probe import MOST_S, PROBED_ELEMENTS, probe_reduction_s
from elche.comm.transport.process_group import Group


@dataclass
class SlowGroup:
    """A group whose sums take what latency and rate say, by its own clock.

    Control words (one element, or one per rank) take the latency alone.
    """

    latency_s: float
    element_s: float
    world_size: int = 4
    rank: int = 1
    shares_host = False
    host_leaders = None
    now_s: float = 0.0
    sent: list[int] = field(default_factory=list)

    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        self.sent.append(tensor.numel())
        self.now_s += self.latency_s + self.element_s * tensor.numel()

    def wait(self, work: Any, what: str) -> None:
        assert work is None

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        self.now_s += self.latency_s


def probed(
    monkeypatch: pytest.MonkeyPatch, group: SlowGroup, numel: int
) -> tuple[float, list[int]]:
    """What the probe says, and the lengths of its messages."""
    monkeypatch.setattr(probe.time, "perf_counter", lambda: group.now_s)
    return probe_reduction_s(cast("Group", group), numel), group.sent


@pytest.mark.parametrize("mbit", [1.0, 10.0, 100.0, 1e3, 1e5])
@pytest.mark.parametrize("latency_s", [0.0, 0.001, 0.12])
@pytest.mark.parametrize("numel", [1, 1000, 300_000, 9_930_000])
def test_the_probe_is_short_and_right(
    monkeypatch: pytest.MonkeyPatch, mbit: float, latency_s: float, numel: int
) -> None:
    group = SlowGroup(latency_s, 1.5 * 32.0 / (1e6 * mbit))
    found_s, sent = probed(monkeypatch, group, numel)
    assert found_s == pytest.approx(latency_s + group.element_s * numel, rel=1e-3)
    assert max(sent) <= min(numel, PROBED_ELEMENTS)
    # A message more than three times the last one that was not long yet.
    reductions_s = group.element_s * sum(sent)
    assert reductions_s <= 4 * MOST_S


@pytest.mark.parametrize(
    ("element_s", "longest"), [(1e-9, PROBED_ELEMENTS), (1.5 * 32.0 / 1e7, 1 << 15)]
)
def test_only_a_quick_link_is_probed_with_long_messages(
    monkeypatch: pytest.MonkeyPatch, element_s: float, longest: int
) -> None:
    """At ten megabits three rounds of a million elements took 15 s."""
    group = SlowGroup(1e-4, element_s)
    _, sent = probed(monkeypatch, group, 9_930_000)
    assert max(sent) == longest
    assert group.now_s < 0.5


def test_one_rank_has_nothing_to_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    found_s, sent = probed(monkeypatch, SlowGroup(1.0, 1.0, world_size=1), 100)
    assert (found_s, sent) == (0.0, [])
