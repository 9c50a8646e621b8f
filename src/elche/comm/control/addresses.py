"""Hosts: which one this is, its addresses, and sockets to others."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import stat
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final

from elche.errors import CommunicationError, ConfigError

EVERYWHERE: Final = ("0.0.0.0", "::", "")
"""What can be listened on, and not be reached."""
GONE_AFTER_S: Final = 600.0
"""A host that does not confirm what is sent to it for so long is gone."""
PROBE_AFTER_S: Final = 10
PROBE_EVERY_S: Final = 5
RETRY_MS: Final = 2000
"""Longest pause between two attempts to send, where the system lets that be set: else
the pauses grow, and a link that was cut for a minute is taken up a minute late."""

_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_DESCRIPTORS: Final = "/proc/self/fd"

# Linux names them; 6.15 is the first to have the last one, which Python does not name.
_OPTIONS: Final = (
    (getattr(socket, "TCP_KEEPIDLE", None), PROBE_AFTER_S),
    (getattr(socket, "TCP_KEEPINTVL", None), PROBE_EVERY_S),
    (getattr(socket, "TCP_USER_TIMEOUT", None), round(GONE_AFTER_S * 1e3)),
    (44 if hasattr(socket, "TCP_USER_TIMEOUT") else None, RETRY_MS),
)


def host_name() -> str:
    """Names this host: equal for processes that share loopback, files and memory.

    So containers of one machine count as hosts of their own, as do network namespaces.
    The environment's ``ELCHE_HOST`` stands for all that if it is set: ranks of one
    name are summed among themselves before anything travels to those of another.
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
        ConfigError: it is malformed; ``what`` names it.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"expected {what} to be host:port, got {text!r}")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """As `parse_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str:
    """This host's address on the route to another.

    Raises:
        CommunicationError: there is no such route.
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
    """Whether only this host reaches an address, or a name that can be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0]).is_loopback
    except (OSError, ValueError):
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address alone, of IPv4 or IPv6.

    Raises:
        OSError: it is no address of this host, or the port is taken.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def outlive_cuts(connection: socket.socket) -> None:
    """Takes a link up soon after a cut, and sees a host that is gone without a word."""
    if connection.family not in _FAMILIES:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        if option is None:
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:  # a kernel that has it not
            continue


@contextlib.contextmanager
def outliving_cuts(host: str) -> Iterator[set[int]]:
    """Does so for connections that are made meanwhile from an own address, as gloo's.

    Yields their numbers, which are there in the end; see `break_off`.

    gloo gives out neither its sockets nor their options, and a link that was cut for a
    minute was taken up 48 s late. What others have opened before stays as it is.
    """
    before = {number for number, _ in _sockets()}
    made = set[int]()
    yield made
    own = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    for number, connection in _sockets():
        if number not in before and connection.family in _FAMILIES:
            with contextlib.suppress(OSError):  # closed since
                if connection.getsockname()[0] == own:
                    made.add(number)
                    outlive_cuts(connection)


def break_off(numbers: Set[int]) -> None:
    """Ends connections, of whose other side nothing may ever come: its link is cut."""
    for number, connection in _sockets():
        if number in numbers:
            with contextlib.suppress(OSError):  # closed since
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Numbers of this process's sockets, and a second handle of each for a moment."""
    # With a timeout by default such a handle would change what the first one is set to.
    if not os.path.isdir(_DESCRIPTORS) or socket.getdefaulttimeout() is not None:
        return
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        with contextlib.ExitStack() as stack:
            try:
                second = os.dup(descriptor)
            except OSError:  # closed since
                continue
            about = os.fstat(second)
            if stat.S_ISSOCK(about.st_mode):
                yield about.st_ino, stack.enter_context(socket.socket(fileno=second))
            else:
                os.close(second)
