"""Runs of contenders that never ran, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from elche.demo.compare import ContenderRun


def rank_result(
    rate: float = 800.0,
    losses: tuple[float, ...] = (4.0, 3.0, 2.0),
    samples: int = 1000,
    **settings: Any,
) -> dict[str, Any]:
    """A rank that trained at `rate`, with its losses evenly over the run."""
    steps = max(1, len(losses) - 1)
    train_s = samples / rate
    return {
        "samples": samples,
        "train_s": train_s,
        "curve": [
            [train_s * i / steps, samples * i / steps, loss]
            for i, loss in enumerate(losses)
        ],
        "device": "a device",
        "nominal_s": 10.0,
        "overrun_s": 0.0,
        "starved_s": 0.0,
        "sent_bytes": 0,
        "choices": [],
        "window_samples": None,
        "late_batches": [],
        "window_log": [],
        "windows": 0,
        "sync_s": 0.0,
        "anchor": None,
        "shares": [],
        "parameters": 2_300_000,
        **settings,
    }


def run_of(name: str, *ranks: dict[str, Any]) -> ContenderRun:
    """A run of these ranks."""
    return ContenderRun(name, ranks)
