"""One device does what ranks as threads have done, from their entries alone.

Weights are not those of the plans: a step's gradient is that of the mean loss over all
samples trained in it, and a window's mean is of the drifts of all ranks that trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from tests.runtime.epochs.rank_threads import (
    CLOSED,
    REDUCED,
    STEPPED,
    TRAINED,
    Entry,
    Hub,
)

DATA = torch.Generator().manual_seed(11)
SAMPLES = 52
X = torch.randn(SAMPLES, 3, generator=DATA, dtype=torch.float64)
Y = torch.randn(SAMPLES, 1, generator=DATA, dtype=torch.float64)
LR, MOMENTUM = 0.1, 0.5

Committed = list[tuple[int, tuple[int, ...]]]
"""(epoch, positions) of each batch that is in the model."""


def model() -> nn.Sequential:
    """The same one every time."""
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    start = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            drawn = torch.randn(parameter.shape, generator=start, dtype=torch.float64)
            parameter.copy_(drawn)
    return made


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)


def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (net(x) - y).square().mean()
    return loss


def freeze(net: nn.Module, is_frozen: bool) -> None:
    """Takes the gradients from the first layer, or gives them back."""
    next(net.children()).requires_grad_(not is_frozen)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


class Device:
    """A model and its optimizer, trained by positions."""

    def __init__(self, is_frozen: bool) -> None:
        self.net = model()
        self._is_frozen = is_frozen  # in the first epoch
        self._optimizer = optimizer_of(self.net)

    def train(self, epoch: int, positions: Sequence[int]) -> None:
        freeze(self.net, self._is_frozen and epoch == 0)
        at = torch.tensor(positions)
        self._optimizer.zero_grad()
        loss_of(self.net, X[at], Y[at]).backward()
        self._optimizer.step()

    @torch.no_grad()
    def add(self, drift: torch.Tensor) -> None:
        start = 0
        for parameter in self.net.parameters():
            part = drift[start : start + parameter.numel()]
            parameter.add_(part.view_as(parameter))
            start += parameter.numel()


def _steps(hub: Hub) -> list[tuple[int, tuple[int, ...]]]:
    """Under ``sync``: the ranks' batches of the same number make one step."""
    steps: dict[tuple[int, int], tuple[int, ...]] = defaultdict(tuple)
    for rank in range(len(hub.entries)):
        numbers: dict[int, int] = defaultdict(int)
        for epoch, positions in _kept(hub, rank):
            steps[epoch, numbers[epoch]] += positions
            numbers[epoch] += 1
    return [(epoch, steps[epoch, number]) for epoch, number in sorted(steps)]


def _kept(hub: Hub, rank: int) -> Committed:
    """Steps of a rank without the one that died with it, which others trained on."""
    by_rank = [
        [(epoch, at) for kind, epoch, at in entries if kind == STEPPED]
        for entries in hub.entries
    ]
    mine = by_rank.pop(rank)
    if rank in hub.dead and mine:
        epoch, positions = mine[-1]
        others = chain.from_iterable(by_rank)
        theirs = {at for other, ats in others if other == epoch for at in ats}
        if theirs.issuperset(positions):
            mine.pop()
    return mine


class _Rank:
    """One rank's entries under windows, done again from window to window."""

    def __init__(
        self, entries: Sequence[Entry], steps: Committed, is_frozen: bool
    ) -> None:
        self._device = Device(is_frozen)
        for epoch, positions in steps:
            self._device.train(epoch, positions)
        # A window without work is closed at an epoch's end, and again in the next one.
        last = {n: at for at, (kind, n, _) in enumerate(entries) if kind == CLOSED}
        self._entries: Iterator[Entry] = iter(
            [e for at, e in enumerate(entries) if e[0] != CLOSED or last[e[1]] == at]
        )
        self.start = self._base = flat(self._device.net)
        self._offered: dict[int, torch.Tensor] = {}
        self.batches: Committed = []

    def close(self, window: int, commons: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Trains until this window is closed, or to the end; returns the drift.

        Args:
            window: to be closed; its batches are in ``batches`` then.
            commons: results of windows, adopted on the way.
        """
        self.batches = []
        for kind, number, positions in self._entries:
            if kind == TRAINED:
                self._device.train(number, positions)
                self.batches.append((number, positions))
            elif kind == REDUCED and number in self._offered:
                # What was trained since the window was closed is kept.
                self._device.add(commons[number] - self._offered.pop(number))
                self._base = commons[number]
            elif kind == CLOSED:
                assert number == window
                self._offered[window] = flat(self._device.net)
                break
        return flat(self._device.net) - self._base


def replay(hub: Hub, *, is_frozen: bool = False) -> tuple[torch.Tensor, Committed]:
    """Steps, if any, then windows: each one's mean drift moves the common model."""
    committed = _steps(hub)
    ranks = [_Rank(entries, committed, is_frozen) for entries in hub.entries]
    closed = {n for es in hub.entries for kind, n, _ in es if kind == CLOSED}
    common = ranks[0].start
    commons: dict[int, torch.Tensor] = {}
    for window in sorted(closed):
        attempts = hub.plans[window]
        plans = attempts[max(attempts)] if attempts else {}
        drifts = []
        for number, rank in enumerate(ranks):
            drift = rank.close(window, commons)
            if rank.batches and number in plans:
                drifts.append(drift)
                committed += rank.batches
        if drifts:
            cut_for = max(plan.mean_over for plan in plans.values())
            common = common + torch.stack(drifts).sum(0) / max(cut_for, len(drifts))
        commons[window] = common
    return common, committed
