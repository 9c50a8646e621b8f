"""`elche join`: this host's devices for a run that is under way on another."""

from __future__ import annotations

import click

from elche.cli.rank_options import checked, follow, rank_options


class _Join(click.Command):
    """Takes HOST:PORT before its options; what follows SCRIPT is that one's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):
            args = ["--address", *args]
        return super().parse_args(ctx, args)


@click.command(
    cls=_Join,
    options_metavar="HOST:PORT [OPTIONS]",
    context_settings={"allow_interspersed_args": False},
)
@rank_options
@click.option(
    "--key-file",
    metavar="FILE",
    required=True,
    help="Secret of the run, as `elche run --listen` has it: a file of mode 0600, or -"
    " for standard input.",
)
@click.option(
    "--advertise",
    metavar="ADDRESS",
    default="",
    help="Where others reach this host; default: its address on the route to HOST.",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    required=True,
    help="Where the run listens; its name may be left out in front.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def join(
    nproc: int | None,
    devices: tuple[str, ...] | None,
    speeds: tuple[float, ...] | None,
    key_file: str,
    advertise: str,
    address: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Join the run at HOST:PORT, which `elche run --listen` has begun, at any time.

    SCRIPT is the one that it runs, with the same arguments. Ctrl-C takes this host out
    again; the others go on.
    """
    from elche.comm.control.addresses import parse_address
    from elche.comm.control.key_file import read_key
    from elche.coordination.protocol.host_messages import OPEN
    from elche.runtime.hosts.hosts_config import JOIN_WITHIN_S, HostsConfig
    from elche.runtime.process.launch import LaunchConfig, python_command

    with checked():
        hosts = HostsConfig(
            nnodes=OPEN,
            node_rank=1,
            rendezvous=parse_address(address, "HOST:PORT"),
            key=read_key(key_file),
            advertise=advertise,
            gather_s=JOIN_WITHIN_S,
        )
        config = LaunchConfig(
            command=python_command(script, *arguments),
            num_ranks=nproc,
            devices=devices,
            speeds=speeds,
            hosts=hosts,
        )
        follow(config, "elche join")
