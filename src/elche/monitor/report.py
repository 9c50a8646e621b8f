"""A run in words, for its report. Pure."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from typing import Final

from elche.monitor.event_records import RANK_FIELDS, Record, merged
from elche.monitor.page.rows import event_text, start_s
from elche.monitor.run_history import RunHistory, rank_row, run_row
from elche.monitor.run_view import clock

PARTS: Final = {
    "compute": "computing",
    "data_wait": "waiting for data",
    "transfer": "transfer to devices",
    "sync_wait": "waiting for other ranks and reducing",
    "other": "other (the loop's own work, starts of epochs)",
}
"""Parts of the ranks' time in epochs, with their names."""
NAMED: Final = 6
"""Most events or values of a kind that the text names."""


def time_parts(history: RunHistory, whole: Record) -> dict[str, float]:
    """Fractions of all ranks' time in epochs by name of `PARTS`; they add up to 1."""
    sums = {name: [sum(whole[name])] for name in RANK_FIELDS}
    row = rank_row({**whole, **sums}, 0)  # all ranks as one
    there_s = math.fsum(
        each["duration_s"] * sum(map(bool, each["busy_s"])) for each in history.windows
    )
    spent_s = math.fsum(sums["busy_s"] + sums["sync_wait_s"])
    part = spent_s / max(there_s, spent_s, 1e-9)
    parts = {name: part * row[name] for name in PARTS if name != "other"}
    return {**parts, "other": max(0.0, 1.0 - math.fsum(parts.values()))}


def sentences(history: RunHistory) -> list[str]:
    """Returns a run in words: what, how fast, how much, what was lost, how it ended."""
    trained = ["It trained nothing: its event file has no window of an epoch."]
    if history.windows:
        whole = merged(history.windows)
        trained = [*_how_fast(whole), *_how_much(history, whole)]
    return [_what(history), *trained, *_changes(history), _end(history)]


def _what(history: RunHistory) -> str:
    run = history.runs[-1]
    command = shlex.join(map(str, run.get("command", ()))) or "The run"
    policies = [run.get("policy", ""), *(each["policy"] for each in history.epochs)]
    policy = ", then ".join(dict.fromkeys(filter(None, policies)))
    kinds = Counter(each["device"] for _, each in sorted(history.ranks.items()))
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    where = f"{run['host']}, policy {policy or '?'}, devices {devices or '?'}"
    return f"{command} ran on {where}."


def _how_fast(whole: Record) -> list[str]:
    row, ranks = run_row(whole), range(len(whole["busy_s"]))
    rate, devices = row["samples_per_s"], row["device_samples_per_s"]
    rates = [rank_row(whole, rank)["samples_per_s"] for rank in ranks]
    fastest = max(ranks, key=lambda rank: rates[rank], default=0)
    if not (rate > 0 and devices > 0 and rates[fastest] > 0):
        return []
    return [
        f"It trained {rate:,.0f} samples/s: {row['efficiency']:.0%} of what its "
        f"devices deliver while they do not synchronise ({devices:,.0f}), and "
        f"{rate / rates[fastest]:.2f} times what the fastest one delivers (rank "
        f"{fastest}, {rates[fastest]:,.0f}). No device was run alone for these figures."
    ]


def _how_much(history: RunHistory, whole: Record) -> list[str]:
    samples, took = whole["samples"], clock(whole["duration_s"])
    begun = len({each["epoch"] for each in history.epochs})
    found = [f"It trained {samples:,} samples in {took}, epochs begun: {begun}."]
    for name in history.scalar_names[:NAMED]:
        means = (window["values"].get(name, math.nan) for window in history.windows)
        if values := [*filter(math.isfinite, means)]:
            found.append(f"{name} went from {values[0]:.4g} to {values[-1]:.4g}.")
    parts = time_parts(history, whole)
    spent = ", ".join(f"{part:.1%} {PARTS[name]}" for name, part in parts.items())
    found.append(f"The ranks' time: {spent}.")
    if (again := sum(whole["rank_samples"]) - samples) > 0:
        found.append(f"{again:,} samples were trained again after restarts.")
    if (lost := sum(whole["discarded_samples"])) > 0:
        found.append(f"{lost:,} samples were trained and discarded.")
    return found


def _changes(history: RunHistory) -> list[str]:
    """Deaths and errors, with their time."""
    found = [
        f"At {clock(each['t'] - start_s(history))} {event_text(each)}."
        for each in history.events
        if each["name"] in ("died", "error")
    ]
    more = [f"{len(found) - NAMED} more are among the events."] * (len(found) > NAMED)
    return [*found[:NAMED], *more]


def _end(history: RunHistory) -> str:
    text, end = "Its event file has no end: it still runs, or was killed.", history.end
    if end is not None:
        codes = [f"{c} of rank {r}" for r, c in enumerate(end["exit_codes"]) if c]
        how = f" with exit codes {', '.join(codes[:NAMED])}" if codes else ""
        reason = f": {end['reason']}" if end["reason"] else ""
        text = f"It ended after {clock(end['t'] - start_s(history))}{how}{reason}."
    starts = len(history.runs)
    return f"{text} It was started {starts} times." if starts > 1 else text
