"""What a policy holds beside plain training: as it says, and as it was designed.

Proportional set sizes: of memory that ranks share each counts its part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.comm.gradients.sum_memory import give_back_freed
from elche.runtime.process.coordinator import serve_in_thread
from tests.harness.rank_pool import RankPool

ROLLUP = Path("/proc/self/smaps_rollup")
WIDTH, DEPTH, STEPS = 1000, 8, 12
MODEL_BYTES = 4 * DEPTH * (WIDTH + 1) * WIDTH
SLACK = 0.5

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not ROLLUP.exists(), reason="Linux tells what is held"),
]


def held_bytes() -> int:
    """Without what malloc keeps of memory that is free."""
    give_back_freed()
    found = re.search(r"^Pss: +(\d+) kB", ROLLUP.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def models_beyond_plain(policy: str) -> tuple[float, float]:
    """Measured and said, in models; the same model was trained plainly before."""
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(
        TensorDataset(torch.randn(8 * STEPS, WIDTH)), batch_size=8
    )

    def train() -> int:
        """What is held at the end of a step, where gradients are."""
        held = 0
        for (x,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), x).backward()
            optimizer.step()
            held = held_bytes()
        return held

    plain = train()
    optimizer.zero_grad()
    options: dict[str, Any] = {}
    if policy != "sync":
        outer = elche.OuterConfig(optimizer="nesterov")
        options["windows"] = elche.WindowConfig(max_anchor=1, outer=outer)
    model, optimizer, loader = elche.setup(
        model, optimizer, loader, epochs=1, policy=policy, **options
    )
    held = train()
    said = elche.summary().reduction_bytes
    elche.shutdown()
    return (held - plain) / MODEL_BYTES, said / MODEL_BYTES


@pytest.mark.parametrize(
    ("policy", "designed", "is_gradient"),
    [("sync", 2.0, 1.0), ("cadence", 3.0, 0.0), ("async", 4.0, 0.0)],
)
def test_memory_is_what_is_said(
    ranks2: RankPool, policy: str, designed: float, is_gradient: float
) -> None:
    """Under ``sync`` a contribution and the sum, which is ``p.grad`` as well.

    In windows what the design allows, an outer momentum included.
    """
    for measured, said in ranks2.run(
        models_beyond_plain, policy, case_setup=serve_in_thread
    ):
        assert said == pytest.approx(designed, abs=0.15)
        assert measured == pytest.approx(said - is_gradient, abs=SLACK)
