"""A network of limited rate for the ranks of a comparison, on one Linux machine.

Every rank gets a network namespace of its own, all of them hang on one switch, and
`tc tbf` limits each rank's cable in both directions. The coordinator listens on the
switch. Nothing outside these namespaces is touched, and they are removed in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elche.errors import ConfigError

DEVICE = "rank"
"""What a rank's end of its cable is called in its namespace."""
SENT_BYTES = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
"""How many bytes a rank's cable has carried from it, as the rank reads it."""
_NAMESPACES = Path("/var/run/netns")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


@dataclass(frozen=True, slots=True)
class Link:
    """Where the ranks of a slow network are.

    Attributes:
        switch: namespace of the switch.
        coordinator: address on the switch.
        ranks: namespace and address of each rank.
    """

    switch: str
    coordinator: str
    ranks: tuple[tuple[str, str], ...]

    def command(self, rank: int) -> tuple[str, ...]:
        """What to put before a rank's command, so that it runs in its namespace."""
        return ("ip", "netns", "exec", self.ranks[rank][0])

    def environment(self, rank: int) -> dict[str, str]:
        """Variables that make elche, and gloo by itself, use the rank's cable."""
        return {
            "ELCHE_LISTEN": self.ranks[rank][1],
            "GLOO_SOCKET_IFNAME": DEVICE,
        }

    def turn(self, rank: int, state: str) -> None:
        """Cuts a rank's cable (`down`), or mends it (`up`)."""
        _ip(f"-n {self.switch} link set p{rank} {state}")

    def listener(self) -> socket.socket:
        """A socket that listens on the switch, for a coordinator in this process.

        Raises:
            OSError: the namespace cannot be entered.
        """
        made: list[socket.socket | OSError] = []

        def listen() -> None:
            """In a thread: a namespace is a thread's, a socket stays where it began."""
            try:
                _enter(self.switch)
                made.append(socket.create_server((self.coordinator, 0)))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(target=listen)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]


@contextlib.contextmanager
def slow_link(ranks: int, mbit: float) -> Iterator[Link]:
    """Makes the network, and removes it in the end.

    Connections of the ranks use cubic, Linux's default, whatever this host's is: BBR
    takes a cable without delay for one that needs next to nothing under way, and with
    traffic both ways leaves a part of it unused.

    Args:
        ranks: how many there are.
        mbit: rate of each rank's cable, each way, in 10^6 bits per second.

    Raises:
        ConfigError: this machine or this user cannot make namespaces.
    """
    prefix = f"elche{os.getpid()}"
    switch = f"{prefix}s"
    names = [f"{prefix}r{rank}" for rank in range(ranks)]
    addresses = [f"10.77.0.{rank + 1}" for rank in range(ranks)]
    coordinator = "10.77.0.254"
    rate = f"rate {mbit:g}mbit burst 64kb latency 400ms"
    try:
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add hub type bridge")
        _ip(f"-n {switch} link set hub up")
        _ip(f"-n {switch} addr add {coordinator}/24 dev hub")
        for rank, name in enumerate(names):
            port = f"p{rank}"
            _ip(f"netns add {name}")
            _ip(
                f"-n {name} link add {DEVICE} type veth peer name {port} netns {switch}"
            )
            _ip(f"-n {switch} link set {port} master hub up")
            _ip(f"-n {name} addr add {addresses[rank]}/24 dev {DEVICE}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {DEVICE} up")
            _ip(f"-n {name} route change 10.77.0.0/24 dev {DEVICE} congctl cubic")
            for place, device in ((name, DEVICE), (switch, port)):
                _run(f"tc -n {place} qdisc add dev {device} root tbf {rate}")
        yield Link(switch, coordinator, tuple(zip(names, addresses, strict=True)))
    finally:
        for name in (*names, switch):
            with contextlib.suppress(OSError):
                subprocess.run(
                    ["ip", "netns", "del", name], check=False, capture_output=True
                )


def _enter(namespace: str) -> None:
    """Puts the calling thread into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(_NAMESPACES / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, _NEW_NETWORK):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(descriptor)


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _run(command: str) -> None:
    try:
        done = subprocess.run(
            command.split(), check=False, capture_output=True, text=True
        )
    except OSError as error:
        raise ConfigError(
            f"cannot limit a link: {error}; expected Linux with ip and tc (iproute2)"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"cannot limit a link: `{command}` said {done.stderr.strip()!r}; expected "
            "a user who may make network namespaces (root)"
        )
