"""The hosts of a run as the leading launcher keeps them, for one to succeed it.

ALONE ──the run outlives this host's ranks──▶ ASKED ──the coordinator holds──▶ HELD
  ▲                                                                             │
  └──────── a view without a successor is settled: too few hosts, or a death ───┘
            ends the run
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, final

from elche.comm.control.addresses import format_address
from elche.coordination.liveness import BEAT_S, SILENT_S
from elche.coordination.protocol.host_messages import (
    HostJoins,
    HostsChanged,
    HostTook,
    JournalPiece,
    VoteAsked,
)
from elche.coordination.succession import Quorum, Verdict
from elche.errors import CommunicationError
from elche.runtime.coordinator_process.kept_coordinator import KeptCoordinator
from elche.runtime.hosts.host_link import HostLink
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.witness import ask_witness

logger = logging.getLogger(__name__)

SILENT_BEATS: Final = round(SILENT_S / BEAT_S)
_PENDING: Final = Verdict.WAITS, Verdict.NEEDS_VOTE


class _Phase(Enum):
    """Whether another host may go on without this one."""

    ALONE = "none may, and this one waits for none"
    ASKED = "the coordinator is to wait for it"
    HELD = "nobody is told what it does not know"


@final
class HostViews:
    """Names the successor, has it take the journal, and says when that is written.

    Args:
        config: this launcher's place.
        links: of the others, which their owner changes.
        ranks: of each host.
    """

    def __init__(
        self,
        config: HostsConfig,
        links: Mapping[int, HostLink],
        ranks: Mapping[int, Sequence[int]],
    ) -> None:
        self.run = secrets.token_hex(8)
        self._config = config
        self._links, self._ranks = links, ranks
        self._has_witness = config.witness is not None
        self._quorum = Quorum(0, ranks, has_witness=self._has_witness)
        self._quiet: dict[int, int] = {}  # beats since a host was last heard
        self._phase = _Phase.ALONE
        self._asking: asyncio.Task[None] | None = None
        self._settled = 0
        self._said: int | None = None
        self._is_over = False
        self._server: KeptCoordinator | None = None
        self._on_over: Callable[[str], None] = lambda reason: None
        self._tell: Callable[[str], None] = lambda line: None

    def attach(
        self,
        server: KeptCoordinator,
        on_over: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """Begins to spread the journal.

        Args:
            server: the run's coordinator.
            on_over: called with the reason if this host may not go on.
            say: takes a line for the user.
        """
        self._server, self._on_over, self._tell = server, on_over, say
        server.on_piece = self._spread

    def _spread(self, data: bytes, number: int, commands: int) -> None:
        piece = JournalPiece(number=number, commands=commands, data=data)
        for link in self._links.values():
            link.send(piece)

    def take(self, node_rank: int, took: HostTook) -> None:
        """A host lives, and has so much."""
        self._quiet[node_rank] = 0
        self._quorum.take(node_rank, took.view, took.pieces)
        if not took.can_lead and self._quorum.rule_out(node_rank):
            self._tell(f"{self._links[node_rank].host} can lead the run no more")
            self._change()
        self._review()

    def end(self, node_rank: int) -> None:
        """All ranks of a host have ended, as its launcher has seen."""
        self._quorum.end(node_rank)
        self._change()

    def lose(self, node_rank: int) -> None:
        """A host is gone; to be called before the coordinator hears of it."""
        self._change(lost=node_rank)

    def beat(self) -> None:
        """A second has passed: ends links of silent hosts, and names a successor."""
        server = self._server
        if server is None or self._is_over:
            return
        is_outlived = server.outlives(*self._ranks[0])
        if self._phase is _Phase.ALONE and is_outlived and self._quorum.can_name:
            self._phase = _Phase.ASKED
            server.hold(self._name_successor)
        elif self._phase is _Phase.HELD and not is_outlived:
            self._change(is_outlived=False)
        for node_rank in self._quorum.view.hosts & self._links.keys():
            link = self._links[node_rank]
            quiet = self._quiet[node_rank] = self._quiet.get(node_rank, 0) + 1
            if quiet >= SILENT_BEATS and self._phase is _Phase.HELD:
                logger.warning("%s has been silent for %g s", link.host, SILENT_S)
                link.abort()

    def _name_successor(self) -> None:
        self._phase = _Phase.HELD
        self._change()

    def _change(self, lost: int | None = None, *, is_outlived: bool = True) -> None:
        """Sends the next view, if it is another one."""
        is_outlived &= self._phase is _Phase.HELD
        gone = () if lost is None else (lost,)
        view = self._quorum.change(lost=gone, is_outlived=is_outlived)
        if view is not None and self._quorum.verdict in _PENDING:
            self._send_view()
        self._review()

    def _send_view(self) -> None:
        view = self._quorum.view
        witness = self._config.witness
        message = HostsChanged(
            number=view.number,
            successor=-1 if view.successor is None else view.successor,
            chain=tuple(tuple(sorted(each.hosts)) for each in self._quorum.chain),
            places=tuple(
                self._place(number, link.host)
                for number, link in sorted(self._links.items())
                if link.host is not None and number in view.hosts
            ),
            witness="" if witness is None else format_address(*witness),
        )
        for number, link in self._links.items():
            if number in view.hosts:
                link.send(message)

    def _place(
        self, number: int, host: HostJoins
    ) -> tuple[int, str, str, int, int, int, int]:
        ranks, (launchers, coordinator) = self._ranks[number], host.ports
        where = host.address, launchers, coordinator
        return (number, host.name, *where, ranks[0], len(ranks))

    def _review(self) -> None:
        """Does what the account of views says."""
        server, quorum = self._server, self._quorum
        if server is None or self._is_over:
            return
        verdict, view = quorum.verdict, quorum.view
        if verdict is Verdict.OVER:
            self._end("the other hosts are lost, and may go on without this one")
        elif verdict is Verdict.NEEDS_VOTE and self._asking is None:
            asking = self._ask(view.number)
            self._asking = asyncio.get_running_loop().create_task(asking)
        elif verdict is Verdict.SETTLED:
            if view.successor is None and self._phase is _Phase.HELD:
                self._phase = _Phase.ALONE
                server.release()
            if view.number > self._settled:  # a successor counts no older views then
                self._settled = view.number
                self._send_view()
                self._say_successor(view.successor)
            server.written(quorum.written(server.pieces))

    def _say_successor(self, successor: int | None) -> None:
        if successor in (None, self._said):
            return
        self._said = successor
        host = self._links[successor].host
        self._tell(
            f"the run goes on without host 0 if that is lost: {host} is the next to "
            "lead it"
        )

    async def _ask(self, view: int) -> None:
        config = self._config
        assert config.witness is not None
        question = VoteAsked(run=self.run, node_rank=0, view=view)
        why = "it is for another host, which goes on"
        try:
            is_given = await ask_witness(config.witness, config.key, question)
        except CommunicationError as error:
            is_given, why = False, str(error)
        self._asking = None
        if is_given:
            self._quorum.vote(view)
            self._review()
        elif self._quorum.verdict is Verdict.NEEDS_VOTE:
            self._end(f"the other hosts are lost, and the witness has no vote: {why}")

    def _end(self, why: str) -> None:
        self._is_over = True
        self._on_over(f"host 0 ends its part of the run: {why}")
