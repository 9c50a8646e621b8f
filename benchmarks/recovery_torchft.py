"""torchft's part of `recovery.py --beside`: LocalSGD over gloo, of which a rank dies.

Run by an interpreter that has torch and torchft (0.2.0 was used), and no elche:
`recovery.py --torchft PYTHON`. Every rank is a replica group of its own. Survivors go
on in their processes; the first batch that counts is the one after which they have
averaged without the dead one. The timeouts are as low as works on two cores: where a
rank is left out that lives, the run is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

from benchmarks.recovery_rank import BATCH_SIZE, KILLED, die, step, training

LOOPBACK = "127.0.0.1"
SYNC_EVERY = 8
"""Batches of a window."""
LIGHTHOUSE = {
    "quorum_tick_ms": 10,
    "heartbeat_timeout_ms": 500,  # with two ranks, who then are half of those known
    "join_timeout_ms": 100,  # with more: a rank that does not come in time is left out
}
TIMEOUT = timedelta(milliseconds=500)
"""Of a sum, which a death inside it does not end before."""
PATIENCE = timedelta(seconds=60)
"""For what is under way at the start alone: ranks that come, and take the model."""
STEPS_BEFORE = 3 * SYNC_EVERY
TRAINED = "trained"


class Rank:
    """One rank, which trains until it is killed.

    Args:
        number: of the rank.
        ranks: of all.
        folder: of the run.
        victim: the rank that dies.
        delay_s: after `STEPS_BEFORE` steps in a row of the whole group.
    """

    def __init__(
        self, number: int, ranks: int, folder: Path, victim: int, delay_s: float
    ) -> None:
        self._number, self._ranks, self._folder = number, ranks, folder
        self._victim, self._delay_s = victim, delay_s
        self._steps = 0
        self._is_through = False

    def train(self, lighthouse: str) -> None:
        """Trains; says when the others have gone on without the dead one."""
        model, optimizer, loader = training(BATCH_SIZE // self._ranks)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        state = {"model": model, "optimizer": optimizer}

        def load(values: dict[str, Any]) -> None:
            for name, each in state.items():
                each.load_state_dict(values[name])

        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=load,
            state_dict=lambda: {
                name: each.state_dict() for name, each in state.items()
            },
            min_replica_size=1,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            connect_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=LOOPBACK,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=str(self._number),
            hostname=LOOPBACK,
        )
        parent = os.getppid()
        with LocalSGD(manager, model, optimizer, SYNC_EVERY):
            for batch in loader:
                step(model, optimizer, batch)
                if manager.errored() is None:
                    self._stepped(manager.num_participants())
                if os.getppid() != parent:
                    return

    def _stepped(self, members: int) -> None:
        """A batch is trained, and the last average was one of so many ranks."""
        if members == self._ranks:
            self._steps += 1
            if self._number == self._victim and self._steps == STEPS_BEFORE:
                killed_at = self._folder / KILLED
                threading.Timer(self._delay_s, die, [killed_at]).start()
            return
        at_s = time.monotonic()
        if not (self._folder / KILLED).exists():
            if self._steps >= STEPS_BEFORE:
                sys.exit(f"rank {self._number}: {members} ranks, and none was killed")
            self._steps = 0  # they still come
        elif not self._is_through:
            self._is_through = True
            written = self._folder / f"new{self._number}"
            written.write_text(repr(at_s))
            written.rename(self._folder / f"{TRAINED}{self._number}")


def main() -> None:
    """``PYTHON recovery_torchft.py WITHIN_S RANKS FOLDER VICTIM DELAY_S``: one kill."""
    deadline_s = time.monotonic() + float(sys.argv[1])
    ranks, folder, victim = int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **LIGHTHOUSE)
    port = lighthouse.address().rpartition(":")[2]
    where = f"http://{LOOPBACK}:{port}"
    command = [sys.executable, *sys.argv, where]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(ranks)]
    try:
        while len([*folder.glob(f"{TRAINED}*")]) < ranks - 1:
            ended = {r for r, each in enumerate(processes) if each.poll() is not None}
            if (folder / KILLED).exists():
                ended.discard(victim)
            if ended:
                sys.exit(f"ranks {sorted(ended)} were lost")
            if time.monotonic() > deadline_s:
                sys.exit(f"not all ranks went on within {sys.argv[1]} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        lighthouse.shutdown()


if __name__ == "__main__":
    if len(sys.argv) == 6:
        main()
    else:
        ranks, folder, victim, delay_s, lighthouse, number = sys.argv[2:]
        own = Rank(int(number), int(ranks), Path(folder), int(victim), float(delay_s))
        try:
            own.train(lighthouse)
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # threads of torchft may hold the interpreter
