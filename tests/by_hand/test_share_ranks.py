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

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("kind", ["replica", "ddp"])
@pytest.mark.timeout(180)
def test_unequal_ranks_train_as_one_process(ranks2: RankPool, kind: str) -> None:
    setup = meeting if kind == "ddp" else serve_in_thread
    results = ranks2.run(cases.by_share, kind, [1.0, 0.25], 30, 80, case_setup=setup)
    (fast, state), (slow, other) = results
    assert (fast[0], slow[0]) == (40, 40)
    assert all(a + b == 80 for a, b in zip(fast, slow, strict=True))
    assert abs(fast[20] / slow[20] - 4.0) < 0.4
    assert identical([state, other])
    for name, value in cases.alone(30, 80).items():
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["replica", "ddp"])
@pytest.mark.timeout(180)
def test_a_rank_without_samples_weighs_nothing(ranks2: RankPool, kind: str) -> None:
    setup = meeting if kind == "ddp" else serve_in_thread
    results = ranks2.run(cases.by_share, kind, [1.0, 0.25], 3, 1, case_setup=setup)
    assert sorted(sizes[0] for sizes, _ in results) == [0, 1]
    for name, value in cases.alone(3, 1).items():
        torch.testing.assert_close(results[1][1][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["other n", "one rank only"])
@pytest.mark.timeout(180)
def test_different_calls_are_named_on_every_rank(ranks2: RankPool, kind: str) -> None:
    texts = ranks2.run(cases.refused, kind, case_setup=serve_in_thread)
    assert len(set(texts)) == 1
    assert texts[0].startswith("ProtocolError: ranks called elche.share with different")


def test_a_plain_script_gets_all_samples() -> None:
    assert sharing.share(5) == range(5)
    assert sharing.share(3) == range(3)


def test_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"needs a group of ranks: call elche\.init"):
        sharing.share(5)


def test_a_run_with_a_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run", object())
    with pytest.raises(ConfigError, match="yields this rank's share of each batch"):
        sharing.share(5)


def test_a_smaller_group_divides_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    places = iter([(2, 3), (0, 2)])
    monkeypatch.setattr(sharing, "_place", lambda: next(places))
    monkeypatch.setattr(process, "shares", CallShares(0, 1))
    assert sharing.share(6) == range(4, 6)
    assert sharing.share(6) == range(3)
