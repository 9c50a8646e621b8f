"""A script with signal handlers of its own: every rank leaves its loop at SIGTERM."""

from __future__ import annotations

import os
import signal
from types import FrameType

from tests.harness.small_loop import begin, take_step

RANK = int(os.environ["RANK"])
got: list[str] = []


def note(number: int, frame: FrameType | None) -> None:
    """Only notes the signal, as scripts do that save when the batch is through."""
    got.append(signal.Signals(number).name)
    os.write(1, f"rank {RANK} got {got[-1]}\n".encode())


def main() -> None:
    """Trains until SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, note)
    model, optimizer, loader = begin(400_000, 6)
    for number, (x,) in enumerate(loader):
        if number == 20:
            print(f"rank {RANK} trains", flush=True)
        take_step(model, optimizer, x)
        if "SIGTERM" in got:
            break
    print(f"rank {RANK} saved", flush=True)


if __name__ == "__main__":
    main()
