"""`benchmarks.hetero` behind links of limited rate (network namespaces: Linux, root).

    python -m benchmarks.links --speeds 1,0.25 --link-mbit 100 --codec int8

Every rank has a network namespace of its own, whose cable `tc tbf` limits. The other
options are those of `benchmarks.hetero`.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from benchmarks.hetero.__main__ import hetero
from benchmarks.links.bench import LinkBenchConfig, run_link_bench
from elche.errors import ConfigError


def run(
    json_path: str | None, contenders: tuple[str, ...] | None, **settings: Any
) -> None:
    """Compares PyTorch and elche behind slow links."""
    try:
        config = LinkBenchConfig(contenders=contenders or (), **settings)
        code = run_link_bench(config, json_path)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


OPTIONS = [
    click.Option(
        ["--link-mbit"],
        type=float,
        required=True,
        help="Rate of every rank's link, each way, in Mbit/s.",
    ),
    click.Option(
        ["--codec"],
        default="fp32",
        show_default=True,
        help="How elche's averages and gradients travel: fp32, bf16, int8 or int4.",
    ),
]
main = click.Command(
    "links", params=[*hetero.params, *OPTIONS], callback=run, help=run.__doc__
)

if __name__ == "__main__":
    main()
