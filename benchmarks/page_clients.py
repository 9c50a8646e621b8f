"""Throughput of a run with ten stopped browsers on its page, and with none, in pairs.

python -m benchmarks.page_clients [PAIRS SECONDS CLIENTS]
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

from benchmarks.paired import mean_interval
from elche.errors import DeadlineError
from elche.monitor.run_history import RunHistory
from elche.runtime.report.event_file import NAME

SCRIPT = Path(__file__).parents[1] / "tests" / "page" / "cases" / "endless.py"
START_S = 120.0
RUN = (*("-m", "elche", "run", "--page", "--quiet"), *("--speeds", "1,0.5", "--events"))
CLIENT = """
import os, signal, sys
from bokeh.client import pull_session
held = [pull_session(url=sys.argv[1]) for _ in range(int(sys.argv[2]))]
print(sum(len(session.document.roots) for session in held), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@contextlib.contextmanager
def run_with_page(folder: Path) -> Iterator[str]:
    """Trains on two emulated ranks during the block; yields their page's address."""
    command = [sys.executable, *RUN, str(folder), str(SCRIPT), str(folder)]
    with Popen(command, stderr=PIPE, text=True) as run:
        try:
            yield run.stderr.readline().removeprefix("elche run: ").strip()
        finally:
            run.send_signal(signal.SIGINT)
            run.communicate(timeout=100)


@contextlib.contextmanager
def stopped_clients(address: str, count: int) -> Iterator[None]:
    """Holds websocket sessions of a page open in a process that is stopped."""
    command = [sys.executable, "-c", CLIENT, address.rstrip("/"), str(count)]
    with Popen(command, stdout=PIPE, text=True) as client:
        try:
            assert client.stdout.readline() == f"{count}\n"
            yield
        finally:
            client.kill()


def windows(folder: Path) -> list[dict]:
    """Windows in a run's event file so far."""
    history = RunHistory()
    with contextlib.suppress(FileNotFoundError):
        history.feed((folder / NAME).read_text())
    return history.windows


def rate_with(count: int, duration_s: float) -> float:
    """Samples per second of a run while so many clients of its page are stopped."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        address = stack.enter_context(run_with_page(folder))
        with stopped_clients(address, count):
            until_s = time.monotonic() + START_S
            while not (seen := len(windows(folder))):
                if time.monotonic() > until_s:
                    raise DeadlineError(f"the run trained no window in {START_S:g} s")
                time.sleep(0.2)
            time.sleep(duration_s)
            first, *_, last = windows(folder)[seen:]
    return (last["samples"] - first["samples"]) / (last["t"] - first["t"])


if __name__ == "__main__":
    pairs, seconds, clients = map(int, sys.argv[1:] or (5, 30, 10))
    ratios = []
    for pair in range(pairs):
        order = (0, clients)[:: (-1) ** pair]
        rates = {count: round(rate_with(count, seconds), 1) for count in order}
        print(f"samples/s by stopped clients: {rates}", flush=True)
        ratios.append(rates[clients] / rates[0])
    print(f"rate of {clients} over none: {mean_interval(ratios)}")
