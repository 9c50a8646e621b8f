"""The 48 features: each trains as plain PyTorch, and docs/features.md has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.features.__main__ import (
    EMULATED,
    POLICIES,
    docs_rows,
    run_plain,
    run_policy,
)
from benchmarks.features.everything import FEATURES
from benchmarks.features.verdict import compare
from tests import device as test_device

DOCS = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_docs_have_what_is_declared() -> None:
    assert len(FEATURES) == 48
    assert docs_rows() in DOCS.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_emulated", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_features_do_what_is_declared(
    policy: str, is_emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside plain PyTorch, on two unequal ranks, emulated or on test devices."""
    ranks = EMULATED if is_emulated else test_device.launched(policy, monkeypatch)
    (tmp_path / "plain").mkdir()
    (tmp_path / policy).mkdir()
    plain = run_plain([*FEATURES], tmp_path / "plain")
    found = run_policy(policy, plain, tmp_path / policy, ranks)
    assert not [
        (name, verdict)
        for name, verdict in found.items()
        if not verdict.is_declared(FEATURES[name], policy)
    ]


@pytest.mark.slow
def test_features_train_as_plain_pytorch(tmp_path: Path) -> None:
    """Each learns, and is the same when it is run again beside others."""
    (tmp_path / "all").mkdir()
    (tmp_path / "some").mkdir()
    plain = run_plain([*FEATURES], tmp_path / "all")
    for name, result in plain.items():
        losses = [loss for loss, _ in result["losses"]]
        assert sum(losses[-5:]) < sum(losses[:5]), name
    again = run_plain(["dropout", "ema"], tmp_path / "some")
    for name, result in again.items():
        verdict = compare([result], plain[name])
        assert (verdict.distance, verdict.differs) == (0.0, set()), name
