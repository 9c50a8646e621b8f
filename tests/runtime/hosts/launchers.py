"""Launchers of several hosts, as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.harness.printing import Printing

WAIT_S = 100.0
PORTS = range(10_000, 15_000)
"""Below those that the system gives whoever asks for any, and that Slurm would."""
ELCHE = ("-m", "elche")
NAMED = "the run goes on without host 0 if that is lost"
"""Says the leading host when another one stands by."""


@dataclass(frozen=True)
class Cluster:
    """How the hosts' launchers are started.

    Attributes:
        folder: of outputs and the key.
        ranks: options for each host's ranks.
        script: and its arguments.
        rendezvous: of host 0; None: a free port of loopback.
        prefixes: words before each host's command.
        entries: how each host's interpreter comes to elche.
        keys: each host's file; None: the same for all.
        environments: variables of each host.
        nnodes: hosts of the run; None: those that are started.
        wait_s: how long is waited for a line of a host, or for its end.
    """

    folder: Path
    ranks: Sequence[Sequence[str]]
    script: Sequence[str]
    rendezvous: str | None = None
    prefixes: Sequence[Sequence[str]] = ()
    entries: Sequence[Sequence[str]] = ()
    keys: Sequence[Path] | None = None
    environments: Sequence[dict[str, str]] = field(default_factory=tuple)
    nnodes: int | None = None
    wait_s: float = WAIT_S


@contextmanager
def launched(cluster: Cluster, *, makes_key: bool = True) -> Iterator[list[Printing]]:
    """Starts all launchers; what is left of them at the end, the leak check will say.

    Hosts have names of their own, so that their ranks share no memory.
    """
    key = cluster.folder / "key"
    if makes_key:
        write_key(key)
    rendezvous = cluster.rendezvous or f"127.0.0.1:{free_port()}"
    hosts: list[Printing] = []
    try:
        for number, ranks in enumerate(cluster.ranks):
            nnodes = cluster.nnodes or len(cluster.ranks)
            options = ["--nnodes", str(nnodes), "--node-rank", str(number)]
            options += ["--rendezvous", rendezvous, "--key-file"]
            options.append(str(cluster.keys[number] if cluster.keys else key))
            environment = {"OMP_NUM_THREADS": "1", "ELCHE_HOST": f"host{number}"}
            if cluster.environments:
                environment |= cluster.environments[number]
            prefix = cluster.prefixes[number] if cluster.prefixes else ()
            entry = cluster.entries[number] if cluster.entries else ELCHE
            output = cluster.folder / f"output{number}.txt"
            words = [*prefix, sys.executable, *entry, "run", *options, *ranks]
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*words, *cluster.script],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                )
            hosts.append(Printing(process, output, cluster.wait_s))
        yield hosts
    finally:
        for host in hosts:
            if host.process.poll() is None:
                host.process.kill()
            host.process.wait()


@contextmanager
def witnessing(
    folder: Path, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()
) -> Iterator[tuple[Printing, str]]:
    """A witness with the hosts' key, and its address."""
    where, key = f"{address}:{free_port() if not prefix else 29501}", folder / "key"
    output = folder / "witness.txt"
    words = (*prefix, sys.executable, *ELCHE, "witness")
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*words, "--listen", where, "--key-file", str(key)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    witness = Printing(process, output, WAIT_S)
    try:
        witness.wait_for("elche witness: listens at")
        yield witness, where
    finally:
        process.send_signal(signal.SIGINT)
        assert witness.end() == 130, witness.output


def with_witness(cluster: Cluster, where: str) -> Cluster:
    """The same hosts, which know of a witness."""
    ranks = [[*each, "--witness", where] for each in cluster.ranks]
    return replace(cluster, ranks=ranks)


def write_key(path: Path) -> None:
    """A secret, for this user alone."""
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))


def free_port(address: str = "127.0.0.1", ports: range = PORTS) -> int:
    """A port that was free just now, and that only who asks for it will take."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in secrets.SystemRandom().sample(ports, 50):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise AssertionError("no free port")
