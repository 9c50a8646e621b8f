"""Efficiency of several hosts at a link's rate over one host with the same ranks.

    python -m benchmarks.hosts                              # about eight minutes
    python -m benchmarks.hosts --speeds 1,0.5,1,0.25 --ranks-per-host 2
    python -m benchmarks.hosts --model mlp --codec int8 --seconds 60 --pairs 3
    python -m benchmarks.hosts --speeds 1,0.5 --witness --link-delay-ms 0.5

Every host is a network namespace with a launcher of its own (`elche run --nnodes`) and
a cable that `tc tbf` limits (Linux, root); one host is an `elche run` of all ranks,
which share memory. Devices are emulated. A pair is a run on each, one after the other,
start and last reduction included. Before each pair and after the last the same ranks
train at once without communication (*indep*); a pair beside which that is more than 3 %
below its best, or 5 % below what devices declare, is rejected. ``sync`` runs
in the first pair only, for the record. Where
*overrun* is above 2 % the machine was busy and ratios say nothing: Linux shares it
among sessions, of which several launchers are several.

What windows can bring is set by the time of a reduction: 2 (H - 1) / H model bytes over
the rate. Those of ``cadence`` block, and grow until the reduction is 3 % of them
(``overhead_target``): 0.97 is what it aims at, and until then it costs more. Those of
``async`` are 1.2 times as long as the reduction or longer, and only the last one of an
epoch is waited for: a run 50 times as long as a reduction loses 2 % by it. The default
model, gpt-small at 2.5 ms per sample, is so small that seconds are long enough; its sum
takes about as long as a batch of 32 on all devices, as that of ten million parameters
does where such a batch takes four seconds.

``--witness`` pairs something else: two hosts with a standby, as a witness in a third
namespace lets them have, and without. A standby costs time because ranks hear nothing
of the coordinator before it has that in its journal: a round trip between launchers.
It stands by from a second or so after ranks have come.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.hosts.bench import (
    POLICIES,
    HostsConfig,
    HostsRun,
    run_control,
    run_policy,
)
from benchmarks.hosts.pairs import ratio_of, undisturbed
from benchmarks.links.bench import LinkBenchConfig
from benchmarks.links.namespaces import slow_link
from benchmarks.record import write_record
from elche.cadence.overlapped import ROOM
from elche.config_parts import WindowConfig
from elche.demo.verdict import CONTROL
from elche.errors import ConfigError

Pair = dict[str, HostsRun]
ONE, SEVERAL = "one host", "several hosts"
ALONE, STANDBY = "no standby", "standby"


def places(config: HostsConfig) -> tuple[str, str]:
    """What is measured, and beside what."""
    return (STANDBY, ALONE) if config.has_witness else (SEVERAL, ONE)


def measure(
    config: HostsConfig, policies: Sequence[str], pairs: int
) -> tuple[list[float], dict[str, list[Pair]]]:
    """Rates of the controls, and runs by policy and pair."""
    controls, runs = [], {policy: list[Pair]() for policy in policies}
    for number in range(pairs):
        controls.append(_control(config, number))
        for policy in policies:
            if policy != "sync" or number == 0 or config.has_witness:
                runs[policy].append(_pair(config, policy, number))
    controls.append(_control(config, pairs))
    return controls, runs


def _control(config: HostsConfig, number: int) -> float:
    rate = run_control(config, number)
    _say(f"{CONTROL}: {rate:.1f} samples/s")
    return rate


def _pair(config: HostsConfig, policy: str, number: int) -> Pair:
    """Each pair begins with the other place."""
    pair: Pair = {}
    bench, order = config.bench, places(config)
    cables = config.hosts + config.has_witness
    for place in order[::-1] if number % 2 else order:
        if place == ONE:
            pair[place] = run_policy(config, policy, number, None)
            continue
        with slow_link(cables, bench.link_mbit, bench.link_delay_ms) as link:
            stands_by = place == STANDBY
            pair[place] = run_policy(config, policy, number, link, stands_by=stands_by)
        run = pair[place]
        _say(
            f"pair {number}, {policy} on {place}: {run.samples_per_s:.1f} samples/s, "
            f"{run.windows} windows, anchor {run.anchor}"
        )
    return pair


def report(
    config: HostsConfig, controls: Sequence[float], runs: dict[str, list[Pair]]
) -> dict[str, Any]:
    """Prints the table; its figures."""
    declared = sum(config.bench.rates)
    kept = undisturbed(controls, declared)
    target = config.overhead_target or WindowConfig().overhead_target
    reduction_s, rate = config.reduction_s, config.bench.link_mbit
    print(
        f"{config.hosts} hosts of {config.ranks_per_host}, {config.bench.title}\n"
        f"a sum between hosts takes {reduction_s:.3f} s or more at {rate:g} Mbit/s; "
        f"windows last {ROOM * reduction_s:.2f} s or more under async, "
        f"{reduction_s / target:.2f} s under cadence\n"
        f"{len(kept)} of {len(controls) - 1} pairs undisturbed; {CONTROL} delivers at "
        f"best {max(controls) / declared:.3f} of what devices declare"
    )
    ours, theirs = places(config)
    heads = theirs, ours, "ratio", "95 % interval", "of indep"
    rest = "windows", "anchor", "MB/window", "overrun"
    form = "{:8} {:>10} {:>13} {:>6} {:>15} {:>8} {:>8} {:>6} {:>10} {:>8}"
    print(form.format("policy", *heads, *rest))
    figures: dict[str, Any] = {}
    for policy, pairs in runs.items():
        row = _row(config, [pairs[at] for at in kept if at < len(pairs)], max(controls))
        if row is None:
            print(f"{policy:8} no pair is left")
            continue
        figures[policy] = row
        last = pairs[-1][ours]
        print(
            form.format(
                policy,
                f"{row[theirs]:.1f}",
                f"{row[ours]:.1f}",
                f"{row['ratio']:.3f}",
                "one pair"
                if row["pairs"] == 1
                else f"{row['low']:.3f} to {row['high']:.3f}",
                f"{row['of_indep']:.3f}",
                last.windows or "-",
                last.anchor or "-",
                f"{last.window_bytes / 1e6:.2f}" if last.windows else "-",
                f"{row['overrun']:.1%}",
            )
        )
    return figures


def _row(
    config: HostsConfig, pairs: Sequence[Pair], best: float
) -> dict[str, Any] | None:
    """The figures of a policy's pairs that count; rates are means."""
    ours, theirs = places(config)
    rates = {
        place: [pair[place].samples_per_s for pair in pairs] for place in (theirs, ours)
    }
    found = ratio_of(rates[ours], rates[theirs])
    if found is None:
        return None
    means = {place: sum(each) / len(each) for place, each in rates.items()}
    values = asdict(found)
    return {
        **means,
        "ratio": values.pop("mean"),
        **values,
        "of_indep": means[ours] / best,
        "overrun": max(run.overrun for pair in pairs for run in pair.values()),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _config(asked: argparse.Namespace) -> HostsConfig:
    speeds = tuple(float(each) for each in asked.speeds.split(","))
    bench = LinkBenchConfig(
        speeds=speeds,
        contenders=(CONTROL,),
        model=asked.model,
        batch_size=asked.batch_size,
        seconds=asked.seconds,
        solo_seconds=asked.control_seconds,
        ms_per_sample=asked.ms_per_sample,
        link_mbit=asked.link_mbit,
        link_delay_ms=asked.link_delay_ms,
        codec=asked.codec,
    )
    return HostsConfig(
        bench=bench,
        ranks_per_host=asked.ranks_per_host,
        overhead_target=asked.overhead_target,
        has_witness=asked.witness,
    )


def main() -> int:
    """Measures, prints the table, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speeds", default="1,0.5,0.25", help="of the ranks")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--link-mbit", type=float, default=100.0)
    parser.add_argument("--link-delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--witness", action="store_true", help="pair standby and none")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--control-seconds", type=float, default=4.0)
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--ms-per-sample", type=float, default=2.5)
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--overhead-target", type=float, help="of windows")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    policies = asked.policies.split(",")
    if unknown := sorted({*policies} - {*POLICIES}):
        parser.error(f"unknown policy {unknown[0]!r}; choose among {POLICIES}")
    if asked.pairs < 1:
        parser.error(f"expected --pairs of at least 1, got {asked.pairs}")
    try:
        config = _config(asked)
        controls, runs = measure(config, policies, asked.pairs)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    figures = report(config, controls, runs)
    record = {
        "emulated": True,
        "settings": {k: v for k, v in vars(asked).items() if k != "json"},
        "least_reduction_s": config.reduction_s,
        "controls": controls,
        "undisturbed": undisturbed(controls, sum(config.bench.rates)),
        "ratios": figures,
        "runs": {
            policy: [{p: asdict(run) for p, run in pair.items()} for pair in pairs]
            for policy, pairs in runs.items()
        },
    }
    write_record(asked.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
