"""Refusal of removed options and commands: those of runs over several machines.

torchrun, srun and mpirun start such runs.
"""

from __future__ import annotations

from typing import Final, NoReturn

import click

REMOVED_COMMANDS: Final = ("join", "witness")
REMOVED_OPTIONS: Final = frozenset(
    {
        *("--nnodes", "--node-rank", "--rendezvous", "--hosts", "--listen"),
        *("--witness", "--advertise", "--key-file"),
    }
)


class RunCommand(click.Command):
    """A command that names the replacement of the removed options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses; a removed option is refused by name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in REMOVED_OPTIONS:
                refuse_hosts(f"elche run {error.option_name}", ctx)
            raise


def refuse_hosts(what: str, ctx: click.Context) -> NoReturn:
    """Raises the error of a removed option or command.

    Raises:
        UsageError: names ``what``, and what to write instead.
    """
    raise click.UsageError(
        f"`{what}` was removed: `elche run` starts the ranks of one machine. Start "
        "several machines by torchrun, on each with its --node-rank: "
        "`ELCHE_LISTEN=auto torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 "
        "--master-addr 10.0.0.1 --master-port 29500 script.py`, or by Slurm: "
        "`ELCHE_LISTEN=auto srun --ntasks 5 python script.py` (docs/hosts.md)",
        ctx,
    )
