"""How long survivors take to train again after a rank is killed: `python recovery.py`.

From ranks that have imported torch before; each kill is a run of its own. Beside the
whole time (the kill to the next trained batch of the slowest survivor) stand its parts:
until the slowest survivor knows of the death, until it has formed the new group, and
until it has trained on its next batch.

``--beside`` measures others instead, from the kill to the first step of the last rank.
All ranks start anew under torchrun, with torch's DistributedDataParallel from nothing,
and under `elche run --max-restarts`, from its last checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import elche
from benchmarks import recovery_rank
from benchmarks.recovery_rank import (
    BATCH_SIZE,
    CHECKPOINTS,
    KILLED,
    die,
    step,
    training,
)
from elche.runtime.process.worker import Worker
from elche.runtime.sync.step_groups import StepGroups
from elche.runtime.windows.regrouping import Regrouping
from tests.harness.rank_pool import RankPool
from tests.harness.serving import serve_in_thread

ON_S = 1.0
"""So long survivors train on, so that each has trained before one breaks off."""
TORCHRUN = "-m", "torch.distributed.run", "--standalone"
ELCHE_RUN = (
    *("-m", "elche", "run"),
    *("--checkpoint-every", "0.5", "--checkpoint-dir"),
)
BESIDE_S = 300.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Else torch 2.13 starts gloo anew with the addresses of ranks that have ended.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def rank(policy: str, transport: str, victim: int, delay_s: float) -> dict[str, float]:
    """Trains until the victim is dead and a batch is trained; times by one clock."""
    own = int(os.environ["RANK"])
    times: dict[str, float] = {}

    def note(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            times.setdefault(key, time.monotonic())
            return result

        setattr(owner, name, wrapped)

    note_regroup = Worker.note_regroup

    def heard(worker: Worker, *regroups: Any) -> None:
        note_regroup(worker, *regroups)
        if len(worker.members) < worker.world_size:
            times.setdefault("heard", time.monotonic())

    Worker.note_regroup = heard  # type: ignore[method-assign]
    note(Regrouping, "meet", "formed")
    note(StepGroups, "settle", "formed")
    model, optimizer, loader = elche.setup(
        *training(BATCH_SIZE),
        policy=policy,
        transport=elche.config.TransportConfig(kind=transport),
        leave_out=False,
    )
    for epoch in range(1000):
        for number, batch in enumerate(loader):
            if own == victim and (epoch, number) == (0, 3):
                killed_at = Path(os.environ["KILLED_AT"])
                threading.Timer(delay_s, die, [killed_at]).start()
            step(model, optimizer, batch)
            if "formed" in times:
                times.setdefault("trained", time.monotonic())
                if time.monotonic() - times["trained"] > ON_S:
                    break  # which ends the epoch for all
        if "trained" in times:
            break
    elche.shutdown()
    return times


def one(
    ranks: int, policy: str, transport: str, draws: random.Random, killed_at: Path
) -> dict[str, float]:
    """One kill; its times in seconds."""
    victim, delay_s = draws.randrange(1, ranks), draws.uniform(0.0, 0.3)
    with RankPool(ranks) as pool:

        def fence(rank: int) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pool.pids[rank], signal.SIGKILL)

        outcomes = pool.run(
            rank,
            *(policy, transport, victim, delay_s),
            case_setup=partial(serve_in_thread, fence=fence),
            env=[{"KILLED_AT": str(killed_at)}] * ranks,
            expect_failure=True,
        )
    survivors = [each for each in outcomes if each.rank != victim]
    errors = [str(each.error) for each in survivors if each.error]
    if errors:
        raise SystemExit("a run was lost:\n" + "\n".join(errors))
    began_s = float(killed_at.read_text())
    slowest = max((each.value for each in survivors), key=lambda t: t["trained"])
    return {
        "total_s": slowest["trained"] - began_s,
        "detection_s": slowest["heard"] - began_s,
        "regroup_s": slowest["formed"] - slowest["heard"],
        "first_batch_s": slowest["trained"] - slowest["formed"],
    }


def beside(
    kind: str, ranks: int, draws: random.Random, folder: Path
) -> dict[str, float]:
    """One kill of a run of another kind; seconds from it to the last first step.

    Args:
        kind: ``"torch"``, or elche's policy.
        ranks: how many.
        draws: who dies, and when.
        folder: an empty one.
    """
    victim, delay_s = draws.randrange(1, ranks), draws.uniform(0.0, 0.3)
    many = str(ranks)
    anew = [many, "--max-restarts", "1", recovery_rank.__file__, kind]
    if kind == "torch":
        command = [*TORCHRUN, "--nproc-per-node", *anew]
    else:
        (folder / CHECKPOINTS).mkdir()  # nobody dies before the first one is written
        command = [*ELCHE_RUN, str(folder / CHECKPOINTS), "--nproc", *anew]
    with (folder / "output").open("w+") as output:
        ended = subprocess.run(
            [sys.executable, *command, str(folder), str(victim), repr(delay_s)],
            env={**os.environ, **ENVIRONMENT},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=BESIDE_S,
            check=False,
        )
        output.seek(0)
        trained = [float(path.read_text()) for path in folder.glob("trained*")]
        if ended.returncode or len(trained) != ranks:
            raise SystemExit(f"{kind} was lost:\n{output.read()}")
    return {"total_s": max(trained) - float((folder / KILLED).read_text())}


def show(name: str, runs: Sequence[dict[str, float]]) -> None:
    """Medians and worst of a cell."""
    print(f"{name}, {len(runs)} kills:")
    for part in runs[0]:
        values = [run[part] for run in runs]
        median_s, worst_s = statistics.median(values), max(values)
        print(f"  {part:14} median {median_s:.3f}, worst {worst_s:.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each cell")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--policy", nargs="+", default=["sync", "cadence", "async"])
    parser.add_argument("--transport", nargs="+", default=["auto", "gloo"])
    parser.add_argument("--beside", action="store_true", help="others, alone")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    names = [(kind, "anew") for kind in ("torch", *asked.policy)]
    if not asked.beside:
        names = [*itertools.product(asked.policy, asked.transport)]
    for ranks, (policy, transport) in itertools.product(asked.ranks, names):
        draws, runs = random.Random(f"{asked.seed} {policy} {transport}"), []
        for _ in range(asked.kills):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                if asked.beside:
                    runs.append(beside(policy, ranks, draws, folder))
                else:
                    runs.append(one(ranks, policy, transport, draws, folder / KILLED))
        show(f"{policy}, {transport}, {ranks} ranks", runs)


if __name__ == "__main__":
    main()
