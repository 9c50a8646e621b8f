"""Names and addresses of hosts, and sockets between them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import platform
import socket
from pathlib import Path
from typing import Final

from elche.errors import CommunicationError, ConfigError

EVERYWHERE: Final = ("0.0.0.0", "::", "")
"""Wildcard addresses, which can be listened on but not connected to."""
GONE_AFTER_S: Final = 600.0
"""Time (s) without TCP acknowledgement after which a host counts as dead."""
PROBE_AFTER_S: Final = 10
PROBE_EVERY_S: Final = 5
UNREACHABLE: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a connection whose peer does not acknowledge data."""

_OPTIONS: Final = (
    (getattr(socket, "TCP_KEEPIDLE", None), PROBE_AFTER_S),
    (getattr(socket, "TCP_KEEPINTVL", None), PROBE_EVERY_S),
)
_USER_TIMEOUT: Final = getattr(socket, "TCP_USER_TIMEOUT", None)
"""Socket option, available on Linux only."""


def host_name() -> str:
    """Names this host: equal for processes that share loopback, files and memory.

    So containers and network namespaces of one machine count as separate hosts. The
    environment variable ``ELCHE_HOST`` overrides the name. Ranks of one name are summed
    among themselves before sums between names.
    """
    if named := os.environ.get("ELCHE_HOST"):
        return named
    parts = [platform.node()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Reads ``host:port``, ``[address]:port`` for IPv6.

    Raises:
        ConfigError: the address is malformed; ``what`` names it.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"expected {what} to be host:port, got {text!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Formats an address for `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str:
    """Returns this host's address on the route to another host.

    Raises:
        CommunicationError: there is no route.
    """
    try:
        family, kind, _, _, where = socket.getaddrinfo(
            host or None, 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:  # sends nothing
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise CommunicationError(
            f"found no route to host {host!r}: {error}; set ELCHE_LISTEN to this "
            "host's own address"
        ) from error


def is_loopback(host: str) -> bool:
    """True if an address or a resolvable name is a loopback address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0]).is_loopback
    except (OSError, ValueError):
        return False


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on one IPv4 or IPv6 address only.

    Raises:
        OSError: this host does not have the address, or the port is taken.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def keep_alive(connection: socket.socket) -> None:
    """Sets TCP_NODELAY and keepalive, which detects a host that vanished silently."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    give_up_after(connection, GONE_AFTER_S)


def give_up_after(connection: socket.socket, timeout_s: float) -> None:
    """Sets the time after which a connection without acknowledgements fails."""
    if connection.family != socket.AF_UNIX and _USER_TIMEOUT is not None:
        value = round(timeout_s * 1e3)
        connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, value)
