"""A rank's process on a node of Ray: ``remote_rank SOCKET PARENT [SCRIPT ...]``.

Without a script it calls the function received over the socket, and sends its result
back.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys

from elche.runtime.process.launcher_watch import signal_with_parent


def main(descriptor: int, parent: int, command: list[str]) -> None:
    """Runs the script in place of this program, or calls the function."""
    signal_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's nodes block it
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
