"""Comparison of the hosts of a run, and the ranks of each. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from elche.coordination.protocol.host_messages import OPEN, HostJoins


def host_refusal(joined: HostJoins, hosts: Iterable[HostJoins]) -> str:
    """Why a host cannot take part in a run; "" if it can.

    Args:
        joined: the one that has come.
        hosts: those that have come before, the first one among them.
    """
    known = {host.node_rank: host for host in hosts}
    first = known[0]
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
    theirs = dict(joined.versions)
    for name, version in first.versions:
        if theirs.get(name) != version:
            return (
                f"{joined} has {name} {theirs.get(name)}, host 0 ({first.name}) has "
                f"{version}; install the same on every host"
            )
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
