"""Settings of a launcher that is one of several, and what it says of itself."""

from __future__ import annotations

import errno
import os
import platform
import socket
from dataclasses import dataclass
from typing import Final

from elche.comm.control.addresses import (
    EVERYWHERE,
    format_address,
    listen,
    own_address,
)
from elche.coordination.hosts import PROTOCOL
from elche.coordination.protocol.host_messages import OPEN, HostJoins
from elche.coordination.protocol.messages import PROTOCOL_VERSION
from elche.coordination.succession import can_be_succeeded
from elche.errors import CommunicationError, ConfigError
from elche.runtime.hosts.remote_start import RemoteStart
from elche.runtime.hosts.versions import installed_versions

GATHER_S: Final = 300.0
JOIN_WITHIN_S: Final = 10.0
"""For a run under way to answer a host that is to join it."""
JOIN_PORT: Final = 29400


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsConfig:
    """One launcher's place among those of a run.

    Attributes:
        nnodes: hosts of the run; `OPEN`: it begins with one, and others join it.
        node_rank: this one's place among them; 0 leads. Who joins has 1, until the
            first one has numbered it.
        rendezvous: where other hosts reach the first one: host and port.
        key: the run's secret, the same on every host.
        advertise: where others reach this host's ranks; "" for ``ELCHE_LISTEN``, or
            its address on the route to the first host.
        gather_s: deadline for all hosts to come.
        remote: the other hosts are started from here; None: by somebody else.
        invitation: what follows the address in the command by which others join.
        witness: where one listens that has a vote; None: there is none.
    """

    nnodes: int
    node_rank: int
    rendezvous: tuple[str, int]
    key: bytes
    advertise: str = ""
    gather_s: float = GATHER_S
    remote: RemoteStart | None = None
    invitation: str = ""
    witness: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        if self.nnodes != OPEN and self.nnodes < 2:
            raise ConfigError(f"expected --nnodes of at least 2, got {self.nnodes}")
        if self.nnodes != OPEN and not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"expected a --node-rank of 0 to {self.nnodes - 1}, got "
                f"{self.node_rank}"
            )
        for option, host in (
            ("--rendezvous", self.rendezvous[0]),
            ("--advertise", self.advertise or "unset"),
        ):
            if host in EVERYWHERE:
                raise ConfigError(
                    f"expected {option} to name an address that other hosts reach, "
                    f"got {host!r}, which is every address of a host"
                )

    @property
    def is_open(self) -> bool:
        """Whether hosts join the run at any time."""
        return self.nnodes == OPEN

    @property
    def may_be_succeeded(self) -> bool:
        """Whether another host may go on without the first one.

        Not where that one started the others: they write to it what their ranks print.
        """
        has_witness = self.witness is not None
        can = can_be_succeeded(self.nnodes, has_witness=has_witness)
        return can and self.remote is None

    @property
    def meeting(self) -> str:
        """Where the hosts meet, in words."""
        return format_address(*self.rendezvous)

    def own_address(self) -> str:
        """Where others reach this host's ranks.

        Raises:
            CommunicationError: there is no route to the first host.
        """
        told = os.environ.get("ELCHE_LISTEN", "auto")
        if told in (*EVERYWHERE, "auto"):
            told = ""
        return self.advertise or told or own_address(self.rendezvous[0])

    def joins(self, ranks: int, ports: tuple[int, ...] = ()) -> HostJoins:
        """How this launcher presents itself and its ranks.

        Args:
            ranks: how many.
            ports: where it would be met as a successor.
        """
        return HostJoins(
            node_rank=self.node_rank,
            nnodes=self.nnodes,
            ranks=ranks,
            name=platform.node(),
            address=self.own_address(),
            versions=(
                (PROTOCOL, str(PROTOCOL_VERSION)),
                *installed_versions().items(),
            ),
            ports=ports,
        )

    def listener(self) -> socket.socket:
        """A socket for the other hosts and their ranks, on the first host.

        At the rendezvous's address; where that is not this host's own (it is mapped to
        it), at what is advertised.

        Raises:
            CommunicationError: it cannot be listened on.
        """
        host, port = self.rendezvous
        try:
            try:
                return listen(host, port)
            except OSError as error:
                is_mapped = error.errno == errno.EADDRNOTAVAIL and self.advertise
                if not is_mapped:
                    raise
                return listen(self.advertise, port)
        except OSError as error:
            raise CommunicationError(
                f"host 0 cannot listen at {self.meeting}: {error.strerror or error}; "
                "is --rendezvous an address of this host, and the port free? Where it "
                "is one that is mapped to this host, give --advertise with its own"
            ) from error
