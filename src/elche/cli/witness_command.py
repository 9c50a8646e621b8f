"""`elche witness`: one more vote for runs on several hosts."""

from __future__ import annotations

import asyncio

import click

from elche.cli.rank_options import checked


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    required=True,
    help="Where the hosts of the runs reach this one: the address it listens on.",
)
@click.option(
    "--key-file",
    metavar="FILE",
    required=True,
    help="Secret of the runs, as their hosts have it: a file of mode 0600, or - for"
    " standard input.",
)
def witness(listen: str, key_file: str) -> None:
    """Have a vote where the hosts of a run lose each other, until Ctrl-C.

    On a machine that none of them depends on: `elche run --witness HOST:PORT` names it.
    Who asks first for a run has its vote. It writes nothing, and a witness that is
    started anew has forgotten whom it was for.
    """
    from elche.comm.control.addresses import format_address, parse_address
    from elche.comm.control.addresses import listen as listen_at
    from elche.comm.control.key_file import read_key
    from elche.errors import CommunicationError
    from elche.monitor.results import log_to_stderr
    from elche.runtime.hosts.witness import serve_witness

    with checked(), log_to_stderr():
        address, key = parse_address(listen, "--listen"), read_key(key_file)
        try:
            listener = listen_at(*address)
        except OSError as error:
            raise CommunicationError(
                f"cannot listen at {listen}: {error.strerror or error}; expected a "
                "free port of an address of this host"
            ) from error
        where = format_address(address[0], listener.getsockname()[1])
        click.echo(f"elche witness: listens at {where}", err=True)
        asyncio.run(serve_witness(listener, key))
