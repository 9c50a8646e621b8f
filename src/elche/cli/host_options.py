"""Options of `elche run` about several hosts."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from elche.errors import ConfigError

if TYPE_CHECKING:
    from elche.runtime.hosts.hosts_config import HostsConfig

KEY_FILE = "~/.elche/key"
_OPTIONS = (
    click.option(
        "--listen",
        is_flag=True,
        help="Let other hosts join the run at any time, by the `elche join` that is"
        " printed: at --rendezvous (default: port 29400 of this host's address), with"
        " --key-file (default: ~/.elche/key, made if it is not there).",
    ),
    click.option(
        "--nnodes",
        type=click.IntRange(1),
        help="Hosts of the run, each with a launcher; default: 1.",
    ),
    click.option(
        "--node-rank", type=int, help="This host's place among them; 0 leads."
    ),
    click.option(
        "--rendezvous",
        metavar="HOST:PORT",
        help="Where the other hosts reach host 0; it listens there.",
    ),
    click.option(
        "--key-file",
        metavar="FILE",
        help="Secret of the run, in hexadecimal and the same on every host: a file of"
        " mode 0600, or - for standard input.",
    ),
    click.option(
        "--advertise",
        metavar="ADDRESS",
        help="Where others reach this host; default: its address on the route to"
        " host 0.",
    ),
    click.option(
        "--witness",
        metavar="HOST:PORT",
        help="Where `elche witness` listens, which has one more vote where hosts lose"
        " each other: with it two hosts outlive the loss of either. Host 0 tells it to"
        " the others.",
    ),
    click.option(
        "--hosts",
        metavar="A:2,B:4",
        help="Ranks of each host, this one first: the others' launchers are started"
        " over ssh, in this folder and by this interpreter.",
    ),
)


def host_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command; `read_hosts` takes their values out."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_hosts(
    options: dict[str, Any], words: Sequence[str], for_one_host: Mapping[str, Any]
) -> HostsConfig | None:
    """Takes the options' values out of a command's; None for a run on one host.

    Args:
        options: values by name; those of `host_options` are removed.
        words: the script and its arguments.
        for_one_host: values of options that are for such a run alone.

    Raises:
        ConfigError: they do not fit together, or there is no key.
    """
    listens = options.pop("listen")
    names = ("node_rank", "rendezvous", "key_file", "advertise", "witness")
    nnodes, hosts = options.pop("nnodes"), options.pop("hosts")
    values = {name: options.pop(name) for name in names}
    given = {f"--{n.replace('_', '-')}": v for n, v in values.items() if v is not None}
    if hosts is None and nnodes in (None, 1) and not listens:
        if nnodes is None and given:
            raise ConfigError(
                f"{', '.join(given)} needs --nnodes, how many hosts, or --listen"
            )
        return None
    if unfit := [option for option, value in for_one_host.items() if value]:
        raise ConfigError(f"{unfit[0]} is for a run on one host; leave it out")
    if listens:
        if values["witness"] is not None:
            raise ConfigError(
                "--witness is for --nnodes: a run under --listen ends with host 0"
            )
        if (hosts, nnodes, values["node_rank"]) != (None, None, None):
            raise ConfigError(
                "--listen begins on this host alone, and others join: leave out "
                "--nnodes, --node-rank and --hosts"
            )
        return _open_to_others(values, words)
    if hosts is not None:
        if nnodes is not None or {*given} - {"--advertise"}:
            raise ConfigError("--hosts starts all launchers itself: give it alone")
        return _started_from_here(hosts, words, values["advertise"])
    missing = [
        o for o in ("--node-rank", "--rendezvous", "--key-file") if o not in given
    ]
    if missing:
        raise ConfigError(f"--nnodes {nnodes} needs {', '.join(missing)} on every host")
    from elche.comm.control.addresses import parse_address
    from elche.comm.control.key_file import read_key
    from elche.runtime.hosts.hosts_config import HostsConfig

    witness = values["witness"]
    return HostsConfig(
        nnodes=nnodes,
        node_rank=values["node_rank"],
        rendezvous=parse_address(values["rendezvous"], "--rendezvous"),
        key=read_key(values["key_file"]),
        advertise=values["advertise"] or "",
        witness=None if witness is None else parse_address(witness, "--witness"),
    )


def _open_to_others(values: Mapping[str, Any], words: Sequence[str]) -> HostsConfig:
    """This host begins, and others join it."""
    from elche.comm.control.addresses import outward_address, parse_address
    from elche.comm.control.key_file import read_or_make_key
    from elche.coordination.protocol.host_messages import OPEN
    from elche.runtime.hosts.hosts_config import JOIN_PORT, HostsConfig

    key_file, told = values["key_file"] or KEY_FILE, values["rendezvous"]
    if told is None:
        rendezvous = values["advertise"] or outward_address(), JOIN_PORT
    else:
        rendezvous = parse_address(told, "--rendezvous")
    return HostsConfig(
        nnodes=OPEN,
        node_rank=0,
        rendezvous=rendezvous,
        key=read_or_make_key(key_file),
        advertise=values["advertise"] or "",
        invitation=f"--key-file {key_file} {shlex.join(words)}",
    )


def _started_from_here(
    hosts: str, words: Sequence[str], advertise: str | None
) -> HostsConfig:
    """This host leads, and starts the others' launchers."""
    from elche.comm.control.addresses import own_address
    from elche.comm.control.key_file import KEY_BYTES
    from elche.runtime.hosts.hosts_config import HostsConfig
    from elche.runtime.hosts.remote_start import RemoteStart

    remote = RemoteStart.read(hosts, words)
    address = advertise or own_address(remote.others[0][0].rpartition("@")[2])
    return HostsConfig(
        nnodes=len(remote.others) + 1,
        node_rank=0,
        rendezvous=(address, 0),
        key=secrets.token_bytes(KEY_BYTES),
        advertise=address,
        remote=remote,
    )
