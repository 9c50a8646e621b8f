"""Records of a run in its launcher, for its event file, viewers and trace."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from importlib.metadata import version
from typing import final

from elche.coordination.protocol.events import Event, Tick
from elche.coordination.protocol.instructions import Instruction
from elche.monitor.event_records import EventRecorder, Record, event_record
from elche.monitor.run_history import RunHistory
from elche.monitor.trace import EVENT, Span
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult
from elche.runtime.report.event_file import EventFile

VIEWED_WINDOWS = 400
"""Most windows in memory; older ones are merged."""


@final
class RunWatch:
    """Makes records of one start of a run, and passes them on.

    Args:
        config: the launch.

    Raises:
        ConfigError: the folder for events cannot be used.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._draw = config.on_view
        self._history = RunHistory(VIEWED_WINDOWS)
        self._file: EventFile | None = None
        self._recorder, attempt = EventRecorder(), 0
        if config.events is not None:
            file = self._file = EventFile(config.events, appends=config.appends_events)
            self._recorder = EventRecorder(file.epoch_starts, file.epoch_sizes)
            attempt = file.starts
        self.is_needed = bool(self._file or self._draw or config.trace_path)
        self._pass(_run_record(config, attempt))
        if attempt:
            self._pass(event_record("restart", f"start {attempt + 1} of the run"))

    def see(self, message: Event | Instruction) -> None:
        """Records a message; a `Tick` redraws the run."""
        for record in self._recorder.see(message, time.time()):
            self._pass(record)
        if isinstance(message, Tick) and self._draw is not None:
            with contextlib.suppress(OSError):  # nobody reads standard error
                self._draw(self._history)

    def _pass(self, record: Record) -> None:
        record = {"t": time.time(), **record}
        if self._file is not None:
            self._file.add(record)
        self._history.take(record)

    def marks(self) -> list[Span]:
        """Events as marks of a timeline, whose clock is the monotonic one."""
        offset_s, events = time.monotonic() - time.time(), self._history.events
        return [
            Span(e["rank"] or 0, e["name"], EVENT, e["t"] + offset_s, 0.0, e)
            for e in events
        ]

    def close(self, result: LaunchResult) -> None:
        """Records the end of the run."""
        codes = list(result.exit_codes)
        self._pass({"kind": "end", "exit_codes": codes, "reason": result.reason})
        if self._file is not None:
            self._file.close()


def _run_record(config: LaunchConfig, attempt: int) -> Record:
    own = {n: v for n, v in config.environment.items() if n.startswith("ELCHE_")}
    options = {"devices": config.devices, "speeds": config.speeds, **own}
    return {
        "kind": "run",
        "command": list(config.command) or sys.argv,
        "policy": own.get("ELCHE_POLICY", ""),
        "world_size": config.world_size,
        "host": platform.node(),
        "pid": os.getpid(),
        "version": sys.modules["elche"].__version__,
        "torch": version("torch"),
        "settings": {name: value for name, value in options.items() if value},
        "attempt": attempt,
    }
