"""A user's script, as the process tests run it: `python scripts.py CASE [POLICY]`."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch.distributed import TCPStore

import elche
from elche.comm.control.control_channel import ControlChannel
from elche.coordination.protocol.events import Event, StepsDone
from tests.harness.small_loop import begin, take_step


def _train(case: str, policy: str) -> None:
    model, optimizer, loader = begin(160, 4, policy=policy)
    # In windows a rank is sure of its first leases alone, on a machine that is busy.
    fails_at = (0, 5 if policy == "sync" else 1)
    for epoch in range(2):
        for number, (x,) in enumerate(loader):
            is_last = elche.rank() == elche.world_size() - 1
            if is_last and (epoch, number) == fails_at:
                _fail(case)
            take_step(model, optimizer, x)
        elche.barrier()
    if case == "key":
        _show_key()
    print(f"done {elche.rank()} of {elche.world_size()}", flush=True)


def _show_key() -> None:
    """What torchrun's store tells anybody who asks."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False)
    own = store.get("elche/start/1").decode()
    name = store.get(f"elche/name/{own}").decode()
    path = store.get(f"elche/{name}/coordinator").decode()
    mode = os.stat(path).st_mode & 0o777
    print(f"rank {elche.rank()} found {path} of mode {mode:o}", flush=True)
    elche.barrier()


def _endless(case: str, policy: str) -> None:
    """Trains on; with `stop` the last rank stops as soon as it has reported steps."""
    model, optimizer, loader = begin(100_000, 6, policy=policy)
    is_last = elche.rank() == elche.world_size() - 1
    for _ in range(1000):
        for number, (x,) in enumerate(loader):
            if number == 20:
                print(f"rank {elche.rank()} is process {os.getpid()}", flush=True)
                if case == "stop" and is_last:
                    _stop_after_report()
            take_step(model, optimizer, x)


def _idle(case: str, policy: str) -> None:
    """Joins a run, and then does what looks at no connection: an evaluation, say."""
    elche.init_group()
    print(f"rank {elche.rank()} is process {os.getpid()}", flush=True)
    while True:
        signal.pause()


def _half_way(case: str, policy: str) -> None:
    """Ends inside an epoch; its iterator outlives the modules that it runs in.

    The interpreter lets go of what a thread holds for itself last of all.
    """
    *_, loader = begin(256, 8, policy=policy)
    torch._C.held = held = threading.local()  # type: ignore[attr-defined]
    held.batches, held.modules = iter(loader), list(sys.modules.values())
    next(held.batches)
    if case == "half-way, raise":
        raise ValueError("a fault in user code")


def _stop_after_report() -> None:
    """The coordinator grants more, and the others wait for this rank meanwhile."""
    send = ControlChannel.send

    def send_and_stop(channel: ControlChannel, *events: Event) -> None:
        send(channel, *events)
        if any(isinstance(event, StepsDone) for event in events):
            os.kill(os.getpid(), signal.SIGSTOP)

    ControlChannel.send = send_and_stop  # type: ignore[method-assign]


def _fail(case: str) -> None:
    if case == "raise":
        raise ValueError("a fault in user code")
    if case == "exit":
        sys.exit(7)
    if case == "exit 0":
        sys.exit()


if __name__ == "__main__":
    wanted, chosen = sys.argv[1], (sys.argv[2:] or ["sync"])[0]
    runs = {
        "endless": _endless,
        "stop": _endless,
        "idle": _idle,
        "half-way": _half_way,
        "half-way, raise": _half_way,
    }
    runs.get(wanted, _train)(wanted, chosen)
