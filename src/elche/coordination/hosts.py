"""Comparison of the hosts of a run, and the ranks of each. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any, Final

from elche.coordination.protocol.host_messages import OPEN, HostJoins
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.protocol.wire import to_wire

PROTOCOL: Final = "elche's protocol"
"""Among the versions of a host."""
_OF_ALL_VERSIONS: Final = "node_rank", "name", "versions"


def in_own_words(wire: Any) -> Any:
    """What a launcher says of itself, in this version's fields where it has another.

    So it is refused by its version, and not for a field that it has or lacks.

    Args:
        wire: any message, as it came.

    Returns:
        The same if it is another message, or of this version.
    """
    if not isinstance(wire, dict) or wire.get("type") != HostJoins.__name__:
        return wire
    try:
        version = dict(wire["versions"]).get(PROTOCOL)
    except (KeyError, TypeError, ValueError):
        return wire
    if version == str(PROTOCOL_VERSION):
        return wire
    blank = HostJoins(node_rank=-1, nnodes=0, ranks=0, name="", address="", versions=())
    said = {name: wire[name] for name in _OF_ALL_VERSIONS if name in wire}
    return to_wire(blank) | said


def host_refusal(joined: HostJoins, hosts: Iterable[HostJoins]) -> str:
    """Why a host cannot take part in a run; "" if it can.

    Args:
        joined: the one that has come.
        hosts: those that have come before, the first one among them.
    """
    known = {host.node_rank: host for host in hosts}
    first, theirs = known[0], dict(joined.versions)
    for name, version in first.versions:  # first: the rest is in this version's words
        if theirs.get(name) != version:
            return (
                f"{joined} has {name} {theirs.get(name)}, host 0 ({first.name}) has "
                f"{version}; install the same on every host"
            )
    if joined.nnodes != first.nnodes:
        if OPEN in (joined.nnodes, first.nnodes):
            return (
                f"{joined.name} and host 0 ({first.name}) were started differently: "
                "`elche join` is for a run of `elche run --listen`, and --nnodes for "
                "one whose hosts all have it"
            )
        return (
            f"{joined} was started with --nnodes {joined.nnodes}, host 0 with "
            f"{first.nnodes}"
        )
    is_one_of = joined.nnodes == OPEN or 0 < joined.node_rank < first.nnodes
    if not is_one_of or joined.node_rank in known:
        taken = known.get(joined.node_rank)
        by = "" if taken is None else f", which {taken.name} has"
        return (
            f"{joined.name} was started with --node-rank {joined.node_rank}{by}; "
            f"expected each of 0 to {first.nnodes - 1} once"
        )
    if joined.ranks < 1:
        return f"{joined} has {joined.ranks} ranks, expected at least one"
    for host, other in ((joined, first), (first, joined)):
        if is_loopback_address(host.address) > is_loopback_address(other.address):
            return (
                f"{host} would be reached at {host.address}, which no other host "
                "reaches; start it with --advertise and its own address"
            )
    return ""


def ranks_by_host(hosts: Iterable[HostJoins]) -> dict[int, range]:
    """Each host's ranks, in the hosts' order."""
    found, first = dict[int, range](), 0
    for host in sorted(hosts, key=lambda host: host.node_rank):
        found[host.node_rank] = range(first, first + host.ranks)
        first += host.ranks
    return found


def is_loopback_address(address: str) -> bool:
    """Whether this is an address, not a name, that only its own host reaches."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
