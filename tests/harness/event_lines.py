"""Records of an event file as a run writes them, for tests of its readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

START_S = 1_800_000_000.0


def records(windows: int = 20, ranks: int = 2, window_s: float = 1.0) -> Iterator[Any]:
    """Yields the records of a run in one epoch; rank r has speed 100 / (r + 1)."""
    yield {"t": START_S, "kind": "file", "format": "elche events", "version": 1}
    run = {"command": ["train.py", "<b>"], "host": "box", "pid": 7, "world_size": ranks}
    yield {"t": START_S, "kind": "run", "settings": {"epochs": 2}, **run}
    for rank in range(ranks):
        yield {"t": START_S, "kind": "rank", "rank": rank, "device": f"<i>cpu{rank}"}
    speeds = [100 / (rank + 1) for rank in range(ranks)]
    samples = [round(speed * window_s * 0.8) for speed in speeds]
    epoch = {"epoch": 0, "epochs": 2, "policy": "sync", "done": 0}
    yield {"t": START_S, "kind": "epoch", "samples": windows * sum(samples), **epoch}
    for number in range(1, windows + 1):
        yield {
            "t": START_S + number * window_s,
            "kind": "window",
            "epoch": 0,
            "samples": number * sum(samples),
            "epoch_samples": number * sum(samples),
            "duration_s": window_s,
            "synchronisations": 1,
            "rank_samples": samples,
            "discarded_samples": [0] * ranks,
            "busy_s": [0.8 * window_s] * ranks,
            "data_wait_s": [0.2 * window_s] * ranks,
            "transfer_s": [0.0] * ranks,
            "sync_wait_s": [0.2 * window_s] * ranks,
            "device_samples_per_s": speeds,
            "values": {"loss": 1 / number},
        }


def event(name: str, after_s: float, rank: int | None = None) -> dict[str, Any]:
    """Returns an event record."""
    text = f"{name} <script>"
    record = {"kind": "event", "name": name, "rank": rank, "text": text}
    return {"t": START_S + after_s, **record}


def lines(*found: Any) -> str:
    """Returns records as the text of a file."""
    return "".join(json.dumps(record) + "\n" for record in found)
