"""Runs on several hosts and on one, with the same ranks, next to each other."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.links.bench import LinkBenchConfig
from benchmarks.links.namespaces import SENT_BYTES, Link
from elche.demo import contender
from elche.demo.contender import ContenderSpec
from elche.demo.verdict import CONTROL
from elche.errors import ConfigError, RemoteRankError
from tests.runtime.hosts.launchers import (
    NAMED,
    Cluster,
    launched,
    with_witness,
    witnessing,
    write_key,
)

POLICIES = ("cadence", "async", "sync")
START_S = 60.0
"""For a run to start and to end, beside the time that it trains."""
SLOWER = 6.0
"""So many times as long a run may take as it would on one host."""


@dataclass(frozen=True, kw_only=True)
class HostsConfig:
    """What is measured.

    Attributes:
        bench: devices, model, link and lengths of runs, as `benchmarks.links` has them.
        ranks_per_host: how many ranks that follow each other are on one host.
        overhead_target: of windows; None: elche's default.
        has_witness: two hosts are measured with one, and so a standby, and without.

    Raises:
        ConfigError: the ranks do not fill two hosts or more, or not two with a witness.
    """

    bench: LinkBenchConfig
    ranks_per_host: int = 1
    overhead_target: float | None = None
    has_witness: bool = False

    def __post_init__(self) -> None:
        ranks, each = len(self.bench.speeds), self.ranks_per_host
        if each < 1 or ranks % each or ranks < 2 * each:
            raise ConfigError(
                f"expected --speeds of two or more hosts with {each} ranks each, got "
                f"{ranks} ranks"
            )
        if self.has_witness and self.hosts != 2:
            raise ConfigError(
                f"--witness compares two hosts with and without a standby, which "
                f"{self.hosts} have in any case; give the --speeds of two"
            )

    @property
    def hosts(self) -> int:
        """How many."""
        return len(self.bench.speeds) // self.ranks_per_host

    @property
    def reduction_s(self) -> float:
        """Least time of a sum between hosts, each host's own summed before."""
        return self.bench.reduction_s("elche-async", self.hosts)

    def spec(
        self, name: str, seed: int, folder: Path, *, linked: bool
    ) -> ContenderSpec:
        """What a run trains; under ``sync`` behind a link it ends by time.

        Args:
            name: a policy, or `CONTROL`.
            seed: of parameters, data and order.
            folder: for results.
            linked: behind links, whose bytes are counted.
        """
        bench = replace(self.bench, time_capped=name == "sync")
        spec = bench.spec(name if name == CONTROL else f"elche-{name}", seed)
        spec = replace(spec, out=str(folder), options={}, sent_counter=None)
        if name == CONTROL:
            return spec
        options: dict[str, Any] = {"codec": self.bench.codec}
        if self.overhead_target is not None and name != "sync":
            options["windows"] = {"overhead_target": self.overhead_target}
        if self.has_witness:  # a standby needs all ranks to have the model
            options["leave_out"] = False
        counter = str(SENT_BYTES) if linked else None
        return replace(spec, options=options, sent_counter=counter)


@dataclass(frozen=True)
class HostsRun:
    """What a run came to.

    Attributes:
        samples_per_s: of all ranks.
        windows: synchronisations of window policies.
        anchor: batches of the slowest rank in the last window.
        window_bytes: sent by the first host for each window; 0 on one host.
        overrun: time by which real computing exceeded the declared, on the rank where
            that is most; above `MOST_OVERRUN` the machine was too busy to emulate.
    """

    samples_per_s: float
    windows: int
    anchor: int | None
    window_bytes: float
    overrun: float


def run_control(config: HostsConfig, seed: int) -> float:
    """Samples per second of all devices at once, without communication."""
    found = _results(config, CONTROL, seed, None)
    return sum(float(each["samples"] / each["train_s"]) for each in found)


def run_policy(
    config: HostsConfig,
    policy: str,
    seed: int,
    link: Link | None,
    *,
    stands_by: bool = False,
) -> HostsRun:
    """A run under a policy: on hosts of their own behind a link, or on one host.

    Args:
        config: what is measured.
        policy: under which.
        seed: of parameters, data and order.
        link: of the hosts; None: there is one.
        stands_by: the last place on the link has a witness, by which host 1 stands by.
    """
    found = _results(config, policy, seed, link, stands_by=stands_by)
    first = found[0]
    windows = int(first["windows"])
    return HostsRun(
        samples_per_s=first["samples"] / first["train_s"],
        windows=windows,
        anchor=first["anchor"],
        window_bytes=first["sent_bytes"] / max(1, windows),
        overrun=max(each["overrun_s"] / each["nominal_s"] for each in found),
    )


def _results(
    config: HostsConfig,
    name: str,
    seed: int,
    link: Link | None,
    *,
    stands_by: bool = False,
) -> list[dict[str, Any]]:
    """What each rank wrote."""
    with tempfile.TemporaryDirectory(prefix="elche-") as folder_name:
        folder = Path(folder_name)
        spec = config.spec(name, seed, folder, linked=link is not None)
        (folder / "spec.json").write_text(spec.to_json())
        write_key(folder / "key")
        cluster = _cluster(config, folder, link)
        with contextlib.ExitStack() as stack:
            if link is not None and stands_by:
                third = link.ranks[config.hosts][1], link.command(config.hosts)
                _, where = stack.enter_context(witnessing(folder, *third))
                cluster = with_witness(cluster, where)
            hosts = stack.enter_context(launched(cluster, makes_key=False))
            codes = [host.end() for host in hosts]
            said = "\n".join(host.output[-2000:] for host in hosts)
            is_named = NAMED in hosts[0].output
        if any(codes):
            errors = sorted(folder.glob("stderr-*.txt"))
            said += "\n".join(path.read_text()[-2000:] for path in errors)
            raise RemoteRankError(f"{name} ended with codes {codes}:\n{said}")
        if stands_by and not is_named:
            raise RemoteRankError(f"{name} ended before a host stood by:\n{said}")
        paths = [folder / f"result-{r}.json" for r in range(len(config.bench.speeds))]
        return [json.loads(path.read_text()) for path in paths]


def _cluster(config: HostsConfig, folder: Path, link: Link | None) -> Cluster:
    """The launchers: one of all ranks, or each host's in its namespace."""
    bench, speeds = config.bench, config.bench.speeds
    size = len(speeds) if link is None else config.ranks_per_host
    cluster = Cluster(
        folder,
        ranks=[
            _rank_options(speeds[at : at + size], bench.ms_per_sample)
            for at in range(0, len(speeds), size)
        ],
        script=(contender.__file__, str(folder / "spec.json")),
        wait_s=START_S + SLOWER * bench.seconds,
    )
    if link is None:
        return cluster
    return replace(
        cluster,
        rendezvous=f"{link.ranks[0][1]}:29500",
        prefixes=[link.command(host) for host in range(config.hosts)],
        environments=[{"ELCHE_HOST": ""}] * config.hosts,
    )


def _rank_options(speeds: Sequence[float], ms_per_sample: float) -> tuple[str, ...]:
    shown = ",".join(f"{speed:g}" for speed in speeds)
    return ("--speeds", shown, "--ms-per-sample", f"{ms_per_sample:g}")
