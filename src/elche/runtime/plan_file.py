"""The file that a run records its plan to, and is replayed from."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from elche.config import RunConfig
from elche.errors import ConfigError
from elche.runtime.report.files import replace_file

logger = logging.getLogger(__name__)


class PlanFile:
    """Recorded epochs of one run, on rank 0; other ranks hold nothing.

    Args:
        record: where to write them, None for nowhere.
        epochs: the plans to replay, "" for an epoch that was not recorded; None for a
            run of its own.
    """

    def __init__(self, record: Path | None, epochs: list[str] | None) -> None:
        self._record = record
        self._replayed = epochs
        self._kept: list[str] = []

    @staticmethod
    def for_rank(config: RunConfig, rank: int) -> PlanFile:
        """Reads what is to be replayed.

        Raises:
            ConfigError: the file cannot be read, or is no record.
        """
        if rank != 0:
            return PlanFile(None, None)
        debug = config.debug
        record = Path(debug.record) if debug.record is not None else None
        if record is not None and not record.parent.is_dir():
            raise ConfigError(
                f"cannot record to {debug.record!r}: there is no folder "
                f"{str(record.parent)!r}; make it first"
            )
        if debug.replay is None:
            return PlanFile(record, None)
        try:
            epochs = json.loads(Path(debug.replay).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot replay {debug.replay!r}: {error}; expected a file that a run "
                "with record= has written"
            ) from error
        is_list = isinstance(epochs, list)
        if not is_list or not all(isinstance(e, dict | None) for e in epochs):
            raise ConfigError(
                f"cannot replay {debug.replay!r}: expected a list of epochs, as a run "
                "with record= writes"
            )
        return PlanFile(
            record, [json.dumps(epoch) if epoch else "" for epoch in epochs]
        )

    def epoch(self, number: int) -> str:
        """The plan of an epoch, "" for none.

        Raises:
            ConfigError: the record has fewer epochs, or not this one.
        """
        if self._replayed is None:
            return ""
        if number >= len(self._replayed):
            raise ConfigError(
                f"the record holds {len(self._replayed)} epochs, this run begins "
                f"epoch {number}"
            )
        plan = self._replayed[number]
        if not plan:
            raise ConfigError(
                f"epoch {number} of the record was left before its end, so there is "
                "nothing to replay: under policy 'sync' only whole epochs are recorded"
            )
        return plan

    def keep(self, plan: str) -> None:
        """Writes down the next epoch; "" for one that was left before its end.

        What cannot be written is logged: the run goes on, and so does the next epoch's
        attempt to write all of them.
        """
        if self._record is None:
            return
        self._kept.append(plan or "null")
        text = "[" + ",\n".join(self._kept) + "]\n"
        try:
            replace_file(self._record, text)
        except OSError as error:
            logger.warning("cannot record to %s: %s", self._record, error)
