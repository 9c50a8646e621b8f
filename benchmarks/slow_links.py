"""Overlapped averaging of a GPT of ten million parameters behind slow links.

    python benchmarks/slow_links.py --speeds 1,0.25 --link-mbit 100 --codec int8
    python benchmarks/slow_links.py --speeds 1,0.25 --link-mbit 10 --codec int4 --ddp

Runs `benchmarks.links --model gpt-10m` under ``async`` (network namespaces, `tc tbf`:
Linux, root) and tells two efficiencies: of the whole run, with the windows in which the
link is found out and the last reduction, for which everybody waits; and of the windows
between. Beside the bytes that a sample costs on the links stands what a ring of
DistributedDataParallel sends for one; ``--ddp`` measures that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import linear_regression
from typing import Any

from hetero import measure

STARTING = 0.25
"""Windows that end in this part of the run do not count as its middle."""
ENDING_WINDOWS = 2
LEAST_WINDOWS = 5
ELEMENT_BYTES = 4


def middle_efficiency(windows: Sequence[Sequence[float]], alone: float) -> float | None:
    """Efficiency between start and end of a run; None if it had too few windows.

    The slope of samples over the times at which windows were committed: a commit comes
    sooner or later after its last batch, so two of them alone would say little.

    Args:
        windows: samples and seconds of each, and more.
        alone: samples per second of all devices, each alone.
    """
    at_s = list(accumulate(window[1] for window in windows))
    samples = list(accumulate(window[0] for window in windows))
    first = sum(until_s <= STARTING * at_s[-1] for until_s in at_s)
    middle = slice(first, -ENDING_WINDOWS)
    if len(at_s[middle]) < LEAST_WINDOWS:
        return None
    return linear_regression(at_s[middle], samples[middle]).slope / alone


def ring_bytes(parameters: int, ranks: int, batch_size: int) -> float:
    """What all ranks send for a sample if each batch's gradients go round a ring."""
    return 2.0 * (ranks - 1) * ELEMENT_BYTES * parameters / batch_size


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What one measured run showed."""
    contenders, ranks = found["contenders"], len(found["speeds"])
    ours, ddp = contenders["elche-async"], contenders.get("ddp", {})
    alone = sum(contenders[f"solo-{rank}"]["samples_per_s"] for rank in range(ranks))
    windows = ours["per_seed"]["window_log"][0]
    computed = ring_bytes(found["parameters"], ranks, found["batch_size"])
    return {
        "control": found["gate"]["control_efficiency"],
        "seconds": ours["per_seed"]["train_s"][0],
        "whole_run": ours["efficiency"],
        "middle": middle_efficiency(windows, alone),
        "windows": ours["windows"],
        "last_reduction_s": max(windows[-1][2:]),
        "bytes_per_sample": ours["sent_bytes_per_sample"],
        "ddp_bytes_per_sample": ddp.get("sent_bytes_per_sample", computed),
        "ddp_efficiency": ddp.get("efficiency"),
    }


def report(values: dict[str, Any]) -> str:
    """The figures in lines."""
    middle, ddp = values["middle"], values["ddp_efficiency"]
    sent, theirs = values["bytes_per_sample"], values["ddp_bytes_per_sample"]
    lines = [
        f"control {values['control']:.3f}",
        f"whole run of {values['seconds']:.0f} s: {values['whole_run']:.3f}",
        "between start and end: " + ("-" if middle is None else f"{middle:.3f}"),
        f"{values['windows']:.0f} windows; the last reduction took "
        f"{values['last_reduction_s']:.1f} s",
        f"{sent / 1e3:.1f} kB per sample on the links; "
        f"DistributedDataParallel {theirs / 1e3:.0f} kB, {theirs / sent:.0f} times",
    ]
    if ddp is not None:
        lines.append(f"DistributedDataParallel delivers {ddp:.3f} of the devices")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speeds", default="1,0.25")
    parser.add_argument("--link-mbit", type=float, required=True)
    parser.add_argument("--link-delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--solo-seconds", type=float, default=5.0)
    parser.add_argument("--ms-per-sample", type=float, default=40.0)
    parser.add_argument("--ddp", action="store_true", help="measure DDP too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.model, args.policies = "gpt-10m", "async"
    words = ["--link-mbit", str(args.link_mbit), "--codec", args.codec]
    if args.link_delay_ms:
        words += ["--link-delay-ms", str(args.link_delay_ms)]
    found = measure(args, *words, others=("ddp",) if args.ddp else ())
    values = figures(found)
    print(report(values))
    if args.json is not None:
        record = {"figures": values, "bench": found}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
