"""Restarts of all ranks from a checkpoint, after a rank has died."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elche.checkpoint.store import CheckpointStore
from elche.config_checks import check_positive, check_whole
from elche.errors import ConfigError
from elche.runtime.process.launch import LaunchedRun, handle_signals, launch
from elche.runtime.process.launch_config import LaunchConfig, LaunchResult

DIR: Final = "ELCHE_CHECKPOINT_DIR"
EVERY: Final = "ELCHE_CHECKPOINT_EVERY_S"
KEEP: Final = "ELCHE_CHECKPOINT_KEEP"
RESUME: Final = "ELCHE_RESUME"
AT_ONCE_S: Final = 60.0
"""A start shorter than this (s) that wrote no checkpoint made no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Folder of checkpoints, and most restarts of a run.

    Attributes:
        checkpoint_dir: folder of the run's checkpoints, if elche writes any.
        every_s: seconds between two checkpoints; None: the script decides.
        keep: number of complete checkpoints kept.
        resume: the first start, too, resumes from the newest checkpoint.
        max_restarts: most restarts of a run after deaths.
    """

    checkpoint_dir: Path | None = None
    every_s: float | None = None
    keep: int = 2
    resume: bool = False
    max_restarts: int = 0

    def __post_init__(self) -> None:
        check_whole("--max-restarts", self.max_restarts, 0)
        check_whole("--keep", self.keep, 1)
        if self.every_s is not None:
            check_positive("--checkpoint-every", self.every_s)
        if self.checkpoint_dir is None and (self.every_s is not None or self.resume):
            raise ConfigError(
                "--checkpoint-every and --resume need a --checkpoint-dir to write to "
                "and resume from"
            )

    def environment(self, is_restart: bool) -> dict[str, str]:
        """Environment variables of the ranks."""
        if self.checkpoint_dir is None:
            return {}
        folder = str(self.checkpoint_dir.resolve())
        told = {DIR: folder, KEEP: str(self.keep)}
        if self.every_s is not None:
            told[EVERY] = repr(self.every_s)
        if self.resume or is_restart:
            told[RESUME] = folder
        return told


def launch_with_restarts(
    config: LaunchConfig,
    restarts: RestartConfig,
    say: Callable[[str], None],
    on_ready: Callable[[LaunchedRun], None] = handle_signals,
) -> LaunchResult:
    """Runs ranks as `launch` does, and restarts all of them after a death.

    No restart follows a clean end, a signal to the launcher, or the same error in two
    consecutive starts without progress.

    Args:
        config: command, ranks and options.
        restarts: number of restarts, and folder of checkpoints.
        say: prints a line for the user.
        on_ready: see `launch`.

    Returns:
        Result of the last start.

    Raises:
        ConfigError: a device does not exist, or the folder holds another run.
    """
    folder, error = restarts.checkpoint_dir, ""
    store = None if folder is None else CheckpointStore(folder, restarts.keep)
    newest = None if store is None else store.newest_name()
    if folder is not None:
        _check_folder(folder, newest, restarts)
    for number in range(restarts.max_restarts + 1):
        own, begun_s = restarts.environment(number > 0), time.monotonic()
        own, appends = {**config.environment, **own}, number > 0
        appends |= config.appends_events
        start = replace(config, environment=own, appends_events=appends)
        result = launch(start, on_ready)
        left = restarts.max_restarts - number
        if not result.exit_code or result.signal or not left:
            break
        lived_s = (result.failed_s or time.monotonic()) - begun_s
        before, newest = newest, None if store is None else store.newest_name()
        has_won = newest != before if store else lived_s > AT_ONCE_S
        last_error, error = error, _why(result)
        if error == last_error and result.exit_code < 128 and not has_won:
            say(f"no restart: {error}, twice, and no progress in between")
            break
        for path in filter(None, (config.story_path, config.trace_path)):
            with contextlib.suppress(OSError):  # the next start would overwrite it
                path.replace(path.with_name(f"{path.name}.{number}"))
        ranks = (
            "the rank" if config.world_size == 1 else f"all {config.world_size} ranks"
        )
        nothing = "the beginning" if store else "what the script has saved"
        say(
            f"{error}, after {lived_s:.1f} s; starting {ranks} anew from "
            f"{newest or nothing}, restarts left: {left - 1}"
        )
    return result


def _check_folder(folder: Path, newest: str | None, restarts: RestartConfig) -> None:
    """Refuses a folder that cannot be written to, or holds another run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"expected a --checkpoint-dir that can be made, got {folder}: "
            f"{error.strerror}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"expected a --checkpoint-dir to write to, got {folder}, which does not "
            "let this user"
        )
    if newest is not None and not restarts.resume:
        raise ConfigError(
            f"expected an empty --checkpoint-dir, got {folder} with {newest} of "
            "another run; continue it with --resume, or name another folder"
        )


def _why(result: LaunchResult) -> str:
    """One line about the rank that ended the run."""
    rank = result.failed_first
    assert rank is not None
    code = result.exit_codes[rank]
    with contextlib.suppress(ValueError):
        return f"rank {rank} was killed by {signal.Signals(code - 128).name}"
    reason = result.reason.splitlines()[0] if result.reason else "see their output"
    return f"rank {rank} ended with code {code} ({reason})"
