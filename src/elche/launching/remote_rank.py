"""A rank's process on a node of Ray: ``remote_rank SOCKET PARENT [SCRIPT ...]``.

Without a script it calls the function received over the socket, and sends its result
back.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its actor ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(descriptor: int, parent: int, command: list[str]) -> None:
    """Runs the script in place of this program, or calls the function."""
    end_with_parent(parent)
    with socket.socket(fileno=descriptor) as link:
        if command:
            os.execv(sys.executable, [sys.executable, *command])
        parts = []
        while part := link.recv(1 << 20):
            parts.append(part)
        from ray import cloudpickle

        from elche.launching.function_rank import call_as_rank

        function, args = pickle.loads(b"".join(parts))
        code, message = call_as_rank(function, args, cloudpickle.dumps)
        link.sendall(message)
    sys.exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
