"""A process held to a part of a core: by a cgroup's quota, or stopped and continued.

python -m benchmarks.throttle QUOTA [FROM_S UNTIL_S]

Holds its parent, from and until so many seconds from now, or until that has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_S = 0.02


def stop_and_go(pid: int, quota: float, period_s: float = PERIOD_S) -> None:
    """Stops a process for a part of one period, and lets it run for the rest."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(period_s * (1.0 - quota))
    os.kill(pid, signal.SIGCONT)
    time.sleep(period_s * quota)


def enter_cgroup(pid: int, quota: float) -> Path | None:
    """Moves a process into a new cgroup of this quota; None where none can be made."""
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_v2 else CGROUPS / "cpu") / f"elche-throttle-{pid}"
    period_us = round(1e6 * PERIOD_S)
    allowed_us = round(quota * period_us)
    limits = {"cpu.cfs_period_us": period_us, "cpu.cfs_quota_us": allowed_us}
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        for name, value in (
            {"cpu.max": f"{allowed_us} {period_us}"} if is_v2 else limits
        ).items():
            (folder / name).write_text(str(value))
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        folder.rmdir()
        return None
    return folder


def main() -> None:
    """Holds the parent."""
    quota, pid = float(sys.argv[1]), os.getppid()
    from_s, until_s = map(float, sys.argv[2:] or ("0", "inf"))
    began_s = time.monotonic()
    time.sleep(from_s)
    with contextlib.suppress(ProcessLookupError):
        folder = enter_cgroup(pid, quota)
        print("cgroup" if folder else "signals", file=sys.stderr, flush=True)
        while os.getppid() == pid and time.monotonic() < began_s + until_s:
            if folder is None:
                stop_and_go(pid, quota)
            else:
                time.sleep(0.1)
        if folder is None:
            return
        if os.getppid() == pid:
            (folder.parent / "cgroup.procs").write_text(str(pid))
        time.sleep(0.1)  # until its last thread has gone
        folder.rmdir()


if __name__ == "__main__":
    main()
