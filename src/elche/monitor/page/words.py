"""Text of the page as HTML: head line, ranks and events. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from elche.monitor.event_records import Record
from elche.monitor.page.rows import event_text, start_s
from elche.monitor.run_history import RunHistory, rank_row, run_row

RANKS_LISTED: Final = 64
EVENTS_LISTED: Final = 200
"""Newest events in the list and on the charts."""
SILENT_S: Final = 15.0
"""Age (s) of the newest record from which the head line gives it."""


def head_html(history: RunHistory, now_s: float) -> str:
    """Returns the run's state, progress, command and settings.

    Args:
        history: the run so far.
        now_s: Unix time.
    """
    name, figures, done = _progress(history, now_s)
    run = history.runs[-1] if history.runs else {}
    facts = {
        "command": shlex.join(map(str, run.get("command", ()))),
        "host": f"{run.get('host', '')}, process {run.get('pid', '')}",
        "policy": history.epochs[-1]["policy"] if history.epochs else "",
        "settings": ", ".join(f"{k} {v}" for k, v in sorted(history.settings.items())),
    }
    terms = (f"<dt>{k}</dt><dd>{escape(v)}</dd>" for k, v in facts.items() if v and run)
    bar = f'<progress aria-label="done" max="1" value="{done:.4f}"></progress>'
    return (
        f"<h1>{escape(name)}</h1>{bar}<p>{escape(figures)}</p><dl>{''.join(terms)}</dl>"
    )


def ranks_html(history: RunHistory, window: Record | None) -> str:
    """Returns the table of ranks, with their figures in a window."""
    parts, rows = ("share", "compute", "data_wait", "transfer", "sync_wait"), []
    for rank, record in sorted(history.ranks.items())[:RANKS_LISTED]:
        cells = [str(rank), record["device"]]
        if window is not None:
            own = rank_row(window, rank)
            cells.append(f"{own['samples_per_s']:,.0f}")
            cells += [f"{own[part]:.0%}" for part in parts]
        rows.append(cells)
    heads = ("rank", "device", "samples/s", *(each.replace("_", " ") for each in parts))
    return _table(f"Ranks: {len(history.ranks)}", heads, rows)


def events_html(history: RunHistory) -> str:
    """Returns the list of the newest events, the last one first."""
    newest = history.events[: -EVENTS_LISTED - 1 : -1]
    rows = [(clock(e["t"] - start_s(history)), event_text(e)) for e in newest]
    return _table(f"Events: {len(history.events)}", ("time", "event"), rows)


def clock(seconds: float) -> str:
    """Formats seconds like 0:00:05."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _progress(history: RunHistory, now_s: float) -> tuple[str, str, float]:
    """Returns the state, the figures and the fraction that is done."""
    if not history.epochs or history.end:
        name = "Ranks are starting" if history.records else "The run has not begun"
        if history.end:
            failed = any(history.end.get("exit_codes", ()))
            name = "The run has failed" if failed else "The run has ended"
        reason = (history.end or {}).get("reason", "")
        return name, reason or f"{history.epoch_samples:,} samples", float(not reason)
    epoch, done = history.epochs[-1], history.epoch_samples
    total, epochs = epoch["samples"], epoch.get("epochs")
    figures = [f"{done:,} of {total:,} samples"]
    if window := history.recent():
        row = run_row(window)
        rate, part = row["samples_per_s"], row["efficiency"]
        figures.append(f"{rate:,.0f}/s, {part:.0%} of what the devices deliver")
        left = total - done + total * max(0, (epochs or 0) - 1 - epoch["epoch"])
        if rate > 0:
            of = "run" if epochs else "epoch"
            figures.append(f"{clock(left / rate)} to the end of the {of}")
    silent_s = now_s - history.records[-1]["t"]
    if silent_s > SILENT_S:
        figures.append(f"last record {clock(silent_s)} ago")
    count = f" of {epochs}, from 0" if epochs else ""
    done_part = min(1.0, done / total) if total else 0.0
    return f"Epoch {epoch['epoch']}{count}", ", ".join(figures), done_part


def _table(name: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"<tr><th>{'<th>'.join(heads)}</tr>"]
    lines += [f"<tr><td>{'<td>'.join(map(escape, row))}</tr>" for row in rows]
    table = f"<table>{''.join(lines)}</table>"
    return f'<h2>{name}</h2><div class="wide" tabindex="0">{table}</div>'
