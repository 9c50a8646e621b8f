"""A launcher of any host but the first: starts its ranks, and does as the first says.

When that one is gone it does as the successor says, or leads itself where it is that
one (`standby.py`), and has its ranks go to the coordinator there. Where no host goes on
it ends its ranks.

    follows host 0 ──lost──▶ there is a successor ──this host──▶ leads ───▶ run ends
          │                         └──another──▶ comes to it ──▶ follows that one
          └──run ends            none, or too few hosts: ends its ranks
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Final, final

from elche.comm.control.addresses import format_address
from elche.coordination.liveness import BEAT_S, SILENT_S
from elche.coordination.protocol.host_messages import (
    HostBeat,
    HostInterrupted,
    HostRefused,
    HostWelcome,
    RankEnded,
    RunEnded,
    SignalRank,
)
from elche.errors import CommunicationError, ConfigError, ProtocolError
from elche.runtime.hosts.hosts_config import HostsConfig
from elche.runtime.hosts.launcher_link import LauncherLink
from elche.runtime.hosts.standby import Standby
from elche.runtime.process.launch import (
    MOVES,
    LaunchConfig,
    rank_environment,
    start_rank,
)
from elche.runtime.process.launcher_watch import PIPE
from elche.runtime.process.launchers import rank_environments
from elche.runtime.process.rank_output import RankOutput
from elche.runtime.process.rank_processes import (
    GRACE_S,
    KILL_AFTER_S,
    OWN_END_S,
    SIGNALS,
    RankProcess,
    RankProcesses,
    handle_signals,
    send_signal,
)

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.2
LAST_WORD_S: Final = 10.0
"""For the first host's launcher to say how the run has ended, when all ranks have."""
REMEDY: Final = (
    "where no host goes on with the run, start all again, host 0 with --resume, from "
    "the last checkpoint in a --checkpoint-dir that all of them see"
)
FOR_TWO: Final = "; two hosts outlive that with `elche witness` on a third machine"
CUT_OFF_S: Final = SILENT_S + 2 * BEAT_S
"""Silence of the first host after which the others go on without this one: that has
seen the same from its side, and sooner."""


@dataclass(frozen=True, slots=True)
class FollowResult:
    """How a run ended, as the first host's launcher says.

    Attributes:
        exit_code: of the run.
        reason: why it was ended, "" if it was not.
    """

    exit_code: int
    reason: str


def follow_leader(config: LaunchConfig) -> FollowResult:
    """Starts this host's ranks when all hosts are there, and waits for the run's end.

    Raises:
        CommunicationError: the first host cannot be reached in time.
        ConfigError: the hosts do not fit together.
    """
    assert config.hosts is not None
    return asyncio.run(_follow(config, config.hosts))


async def _follow(config: LaunchConfig, hosts: HostsConfig) -> FollowResult:
    link = await _connected(hosts)
    follower = _Follower(config, hosts, link)
    try:
        return await follower.run()
    finally:
        await follower.close()


async def _connected(hosts: HostsConfig) -> LauncherLink:
    """Connects as soon as the first host listens."""
    deadline_s = time.monotonic() + hosts.gather_s
    while True:
        try:
            return await LauncherLink.connect(hosts.rendezvous, hosts.key)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
            if time.monotonic() > deadline_s:
                raise CommunicationError(
                    f"host 0 did not answer at {hosts.meeting} within "
                    f"{hosts.gather_s:g} s: {error}"
                ) from error
        await asyncio.sleep(RETRY_S)


@final
class _Follower:
    """This host's ranks in a run that another host leads."""

    def __init__(
        self, config: LaunchConfig, hosts: HostsConfig, link: LauncherLink
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._link = link
        self._processes: dict[int, RankProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._pipes: dict[
            int, int
        ] = {}  # to each rank; this process alone has that end
        self._standby = None if hosts.is_open else Standby(hosts)
        self._output = RankOutput(config.on_line, config.display, lambda: True)
        self._signal: signal.Signals | None = None
        self._heard_s = time.monotonic()
        self._is_silent = self._is_cut_off = self._is_untold = False
        self._is_needed = True
        self._leader = f"host 0 at {hosts.meeting}"
        self._why_alone = ""  # where another host was to go on

    async def run(self) -> FollowResult:
        """From this host's coming to the run's end."""
        handle_signals(self._processes, self._interrupt)
        standby = self._standby
        ports = () if standby is None else standby.ports
        self._link.send(self._hosts.joins(self._config.world_size, ports))
        result = await self._follow()
        if result is None and standby is not None and standby.successor is not None:
            result = await self._go_on(standby)
        # Ranks end by themselves where no other coordinator may come to be.
        ends_by_itself = result is None and not (self._is_cut_off or self._may_move)
        await self._end_ranks(GRACE_S if ends_by_itself else 0.0)
        await self._output.finish()
        if result is None:
            result = self._lost()
        return result

    async def _follow(self) -> FollowResult | None:
        """Does as the leading launcher says; see `_receive`."""
        watching = asyncio.ensure_future(self._watch_silence())
        try:
            return await self._receive()
        finally:
            watching.cancel()

    async def _go_on(self, standby: Standby) -> FollowResult | None:
        """The first host is lost: this one leads, or goes to the one that does.

        Returns:
            How the run ended; None: this host has no part in it any more.
        """
        running = [r for r, p in self._processes.items() if p.returncode is None]
        if not running or self._signal is not None:
            return None
        self._link.abort()
        logger.warning("%s", self._loss())
        number = standby.successor
        if number == self._hosts.node_rank:
            ended = await standby.lead(self._processes, self._lead)
            self._why_alone = standby.why_not
            if ended is None:
                return None
            return FollowResult(ended.exit_code, ended.reason)
        link = await standby.come()
        self._why_alone = standby.why_not
        if link is None:
            return None
        self._link, self._is_needed, self._is_cut_off = link, True, False
        self._is_untold = self._signal is not None
        self._leader = f"host {number} at {format_address(*standby.coordinator)}"
        self._move_ranks(standby.coordinator)
        await standby.close()
        for rank, process in self._processes.items():
            if process.returncode is not None:
                link.send(RankEnded(rank=rank, code=process.returncode))
        self._heard()
        return await self._follow()

    async def _lead(self, address: tuple[str, int], processes: RankProcesses) -> None:
        self._move_ranks(address)
        await processes.come()
        if self._signal is not None:  # since host 0 was lost
            processes.interrupt(self._signal)

    def _move_ranks(self, address: tuple[str, int]) -> None:
        """Another coordinator serves, there."""
        line = f"{format_address(*address)}\n".encode()
        for pipe in self._pipes.values():
            with contextlib.suppress(BrokenPipeError):  # it has ended
                os.write(pipe, line)

    async def close(self) -> None:
        """Kills what still runs, and closes what is open."""
        self._signal_all(signal.SIGKILL)
        if self._watchers:
            await asyncio.wait(self._watchers)
        self._output.close()
        self._link.close()
        for descriptor in self._pipes.values():
            os.close(descriptor)
        if self._standby is not None:
            await self._standby.close()

    def _lost(self) -> FollowResult:
        if not self._processes:
            raise CommunicationError(
                f"host 0 at {self._hosts.meeting} did not take this host: it has "
                "ended, has another --key-file, or its run has begun without this host"
            )
        reason = "; ".join(filter(None, [self._loss(), self._why_alone, REMEDY]))
        if self._hosts.nnodes == 2 and not self._may_move:
            reason += FOR_TWO
        if self._why_alone or self._is_cut_off or self._may_move:
            return FollowResult(1, reason)
        codes = (p.returncode or 0 for p in self._processes.values())
        code = next((128 - c if c < 0 else c for c in codes if c), 1)
        return FollowResult(code, reason)

    def _loss(self) -> str:
        """What has become of the first host, in words."""
        if self._is_cut_off:
            return (
                f"{self._leader} has been silent for {CUT_OFF_S:g} s, and others may "
                "go on: it is stopped, or the link to it is cut"
            )
        return f"lost {self._leader}: its launcher has ended, or the link to it is cut"

    @property
    def _may_move(self) -> bool:
        """Whether ranks wait for another host's coordinator when they lose theirs."""
        return self._standby is not None and bool(self._standby.run)

    async def _receive(self) -> FollowResult | None:
        """Does as the first host's launcher says until the run ends.

        Returns:
            How it ended; None: that launcher is gone.
        """
        deadline_s = time.monotonic() + self._hosts.gather_s + LAST_WORD_S
        while True:
            try:
                messages = await asyncio.wait_for(self._link.receive(), LAST_WORD_S)
            except asyncio.TimeoutError:
                if self._watchers:
                    is_over = all(watcher.done() for watcher in self._watchers)
                else:
                    is_over = time.monotonic() > deadline_s
                if is_over:
                    return None
                continue
            except ProtocolError:
                return None
            if not messages:
                return None
            self._heard()
            for message in messages:
                if isinstance(message, RunEnded):
                    return FollowResult(message.code, message.reason)
                if isinstance(message, HostRefused) and self._signal is not None:
                    return FollowResult(128 + self._signal, message.reason)
                await self._take(message)
            self._report()

    async def _take(self, message: Any) -> None:
        if isinstance(message, HostRefused):
            raise ConfigError(message.reason)
        if isinstance(message, HostWelcome):
            await self._start(message)
        elif isinstance(message, SignalRank) and message.rank in self._processes:
            number = signal.Signals(message.number)
            send_signal(self._processes[message.rank], number)
        elif isinstance(message, HostBeat):
            self._is_needed = message.is_needed
            if self._is_untold:  # what came while it went to this leader
                self._is_untold = False
                self._tell_signal()
        elif self._standby is not None:
            self._standby.take(message)

    async def _start(self, welcome: HostWelcome) -> None:
        config, hosts = self._config, self._hosts
        ranks = range(welcome.first, welcome.first + config.world_size)
        world_size = welcome.world_size
        environments = rank_environments(
            world_size, hosts.rendezvous, hosts.key, ranks, hosts.node_rank
        )
        # Of elche alone: another host says how the run is, not what starts here.
        told = {n: v for n, v in welcome.environment if n.startswith("ELCHE_")}
        told |= {"ELCHE_LISTEN": hosts.own_address()}
        told |= {MOVES: "1"} if welcome.run else {}
        if self._standby is not None:
            self._standby.begin(welcome)
        for place, rank in enumerate(ranks):
            watched, self._pipes[rank] = os.pipe()
            own = environments[place] | told | {PIPE: str(watched)}
            environment = rank_environment(config, place, own)
            process = await start_rank(
                config, place, environment, watched, self._output, place
            )
            os.close(watched)
            self._processes[rank] = process
            watching = self._watch(rank, process)
            self._watchers.append(asyncio.ensure_future(watching))

    async def _watch(self, rank: int, process: RankProcess) -> None:
        code = await process.wait()
        self._link.send(RankEnded(rank=rank, code=code))

    def _interrupt(self, number: signal.Signals) -> None:
        """This launcher was sent a signal: this host leaves, or all ranks are told.

        The second one kills this host's, as does the first where nothing comes of it.
        """
        if self._signal is not None:
            self._signal_all(signal.SIGKILL)
            self._link.close()
            return
        self._signal = number if number in SIGNALS else signal.SIGTERM
        self._tell_signal()
        loop, end_s = asyncio.get_running_loop(), OWN_END_S + KILL_AFTER_S
        loop.call_later(end_s, self._signal_all, signal.SIGKILL)

    def _tell_signal(self) -> None:
        assert self._signal is not None
        self._link.send(HostInterrupted(number=int(self._signal)))

    async def _end_ranks(self, grace_s: float) -> None:
        """Waits for the ranks a while; terminates, and then kills, who stays."""
        for patience_s, number in ((grace_s, signal.SIGTERM), (KILL_AFTER_S, None)):
            running = [watcher for watcher in self._watchers if not watcher.done()]
            if running:
                await asyncio.wait(running, timeout=patience_s)
            if number is not None:
                self._signal_all(number)
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            send_signal(process, number)

    def _heard(self) -> None:
        now_s = time.monotonic()
        if self._is_silent:
            self._is_silent = False
            silent_s = now_s - self._heard_s
            logger.warning("%s is heard again, after %.0f s", self._leader, silent_s)
        self._heard_s = now_s

    def _report(self) -> None:
        """Says that this host lives, and what it has, where another may succeed."""
        if self._standby is not None and self._may_move:
            self._link.send(self._standby.took)

    async def _watch_silence(self) -> None:
        """Says that the first host is silent; ends this one where the others go on."""
        while True:
            await asyncio.sleep(BEAT_S)
            self._report()
            silent_s = time.monotonic() - self._heard_s
            standby = self._standby
            has_successor = standby is not None and standby.successor is not None
            if silent_s >= CUT_OFF_S and (has_successor or not self._is_needed):
                self._is_cut_off = True
                self._link.abort()
                return
            if self._processes and silent_s >= SILENT_S and not self._is_silent:
                self._is_silent = True
                logger.warning(
                    "%s has been silent for %.0f s, and training waits: it is stopped, "
                    "or the link to it is cut",
                    *(self._leader, silent_s),
                )
