"""Positions in each rank's model: the account that a simulation checks.

A rank's model is the *common* model, a drift of its own, and, while a window is
reduced, a snapshot of the drift that it has offered. Here each is the positions that
went into it. A reduction makes a new common model of the last one and the snapshots of
all who take part. Independent of the coordinator's ledger, so each checks the other.
Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

from elche.coordination.accounts.batch_ranges import BatchSizes, Range, joined, without
from elche.coordination.protocol.instructions import Reduce

Part = tuple[int, int, int]
"""(epoch, its first position of these, one past the last)."""


@dataclass(slots=True)
class Model:
    """One rank's model, as the positions in it.

    Attributes:
        common: how many common models it has seen, an index into `Books.commons`.
        drift: trained on since the last snapshot.
        offered: snapshots by window, kept until they are adopted.
        steps: taken under ``sync``, in order.
    """

    common: int = 0
    drift: list[Part] = field(default_factory=list)
    offered: dict[int, list[Part]] = field(default_factory=dict)
    steps: list[tuple[Part, ...]] = field(default_factory=list)


class Books:
    """Models of all ranks of one run.

    Args:
        run: which of the runs; for messages.
    """

    def __init__(self, run: int = 0) -> None:
        self.run = run
        self.models: dict[int, Model] = {}
        self.commons: list[Counter[Part]] = [Counter()]
        self.windows: list[int] = [-1]
        self.discarded: Counter[Part] = Counter()

    def model(self, rank: int) -> Model:
        """A rank's model."""
        return self.models.setdefault(rank, Model())

    def trained(self, rank: int, epoch: int, parts: Iterable[Range]) -> None:
        """A rank has trained on a batch of an epoch."""
        self.model(rank).drift.extend((epoch, *part) for part in parts)

    def offer(self, rank: int, window: int, *, is_finite: bool = True) -> None:
        """A rank ends a window: its drift is what it offers, if that is finite."""
        model = self.model(rank)
        assert not model.offered.get(window), f"rank {rank} ends window {window} twice"
        model.offered[window], model.drift = model.drift, []
        if not is_finite:
            self.discarded.update(model.offered[window])
            model.offered[window] = []

    def reduce(self, plans: Mapping[int, Reduce]) -> int:
        """All ranks of a group reduce; returns the new common model.

        Checks that they mean the same: the same window, settings and common model, and
        weights that sum to one, those who did nothing having none.
        """
        windows = {plan.window for plan in plans.values()}
        assert len(windows) == 1, f"ranks reduce different windows: {windows}"
        (window,) = windows
        bases = {self.model(rank).common for rank in plans}
        assert len(bases) == 1, f"window {window}: ranks have other bases: {bases}"
        settings = {
            (p.attempt, p.active_ranks, p.buffers, p.outer, p.outer_lr)
            for p in plans.values()
        }
        assert len(settings) == 1, f"window {window}: ranks differ: {settings}"
        total = sum(plan.weight for plan in plans.values())
        offers = {rank: self.model(rank).offered.get(window) for rank in plans}
        assert None not in offers.values(), f"window {window} not ended: {offers}"
        active = [rank for rank, offer in offers.items() if offer]
        assert abs(total - bool(active)) < 1e-9, f"weights sum to {total}"
        new = Counter(self.commons[bases.pop()])
        for rank, offer in offers.items():
            assert (plans[rank].weight > 0) == bool(offer), (
                f"window {window}: rank {rank} weighs {plans[rank].weight} for {offer}"
            )
            new.update(offer or [])
        assert plans[min(plans)].active_ranks == len(active)
        self.commons.append(new)
        self.windows.append(window)
        return len(self.commons) - 1

    def took_step(
        self, rank: int, epoch: int, parts: Iterable[Sequence[Range]]
    ) -> None:
        """A rank holds the result of a step of ``sync``, with these parts of ranks."""
        step = _once(chain.from_iterable(parts), f"a step of epoch {epoch}")
        self.model(rank).steps.append(tuple((epoch, *part) for part in step))

    def adopt(self, rank: int, window: int, common: int) -> None:
        """A rank takes in the result of a reduction that it took part in."""
        model = self.model(rank)
        assert self.windows[common] == window
        model.common = common
        del model.offered[window]

    def take(self, rank: int, source: int, window: int) -> None:
        """A rank takes the common model of another one.

        What it had offered to that window must be in there.
        """
        self.take_steps(rank, source)
        common = self.model(source).common
        held = self.windows[common]  # windows in which nobody trained are not reduced
        assert held <= window, f"rank {source} holds window {held}, not {window}"
        model = self.model(rank)
        offer = model.offered.pop(window, [])
        missing = Counter(offer) - self.commons[common]
        assert not missing, f"rank {rank}: {missing} is lost with window {window}"
        model.common = common

    def take_steps(self, rank: int, source: int) -> None:
        """A rank takes the steps that another one has taken; it has none beyond."""
        model, theirs = self.model(rank), self.model(source)
        assert model.steps == theirs.steps[: len(model.steps)], f"rank {rank}: {source}"
        model.steps = list(theirs.steps)
        if not model.drift and not model.offered:
            model.common = theirs.common

    def check_epoch(
        self, ranks: Iterable[int], epoch: int, sizes: BatchSizes, *, whole: bool
    ) -> frozenset[int]:
        """All ranks hold one model at an epoch's end, with each position in it once.

        Or not at all, where it is discarded; that is once, too.

        Args:
            ranks: who is there.
            epoch: that ended.
            sizes: its global batches.
            whole: every position must be in; otherwise some may be missing.

        Returns:
            The global batches of the epoch that are in as a whole.
        """
        members = list(ranks)
        commons = {self.model(rank).common for rank in members}
        assert len(commons) == 1, f"epoch {epoch}: ranks hold models {commons}"
        for rank in members:
            model = self.model(rank)
            left = model.drift, model.offered
            assert not model.drift, f"rank {rank} ends epoch {epoch} with {left}"
            assert not any(model.offered.values()), f"rank {rank} ends with {left}"
        steps = self.model(members[0]).steps
        for rank in members:
            assert self.model(rank).steps == steps, f"rank {rank} took other steps"
        common = self.commons[commons.pop()] + Counter(chain.from_iterable(steps))
        done = _once(_of(epoch, common + self.discarded), f"epoch {epoch}")
        missing = without([(0, sizes.num_samples)], done)
        assert not (whole and missing), f"epoch {epoch}: missing {missing[:9]}"
        held = joined(_of(epoch, common))
        bounds = pairwise(map(sizes.position_of, range(sizes.num_batches + 1)))
        return frozenset(
            batch for batch, part in enumerate(bounds) if not without([part], held)
        )


def _of(epoch: int, parts: Counter[Part]) -> list[Range]:
    """Positions of an epoch in parts of several, as often as they are there."""
    return [(start, stop) for e, start, stop in parts.elements() if e == epoch]


def _once(ranges: Iterable[Range], where: str) -> list[Range]:
    """Ranges that do not overlap, in order and joined."""
    found = sorted(ranges)
    for (_, before), (start, _) in pairwise(found):
        assert before <= start, f"{where}: position {start} is in twice"
    return joined(found)
