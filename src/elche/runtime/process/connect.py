"""Discovery or start of a rank's coordinator."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from elche.comm.control.addresses import (
    format_address,
    host_name,
    is_loopback,
    listen,
    own_address,
    parse_address,
)
from elche.comm.control.control_channel import ControlChannel
from elche.comm.control.frames import KEY_BYTES
from elche.comm.tensors.kept_memory import keep_freed_memory
from elche.errors import CommunicationError, ConfigError
from elche.runtime.process.environment import Placement, int_of
from elche.runtime.process.launchers import read_launcher
from elche.torch_internals.groups import default_store

logger = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_GROUP = "torch.distributed's default group"
START_POLL_S = 0.02
"""Poll interval (s) of rank 0 for the other ranks' starts."""
_HOW = (
    "set ELCHE_LISTEN on every host to its own address, or to auto, on a network that "
    "you trust (nothing is encrypted)"
)

_ends = contextlib.ExitStack()
"""Exit callbacks for what this process started: coordinator, key file."""
_found: dict[str, tuple[tuple[str, int], bytes]] = {}
_stores: dict[tuple[str, int], dist.Store] = {}


def connect(placement: Placement, timeout_s: float) -> tuple[Placement, ControlChannel]:
    """Connects to the coordinator, starting it beside rank 0 if there is none.

    Returns:
        The placement, completed, and the channel.

    Raises:
        CommunicationError: the coordinator cannot be reached.
        ConfigError: the launcher's environment is incomplete.
    """
    keep_freed_memory()
    environment = read_launcher(os.environ)
    if placement.listen == AUTO:
        met_at = placement.coordinator or (environment.get("MASTER_ADDR", ""), 0)
        placement = replace(placement, listen=own_address(met_at[0]))
    if placement.coordinator is None:
        address, key = _find_under_torchrun(placement, environment, timeout_s)
        placement = replace(placement, coordinator=address, key=key)
    assert placement.coordinator is not None
    channel = ControlChannel.connect(
        placement.coordinator,
        placement.key,
        placement.rank,
        timeout_s,
        resumes=placement.resumes,
    )
    return placement, channel


def meet(placement: Placement, timeout_s: float = 1800.0) -> None:
    """Waits until every rank has called it, by the launcher's store; needs no run.

    Raises:
        CommunicationError: a rank did not call it in time.
    """
    if placement.joins:  # the other ranks train already
        return
    try:
        store = _agreed_store(placement, read_launcher(os.environ), timeout_s)
        if placement.rank == 0:  # all have joined
            store.set("passed", "")
        store.wait(["passed"], timedelta(seconds=timeout_s))
    except (RuntimeError, OSError) as error:
        text = f"elche.barrier() on rank {placement.rank}: not all ranks called it"
        raise CommunicationError(f"{text} in {timeout_s:g} s: {error}") from error


def stop_coordinator() -> None:
    """Ends the coordinator that this process started, if it did."""
    _ends.close()
    _found.clear()
    _stores.clear()


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its standard input, at which it ends
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()


def _find_under_torchrun(
    placement: Placement, environment: Mapping[str, str], timeout_s: float
) -> tuple[tuple[str, int], bytes]:
    """Rank 0 starts the coordinator; the others find it through torchrun's store.

    If torch's default group exists, its store is used, since its port is occupied. On
    one host the store names a file, which holds the key.
    """
    has_group = dist.is_available() and dist.is_initialized()
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    local = int_of(environment, "LOCAL_WORLD_SIZE", placement.world_size)
    if "ELCHE_LISTEN" not in environment and host is not None:
        _check_on_one_host(placement, environment, host, local)
    name = f"{host}:{port}"  # also of a default group that was made meanwhile
    if name in _found:
        return _found[name]
    try:
        store = _agreed_store(placement, environment, timeout_s)
        store.set(f"host/{placement.rank}", host_name())
        keys = [f"host/{rank}" for rank in range(placement.world_size)]
        # A default group's store has a deadline of its own: half an hour.
        store.wait(keys, timedelta(seconds=timeout_s))
        hosts = {store.get(key).decode() for key in keys}
        if len(hosts) > 1 and "ELCHE_LISTEN" not in os.environ:
            raise ConfigError(
                f"ranks are on {len(hosts)} hosts, but elche listens on loopback; "
                f"{_HOW}"
            )
        if placement.rank == 0:
            address, key = _start_beside(placement)
            entry = f"{format_address(*address)}/{key.hex()}"
            if len(hosts) == 1:
                entry = _hide(entry)
            store.set("coordinator", entry)
        store.wait(["coordinator"], timedelta(seconds=timeout_s))
        entry = store.get("coordinator").decode()
        if len(hosts) == 1:
            entry = _read_hidden(entry)
    except CommunicationError:  # the coordinator's own, which is a RuntimeError too
        raise
    except (RuntimeError, OSError) as error:
        raise CommunicationError(
            f"rank {placement.rank}: the rendezvous at "
            f"{DEFAULT_GROUP if has_group else name} failed: {error}"
        ) from error
    where, _, secret = entry.partition("/")
    _found[name] = parse_address(where, "the coordinator"), bytes.fromhex(secret)
    return _found[name]


def _agreed_store(
    placement: Placement, environment: Mapping[str, str], timeout_s: float
) -> dist.Store:
    """The launcher's store, with a key prefix for this start; a collective call."""
    has_group = dist.is_available() and dist.is_initialized()
    if not (has_group or {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys()):
        raise ConfigError(
            f"WORLD_SIZE is {placement.world_size}, but neither ELCHE_COORDINATOR nor "
            "MASTER_ADDR and MASTER_PORT are set; start the script with `elche run` or "
            "torchrun, or set both (mpirun -x MASTER_ADDR=... -x MASTER_PORT=...)"
        )
    base = default_store() if has_group else _open_store(placement, timeout_s)
    return dist.PrefixStore(_agree_on_prefix(base, placement, timeout_s), base)


def _agree_on_prefix(base: dist.Store, placement: Placement, timeout_s: float) -> str:
    """Agrees on a key prefix for this start; the store may hold earlier keys.

    Rank 0 chooses the name. Each other rank requests it under its own name.
    torchrun's restart count is no substitute: it differs between machines.
    """
    own, rank = secrets.token_hex(8), placement.rank
    if rank:
        base.set(f"elche/start/{rank}", own)
        name = base.get(f"elche/name/{own}").decode()
        base.set(f"elche/{name}/joined/{rank}", "")
        return f"elche/{name}"
    others = range(1, placement.world_size)
    joined = [f"elche/{own}/joined/{other}" for other in others]
    deadline_s = time.monotonic() + timeout_s
    while not base.check(joined):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not all ranks connected within {timeout_s:g} s")
        for key in (f"elche/start/{other}" for other in others):
            if base.check([key]):
                base.set(f"elche/name/{base.get(key).decode()}", own)
        time.sleep(START_POLL_S)
    return f"elche/{own}"


def _open_store(placement: Placement, timeout_s: float) -> dist.Store:
    """Opens torchrun's store, which rank 0 serves where no agent of torchrun does."""
    environment = read_launcher(os.environ)
    host, port = environment["MASTER_ADDR"], int_of(environment, "MASTER_PORT", 0)
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosted = placement.rank == 0 and not agent
    if (known := _stores.get((host, port))) is not None:
        known.set_timeout(timedelta(seconds=timeout_s))
        return known
    store = _stores[host, port] = dist.TCPStore(
        host,
        port,
        is_master=hosted,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listen(host, port).detach() if hosted else None,
        multi_tenant=True,  # init_process_group may follow, at the same port
    )
    return store


def _check_on_one_host(
    placement: Placement, environment: Mapping[str, str], host: str, local: int
) -> None:
    """Refuses ranks on other hosts at once, if the launcher reports ranks per host."""
    if local < placement.world_size:
        raise ConfigError(
            f"{placement.world_size - local} ranks are on other hosts, but elche "
            f"listens on loopback; {_HOW}"
        )
    if "LOCAL_WORLD_SIZE" not in environment and not is_loopback(host):
        raise ConfigError(
            f"MASTER_ADDR is {host} and LOCAL_WORLD_SIZE is not set: ranks may be on "
            f"several hosts, but elche listens on loopback; {_HOW}, or "
            f"LOCAL_WORLD_SIZE={placement.world_size} if all are on this one"
        )


def _hide(text: str) -> str:
    """Writes a file that only this user can read; returns its path.

    Any client can read every entry of torchrun's store.
    """
    descriptor, path = tempfile.mkstemp(prefix="elche-")
    _ends.callback(Path(path).unlink, missing_ok=True)
    with open(descriptor, "w") as file:
        file.write(text)
    return path


def _read_hidden(path: str) -> str:
    """Reads such a file, if it is private: anyone can write a path to the store."""
    with open(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise CommunicationError(
                f"{path} is not a file of this user alone; a process other than rank "
                "0 wrote to torchrun's store"
            )
        return file.read()


def _start_beside(placement: Placement) -> tuple[tuple[str, int], bytes]:
    key = secrets.token_bytes(KEY_BYTES)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "elche.runtime.coordinator_process.serving",
            "beside",
            str(placement.world_size),
            placement.listen,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "ELCHE_KEY": key.hex()},
    )
    _ends.callback(_end, process)
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    host, _, port = line.rpartition(":")
    if not port.isdigit():
        raise CommunicationError(
            f"the coordinator beside rank 0 did not start on {placement.listen}; is "
            "ELCHE_LISTEN an address of this host? Its own output says more"
        )
    return (host.strip("[]"), int(port)), key
