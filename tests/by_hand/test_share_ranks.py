"""`elche.share` on several ranks: exact gradients, measured parts, refusals."""

from __future__ import annotations

import pytest
import torch

from elche.cadence.call_shares import CallShares
from elche.errors import ConfigError
from elche.session import sharing
from elche.session.process import process
from tests.by_hand.cases import share_cases as cases
from tests.ddp.cases.ddp_cases import meeting
from tests.distributed.cases.tasks import identical
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


@pytest.mark.parametrize(("steps", "n"), [(30, 80), (3, 1)])
@pytest.mark.parametrize("kind", ["replica", "ddp"])
def test_unequal_ranks_train_as_one_process(
    ranks2: RankPool, kind: str, steps: int, n: int
) -> None:
    """Where there is one sample, one of the ranks has none."""
    setup = meeting if kind == "ddp" else serve_in_thread
    results = ranks2.run(cases.by_share, kind, steps, n, case_setup=setup)
    (fast, state), (slow, other) = results
    assert [a + b for a, b in zip(fast, slow, strict=True)] == [n] * steps
    assert identical([state, other])
    for name, value in cases.by_share("alone", steps, n)[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-12)
    if n > 1:
        assert fast[0] == slow[0]
        assert abs(fast[20] / slow[20] - 4.0) < 0.4


@pytest.mark.parametrize("has_other_n", [True, False])
@pytest.mark.parametrize("kind", ["replica", "ddp"])
def test_different_calls_are_named_on_every_rank(
    ranks2: RankPool, kind: str, has_other_n: bool
) -> None:
    setup = meeting if kind == "ddp" else serve_in_thread
    texts = ranks2.run(cases.refused, kind, has_other_n, case_setup=setup)
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks called elche.share with different n")


@pytest.mark.parametrize(
    ("wraps", "text"),
    [
        (False, "nothing weights their gradients: wrap the model in elche.Replica"),
        (True, "the plain mean over ranks is not the gradient of the batch"),
    ],
)
def test_unequal_parts_need_weights(ranks2: RankPool, wraps: bool, text: str) -> None:
    """A plain mean over ranks, as under torch's own wrapper, was wrong in silence."""
    texts = ranks2.serve(cases.unweighted, wraps)
    assert len(set(texts)) == 1
    assert text in texts[0]


def test_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"needs a group of ranks: call elche\.init"):
        sharing.share(5)
    monkeypatch.setattr(process, "run", object())
    with pytest.raises(ConfigError, match="yields this rank's share of each batch"):
        sharing.share(5)


def test_a_smaller_group_divides_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter([(2, 3), (0, 2)])
    monkeypatch.setattr(sharing, "_place", lambda: next(places))
    monkeypatch.setattr(process, "shares", CallShares(0, 1))
    assert sharing.share(6) == range(4, 6)
    assert sharing.share(6) == range(3)
