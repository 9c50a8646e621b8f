"""Configuration of a launch, its result, and the interface of a back end."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from elche.config_checks import check_not_negative, check_positive, check_whole
from elche.errors import ConfigError
from elche.monitor.run_history import RunHistory
from elche.runtime.process.rank_processes import RankProcess

if TYPE_CHECKING:
    from elche.monitor.live_run import LiveRun


class Network(Protocol):
    """Emulated network of ranks and coordinator, for benchmarks."""

    def command(self, rank: int) -> tuple[str, ...]:
        """Command prefix that runs a rank inside the network."""

    def environment(self, rank: int) -> dict[str, str]:
        """Environment variables of a rank inside the network."""

    def listener(self) -> socket.socket:
        """Opens a listening socket that all ranks can reach."""


class RankBackend(Protocol):
    """Back end of one run's ranks: processes of this machine, or of a cluster.

    Attributes:
        pipe: descriptor that a rank's process reads until the launcher ends; -1: none.
    """

    pipe: int

    def listen(self) -> socket.socket:
        """Opens the socket where the ranks reach the coordinator."""

    async def start(
        self, rank: int, place: int, environment: dict[str, str]
    ) -> RankProcess:
        """Starts a rank, without waiting for a machine that has room for it.

        Args:
            rank: its number.
            place: number of its device: that of the initial rank, for replacements too.
            environment: its variables, in addition to those of the place.
        """

    async def fence(self, process: RankProcess) -> None:
        """Kills a process (a stopped one, too) that the run continues without."""

    def end_waiting(self) -> None:
        """Ends ranks that no machine has had room for yet."""

    async def close(self) -> None:
        """Reads the ranks' remaining output, and releases all resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """Command, ranks and options of a launch.

    Attributes:
        command: the program and its arguments, the same on every rank.
        num_ranks: number of ranks, unless devices or speeds give it.
        devices: a device per rank, such as ``("cuda:0", "cpu")``.
        speeds: relative speeds of emulated devices, one per rank.
        ms_per_sample: an emulated device's time per sample at speed 1.
        fixed_ms: an emulated device's time per pass in addition to its samples'.
        environment: further variables for every rank.
        on_line: called with rank and text of each line that a rank prints, instead
            of passing the ranks' standard output on.
        network: emulated network, in place of this host's loopback.
        story_path: file for the event log of ranks and coordinator, written when the
            run ends, however it ends.
        start: starts a rank's process with this environment, in place of the command.
        trace_path: file for the timeline of all ranks, written then as well.
        display: prints the ranks' output on this terminal.
        on_view: called with the run's history twice a second.
        events: folder of the run's event file.
        appends_events: the folder may hold the events of an earlier start.
        rejoin: most replacements of dead ranks, which join the run.
        backend: opens the back end; None: processes of this machine.
    """

    command: tuple[str, ...]
    num_ranks: int | None = None
    devices: tuple[str, ...] | None = None
    speeds: tuple[float, ...] | None = None
    ms_per_sample: float = 1.25
    fixed_ms: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    on_line: Callable[[int, str], None] | None = None
    network: Network | None = None
    story_path: Path | None = None
    start: Callable[[int, Mapping[str, str]], RankProcess] | None = None
    trace_path: Path | None = None
    display: LiveRun | None = None
    on_view: Callable[[RunHistory], None] | None = None
    events: Path | None = None
    appends_events: bool = False
    rejoin: int = 0
    backend: Callable[[LaunchConfig], RankBackend] | None = None

    def __post_init__(self) -> None:
        given = sum(x is not None for x in (self.num_ranks, self.devices, self.speeds))
        if given > 1:
            raise ConfigError(
                f"expected one of --nproc, --devices and --speeds, got {given}"
            )
        check_whole("--rejoin", self.rejoin, 0)
        if self.num_ranks is not None:
            check_whole("--nproc", self.num_ranks, 1)
        for speed in self.speeds or ():
            check_positive("--speeds", speed)
        check_positive("--ms-per-sample", self.ms_per_sample)
        check_not_negative("--fixed-ms", self.fixed_ms)

    @property
    def world_size(self) -> int:
        """Number of ranks; by default one per accelerator of the machine."""
        if self.devices is not None:
            return len(self.devices)
        if self.speeds is not None:
            return len(self.speeds)
        return self.num_ranks if self.num_ranks is not None else _device_count()

    def device_environment(self, place: int) -> dict[str, str]:
        """Variables of a rank's device, or of its emulation."""
        if self.devices is not None:
            return {"ELCHE_DEVICE": self.devices[place]}
        if self.speeds is None:
            return {}
        return {
            "ELCHE_SPEED": repr(self.speeds[place]),
            "ELCHE_MS_PER_SAMPLE": repr(self.ms_per_sample),
            "ELCHE_FIXED_MS": repr(self.fixed_ms),
        }


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """End of a run: exit codes and reason.

    Attributes:
        exit_codes: each rank's exit code; a signal counts as 128 + its number.
        reason: why the run was ended, "" if it was not.
        terminated: ranks that the launcher had to terminate.
        failed_first: the rank that failed first, and not because of another.
        signal: signal to the launcher that ended the run; 0 without one.
        have_met: a rank connected to the coordinator, or to torch's store.
        failed_s: time of the first failure (s), by the monotonic clock.
    """

    exit_codes: tuple[int, ...]
    reason: str
    terminated: tuple[int, ...]
    failed_first: int | None
    signal: int = 0
    have_met: bool = True
    failed_s: float | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the run: by the signal, or of the rank that failed first."""
        if self.signal:
            return 128 + self.signal
        return 0 if self.failed_first is None else self.exit_codes[self.failed_first]


def _device_count() -> int:
    from elche.devices.choice import usable_count

    return usable_count() or 1


def python_command(*arguments: str) -> tuple[str, ...]:
    """A command that runs this interpreter."""
    return (sys.executable, *arguments)
