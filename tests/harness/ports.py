"""Ports that only the test which asked for them takes."""

from __future__ import annotations

import contextlib
import secrets
import socket

PORTS = range(10_000, 15_000)
"""Below those that the system gives whoever asks for any, and that Slurm would."""


def free_port(ports: range = PORTS) -> int:
    """Returns a port that was free just now."""
    for port in secrets.SystemRandom().sample(ports, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
