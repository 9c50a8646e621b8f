"""Whole runs on ranks as threads are what one device makes of the same batches."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from elche.config import RunConfig
from elche.coordination.protocol.events import Failed
from elche.runtime import run as run_module
from elche.runtime.data.stream_data import by_position
from elche.runtime.process.environment import Placement
from elche.runtime.process.rank_groups import RankGroups
from elche.runtime.run import Run
from elche.runtime.training import Pauses, Training
from elche.runtime.watch import step_guard
from tests.runtime.epochs.rank_threads import (
    CLOSED,
    STEPPED,
    TRAINED,
    Hub,
    Killed,
    Saved,
    ThreadChannel,
)
from tests.runtime.epochs.replay import (
    SAMPLES,
    X,
    Y,
    flat,
    freeze,
    loss_of,
    model,
    optimizer_of,
    replay,
)
from tests.runtime.epochs.turns import StuckError

BATCH, EPOCHS, RANKS = 4, 2, 3
SAMPLE_S = (0.001, 0.002, 0.004, 0.002)
"""Virtual seconds per sample of each rank."""
WINDOWS = {"anchor": 2, "max_anchor": 2, "outer": {"optimizer": "average"}}
POLICIES = pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
BREAKER = DYING = 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run; counts are of batches or collectives of rank 1 in the first epoch.

    ``second_dies_before`` is of rank 2, ``first_dies_between`` of rank 0, when the
    others have opened the second epoch. ``is_cut``: for a checkpoint, each epoch, whose
    steps are so long that not all are granted at once;
    ``is_frozen``: the first layer, in the first epoch.
    """

    policy: str
    ranks: int = RANKS
    epochs: int = EPOCHS
    reduce_s: float = 0.0
    breaks_after: int | None = None
    breaks_in: int = 0
    dies_before: int | None = None
    second_dies_before: int | None = None
    dies_in_collective: int | None = None
    dies_in_opening: int | None = None
    tears: bool = False
    first_dies_between: bool = False
    is_cut: bool = False
    is_frozen: bool = False


class Cuts(Pauses):
    """A checkpoint after the first rank's first batch of each epoch, if any is due."""

    is_active = True
    made, is_due = 0, False

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self.save: Callable[[], None] = lambda: None

    def begin_pass(self) -> bool:
        self.is_due = self._is_on
        return True

    def wants_cut(self, *, is_first: bool = True) -> bool:
        return is_first and self.is_due

    def cut(self, *, is_end: bool) -> None:
        self.made, self.is_due = self.made + 1, False
        self.save()


class RankThread:
    """One rank's script."""

    def __init__(self, hub: Hub, case: Case, rank: int) -> None:
        self.hub, self.case, self.rank = hub, case, rank
        self.model, self.cuts = model(), Cuts(is_on=case.is_cut)
        windows = {} if case.policy == "sync" else {"windows": WINDOWS}
        if case.policy == "auto":
            windows = {"windows": {"local_batch_size": 2}}
        transport = {"transport": {"kind": "gloo", "bucket_cap_mb": 1e-5}}
        options = {"policy": case.policy, "seed": 3} | transport | windows
        data = TensorDataset(torch.arange(SAMPLES), X, Y)
        drawn = torch.Generator().manual_seed(7)
        loader = DataLoader(data, BATCH, shuffle=case.is_frozen, generator=drawn)
        self.training = Training(
            config=RunConfig(**options),
            model=self.model,
            optimizers=(optimizer_of(self.model),),
            loader=by_position(loader, None, case.ranks, 3),
            epochs=case.epochs,
            pauses=self.cuts,
        )

    def main(self) -> torch.Tensor | None:
        """Trains; the parameters at the end, None where this rank was killed."""
        self.hub.turns.begin(self.rank)
        placement = Placement(
            rank=self.rank, world_size=self.case.ranks, device=torch.device("cpu")
        )
        try:
            run = Run.start(placement, self.training, self.case.epochs)
            if self.case.is_cut:
                self.cuts.save = partial(self._save, run)
            if self.rank in self.hub.resumed:
                self._resume(run, self.hub.resumed[self.rank])
            try:
                for epoch in range(self.case.epochs):
                    is_last = self.rank == DYING and epoch > 0
                    if is_last and self.case.dies_in_opening is not None:
                        self.hub.deadly[DYING] = self.case.dies_in_opening
                    if (epoch, self.rank) == (1, 0) and self.case.first_dies_between:
                        self.hub.turns.compute(self.rank, 1.0)
                        self.hub.kill(self.rank)
                    self._train(run, epoch)
                self.hub.progress[self.rank] = run.samples_done
                assert not self.case.is_cut or self.cuts.made == self.case.epochs
                assert run.progress_steps == pytest.approx(run.samples_done / BATCH)
                run.leave()
            except Killed:
                with contextlib.suppress(Exception):
                    run.close(Failed(rank=self.rank, error="", traceback=""))
                return None
            return flat(self.model)
        finally:
            self.hub.turns.end(self.rank)

    def _save(self, run: Run) -> None:
        """Keeps what a checkpoint has, of the first one."""
        (optimizer,) = self.training.optimizers
        run_state, epochs = run.state_dict(), run.epochs.state_dict()
        states = run_state, epochs, self.model.state_dict(), optimizer.state_dict()
        saved = deepcopy(states), len(self.hub.entries[self.rank])
        self.hub.saved.setdefault(self.rank, saved)

    def _resume(self, run: Run, saved: Saved) -> None:
        """As a rank that joins others, which have another count of steps' samples."""
        counted = 1000 if self.case.policy == "sync" else 0
        (state, epochs, model_state, optimizer_state), _ = saved
        self.model.load_state_dict(model_state)
        self.training.optimizer.load_state_dict(optimizer_state)
        run.epochs.load_state_dict(deepcopy(epochs), counted=counted)
        run.load_state_dict(state)

    def _train(self, run: Run, epoch: int) -> None:
        is_faulty = epoch == 0 and self.rank == 1
        breaks = (epoch, self.rank) == (self.case.breaks_in, BREAKER)
        freeze(self.model, self.case.is_frozen and epoch == 0)
        (optimizer,), batches = self.training.optimizers, run.epoch()
        for number, (at, x, y) in enumerate(batches):
            if is_faulty and number == self.case.dies_before:
                self.hub.kill(self.rank)
            if (epoch, self.rank, number) == (0, 2, self.case.second_dies_before):
                self.hub.kill(self.rank)
            if is_faulty and number == 0 and self.case.dies_in_collective is not None:
                self.hub.deadly[self.rank] = self.case.dies_in_collective
            steps = run.samples_done / BATCH
            most = (epoch + 1) * SAMPLES / BATCH  # windows may be planned beyond it
            assert run.epochs.progress_steps == pytest.approx(min(steps, most))
            mine = tuple(at.tolist()) if run.current_samples else ()
            kind = STEPPED if run.policy == "sync" else TRAINED
            self.hub.entries[self.rank].append((kind, epoch, mine))
            sample_s = SAMPLE_S[self.rank] * (100 if self.case.is_cut else 1)
            self.hub.turns.compute(self.rank, sample_s * len(x))
            optimizer.zero_grad()
            loss_of(self.model, x, y).backward()
            optimizer.step()
            if breaks and number + 1 == self.case.breaks_after:
                break
        batches.close()  # type: ignore[attr-defined]


def run_threads(
    case: Case, monkeypatch: pytest.MonkeyPatch, before: Hub | None = None
) -> tuple[Hub, list[torch.Tensor]]:
    """Runs a case; what survivors hold at the end.

    It resumes from the first checkpoint of the run ``before``, if any.
    """
    hub = Hub(case.ranks, case.reduce_s, tears=case.tears)
    if before is not None:
        hub.follow(before)
    hub.turns.patch_clocks(monkeypatch)

    def connect(placement: Placement, timeout_s: float) -> Any:
        return placement, ThreadChannel(hub, placement.rank)

    monkeypatch.setattr(run_module, "connect", connect)
    monkeypatch.setattr(
        RankGroups, "_form_watched", lambda groups, *of: hub.form(groups, *of)
    )
    register = register_optimizer_step_pre_hook

    def of_thread(hook: Callable[..., Any]) -> Any:
        """torch's hook is one for all optimizers of a process, which is one rank."""
        own = threading.get_ident()
        return register(lambda *a: hook(*a) if threading.get_ident() == own else None)

    monkeypatch.setattr(step_guard, "register_optimizer_step_pre_hook", of_thread)
    ranks = [RankThread(hub, case, rank) for rank in range(case.ranks)]
    with ThreadPoolExecutor(case.ranks) as pool:
        futures = [pool.submit(rank.main) for rank in ranks]
    errors = [error for future in futures if (error := future.exception())]
    if errors:  # those that wait for a rank that has failed say less than it
        raise min(errors, key=lambda error: isinstance(error, StuckError))
    held = [future.result() for future in futures]
    return hub, [each for each in held if each is not None]


def check(
    hub: Hub, held: list[torch.Tensor], *, is_frozen: bool = False
) -> Counter[tuple[int, int]]:
    """Equal in, equal out, and what one device holds; how often each position counts.

    Positions by epoch.
    """
    for other in held[1:]:
        assert torch.equal(other, held[0])
    wanted, committed = replay(hub, is_frozen=is_frozen)
    torch.testing.assert_close(held[0], wanted, rtol=1e-12, atol=1e-13)
    counts = Counter((epoch, at) for epoch, batch in committed for at in batch)
    assert set(hub.progress.values()) == {sum(counts.values())}
    return counts


def once(epoch: int) -> dict[tuple[int, int], int]:
    return {(epoch, at): 1 for at in range(SAMPLES)}


@POLICIES
@pytest.mark.parametrize("breaks_in", [0, 1])
def test_a_loop_that_breaks(
    policy: str, breaks_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(policy=policy, breaks_after=2, breaks_in=breaks_in)
    hub, held = run_threads(case, monkeypatch)
    counts = check(hub, held)
    assert len(held) == RANKS
    assert counts == {key: 1 for key in counts}
    assert once(1 - breaks_in).items() <= counts.items()
    trained = {(e, at) for es in hub.entries for _, e, ats in es for at in ats}
    assert trained == counts.keys()
    assert len(counts) < 2 * SAMPLES


DEATHS = [
    *({"dies_before": number} for number in range(4)),
    # In a step's four buckets, in what closes it, or in windows' reductions.
    *({"dies_in_collective": number} for number in range(8)),
    *({"dies_in_opening": number} for number in range(4)),
]


@POLICIES
@pytest.mark.parametrize(
    ("options", "dead"),
    [
        ({}, set()),
        *((each, {DYING}) for each in DEATHS),
        ({"first_dies_between": True}, {0}),
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_ranks_of_which_one_may_die(
    policy: str,
    options: dict[str, Any],
    dead: set[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub, held = run_threads(Case(policy=policy, **options), monkeypatch)
    assert hub.dead == dead
    assert len(held) == RANKS - len(dead)
    assert check(hub, held) == once(0) | once(1)


@POLICIES
@pytest.mark.parametrize("tears", [False, True], ids=["all hold", "some hold"])
@pytest.mark.parametrize("second", [2, 3, 4, 5])
@pytest.mark.every(5)
def test_two_ranks_that_die(
    policy: str, tears: bool, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        policy=policy, ranks=4, tears=tears, dies_before=2, second_dies_before=second
    )
    hub, held = run_threads(case, monkeypatch)
    assert hub.dead >= {DYING}
    assert check(hub, held) == once(0) | once(1)


@pytest.mark.parametrize(
    ("policy", "number"),
    [("sync", 2), ("sync", 4), ("cadence", 4), ("async", 5), ("async", 12)],
)
def test_a_survivor_takes_the_result_that_another_one_holds(
    policy: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(policy=policy, dies_before=number, tears=True)
    hub, held = run_threads(case, monkeypatch)
    assert hub.half_held
    assert check(hub, held) == once(0) | once(1)


def test_auto_begins_in_steps_and_goes_on_in_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain averaging, as its run is known to be short."""
    case = Case(policy="auto", epochs=1, reduce_s=0.02)
    hub, held = run_threads(case, monkeypatch)
    assert check(hub, held) == once(0)
    kinds = {kind for entries in hub.entries for kind, _, _ in entries}
    assert kinds >= {STEPPED, TRAINED, CLOSED}


@POLICIES
def test_checkpoints_inside_an_epoch(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They change nothing; two of the three ranks resume from the first one."""
    hub, held = run_threads(Case(policy=policy, is_cut=True), monkeypatch)
    assert check(hub, held) == once(0) | once(1)
    monkeypatch.undo()
    hub, held = run_threads(Case(policy=policy, ranks=2), monkeypatch, hub)
    assert check(hub, held) == once(0) | once(1)


@POLICIES
@pytest.mark.parametrize("dies", [None, 2, 4, 6, 8])
@pytest.mark.every(2)
def test_a_layer_is_unfrozen_between_epochs(
    policy: str, dies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reducers are built for it a rank may die; the third epoch is as usual."""
    case = Case(policy=policy, is_frozen=True, epochs=3, dies_in_opening=dies)
    hub, held = run_threads(case, monkeypatch)
    assert check(hub, held, is_frozen=True) == once(0) | once(1) | once(2)
