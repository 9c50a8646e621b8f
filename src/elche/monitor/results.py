"""Results on the screen and in files: the table of contenders, JSON, the log."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elche.errors import ConfigError
from elche.monitor.run_view import aligned, cell


@dataclass(frozen=True, kw_only=True)
class ContenderResult:
    """Results of one way of training; None for values that were not measured.

    Attributes:
        name: the contender, for example ``solo-0``, ``ddp`` or ``elche-sync``.
        samples_per_s: median throughput over the runs.
        samples_per_s_spread: relative spread over the runs, see `spread`.
        efficiency: hardware efficiency; 1.0 is the sum of all devices alone.
        bound: best possible efficiency of this way of training.
        sample_efficiency: samples that one device needs to reach the same loss, divided
            by this contender's.
        eval_loss: held-out loss at the end.
        time_to_loss_s: seconds until the common target loss.
        gain: time to that loss of the fastest device alone, divided by this
            contender's.
        note: remark for the reader.
    """

    name: str
    samples_per_s: float
    samples_per_s_spread: float | None = None
    efficiency: float | None = None
    bound: float | None = None
    sample_efficiency: float | None = None
    eval_loss: float | None = None
    time_to_loss_s: float | None = None
    gain: float | None = None
    note: str = ""


def contenders_to_json(results: Sequence[ContenderResult]) -> dict[str, dict[str, Any]]:
    """Fields by name for JSON; non-finite numbers become None."""
    rows = [_finite(asdict(result)) for result in results]
    return {row.pop("name"): row for row in rows}


def print_table(results: Sequence[ContenderResult], title: str) -> None:
    """Prints the table as aligned text, on standard output."""
    print(f"{title}\n\n{plain_table(results)}")


def plain_table(results: Sequence[ContenderResult]) -> str:
    """The table as aligned text, without empty columns."""
    columns = [
        ("contender", "<", [row.name for row in results]),
        ("samples/s", ">", [_rate(row) for row in results]),
        ("hardware eff.", ">", [cell(row.efficiency, ".1%") for row in results]),
        ("bound", ">", [cell(row.bound, ".1%") for row in results]),
        ("sample eff.", ">", [cell(row.sample_efficiency, ".0%") for row in results]),
        ("eval loss", ">", [cell(row.eval_loss, ".4f") for row in results]),
        (
            "time to loss",
            ">",
            [cell(row.time_to_loss_s, ".1f", " s") for row in results],
        ),
        ("gain", ">", [cell(row.gain, ".2f", "x") for row in results]),
        ("note", "<", [row.note for row in results]),
    ]
    return "\n".join(aligned([each for each in columns if {*each[2]} - {"", "-"}]))


def time_to_loss(
    curve: Sequence[tuple[float, float]], target_loss: float
) -> float | None:
    """Time or samples at which a curve first reaches a loss, by interpolation.

    Args:
        curve: (time, loss) sorted by time; samples may replace the time.
        target_loss: the loss to reach.

    Returns:
        The time, in the curve's unit; None if the loss is never reached.
    """
    before: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= target_loss:
            if before is None:
                return at
            done = (before[1] - target_loss) / (before[1] - loss)
            return before[0] + done * (at - before[0])
        if math.isfinite(loss):
            before = (at, loss)
    return None


def _rate(result: ContenderResult) -> str:
    text = f"{result.samples_per_s:.1f}"
    if result.samples_per_s_spread is not None:
        text += f" ±{result.samples_per_s_spread / 2:.1%}"
    return text


def to_json_text(values: Any) -> str:
    """Indented JSON; non-finite numbers become null."""
    return json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"


def check_writable(path: Path) -> None:
    """Checks that a file can be written later, without changing it.

    Raises:
        ConfigError: the file is not writable.
    """
    existed = path.exists()
    try:
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def log_to_stderr() -> Iterator[None]:
    """Prints elche's log to standard error, as plain lines."""
    logger = logging.getLogger("elche")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _finite(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_finite(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values
