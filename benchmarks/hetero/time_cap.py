"""The common last step of a contender's run of capped time.

Under ``sync`` all have to leave after the same step, and no two clocks say the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import final


@final
class TimeCap:
    """One rank's part in that decision.

    The first whose time is up names its *next* batch, in a file that all can read, and
    leaves after that one. Under ``sync`` nobody ends a step before every rank has begun
    it, so at the end of the named step all have the word, and two whose time is up at
    once name the same one. Where ranks have windows of their own any of them may leave,
    and the rest is told by elche.

    Args:
        limit_s: seconds of training; None: no limit.
        word: the file; None: this rank trains alone.
        meet: waits until every rank is here.
    """

    def __init__(
        self, limit_s: float | None, word: Path | None, meet: Callable[[], None]
    ) -> None:
        self._limit_s = limit_s
        self._word = word
        self._meet = meet
        self._last: int | None = None

    def leaves_after(self, batch: int, train_s: float) -> bool:
        """Whether this rank leaves, having trained on that batch of its own.

        Args:
            batch: counted over the whole run.
            train_s: seconds of training so far.
        """
        if self._limit_s is None:
            return False
        if self._word is None:
            return train_s >= self._limit_s
        if self._last is None:
            if os.path.exists(self._word):  # asked for every batch: no Path's detours
                self._last = int(self._word.read_text())
            elif train_s >= self._limit_s:
                self._last = self._say(batch + 1)
        return self._last is not None and batch >= self._last

    def is_over(self, train_s: float) -> bool:
        """Whether the run is over for all, after a part of it; waits for all."""
        if self._limit_s is None:
            return False
        if self._word is None:
            return train_s >= self._limit_s
        if train_s >= self._limit_s:
            self._say(0)
        self._meet()
        return self._word.exists()

    def _say(self, last: int) -> int:
        """Names the last batch, unless another rank has; returns what is named."""
        assert self._word is not None
        whole = self._word.with_name(f"{self._word.name}.{os.getpid()}")
        whole.write_text(str(last))
        try:
            os.link(whole, self._word)  # whole at once, and only the first counts
        except FileExistsError:
            return int(self._word.read_text())
        finally:
            whole.unlink()
        return last
