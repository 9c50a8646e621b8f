"""Ports that only the test which asked for them takes."""

from __future__ import annotations

import contextlib
import secrets
import socket

PORTS = range(10_000, 15_000)
"""Below those that the system gives whoever asks for any, and that Slurm would."""


def free_port(address: str = "127.0.0.1", ports: range = PORTS) -> int:
    """Returns a port that was free just now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in secrets.SystemRandom().sample(ports, 50):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise AssertionError("no free port")
