"""Loops in which ranks part, or might seem to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elche
from elche.errors import ElcheError, MismatchError
from elche.runtime.process.environment import read_placement
from elche.session.process import current_run, failing_together
from tests.harness.settings import nested

BATCH = 4
AT = 12


@dataclass(frozen=True)
class Parting:
    """What the last rank does otherwise than the others."""

    how: str
    policy: str = "sync"
    two_kinds: bool = False
    is_last: bool = False
    folder: str = ""

    @property
    def batches(self) -> int:
        """Enough for several grants of the shortest steps."""
        return 200 if self.policy == "sync" else 24

    @property
    def at(self) -> int:
        """The batch from which on; the last one is in no step's check."""
        if self.policy == "auto":
            return 0  # of a slow rank it may take one batch only
        if self.policy != "sync":
            return 2
        return self.batches - 1 if self.is_last else AT


def train(parting: Parting) -> str:
    """Trains one epoch; returns the error."""
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    next(islice(model.parameters(), 1, None)).requires_grad_(False)
    samples = parting.batches * BATCH
    data = TensorDataset(torch.randn(samples, 6), torch.arange(samples) % 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    is_last = read_placement().rank == 1
    threads = torch.get_num_threads()
    if parting.two_kinds and is_last:
        torch.set_num_threads(threads + 1)  # another kind, as sums round otherwise
    more = {"max_anchor": 0} if parting.policy in ("cadence", "async") else {}
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        DataLoader(data, BATCH),
        **nested({"policy": parting.policy, "seed": 1, **more}),
    )
    error = ""
    try:
        with failing_together():
            for batch, (x, y) in enumerate(loader):
                F.cross_entropy(model(x), y).backward()
                body_of(parting, is_last and batch >= parting.at, trained, model)
                optimizer.step()
                if parting.how == "lone step" and is_last and batch == parting.at:
                    optimizer.step()
                optimizer.zero_grad()
            if parting.folder:
                first = next(iter(model.parameters()))
                first.data.add_(float(is_last))  # as of a file loaded on one rank
                elche.save(parting.folder)
    except MismatchError as raised:
        error = str(raised)
    except ElcheError as raised:
        error = repr(raised)
    finally:
        torch.set_num_threads(threads)
    elche.shutdown()
    return error


@torch.no_grad()
def body_of(parting: Parting, is_apart: bool, trained: Any, model: nn.Module) -> None:
    """What the loop does between the backward pass and the step."""
    how = parting.how
    if how == "alike":  # what every rank does in the same way
        nn.utils.clip_grad_value_(trained, 0.05)
        nn.utils.clip_grad_norm_(trained, 0.5)
        for parameter in trained:
            parameter.grad.add_(parameter, alpha=1e-3)
    if not is_apart:
        return
    for parameter in trained:
        if how == "noise":
            parameter.grad.add_(0.05 * torch.randn_like(parameter))
        elif how == "rounded":
            parameter.mul_(1.0 + 2.4e-7 * (torch.rand_like(parameter) - 0.5))
    first = next(iter(model.parameters()))
    if how == "written":
        first[0].add_(1e-6)
    elif how == "frozen written":
        list(model.parameters())[1].add_(1e-3)
    elif how == "base":  # a fault of elche's own
        run = current_run()
        assert run is not None
        windows: Any = run._synchroniser.windows
        windows._groups[0]._base_memory[3] += 1e-3
