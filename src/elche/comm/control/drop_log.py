"""Log lines about connections that are dropped: the more there are, the rarer."""

from __future__ import annotations

import logging
from typing import final

logger = logging.getLogger(__name__)


@final
class DropLog:
    """Counts dropped connections; a line for the first, second, fourth, eighth, ...

    Whoever reaches a port may connect as often as it likes, and must not fill a disk.

    Attributes:
        count: of them.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, whose: str, why: object, *, is_known: bool = False) -> None:
        """A connection is dropped.

        Args:
            whose: in words, after "dropped".
            why: the reason.
            is_known: it has the key and has said who it is: always a line, which may be
                the only word of why the run ends.
        """
        self.count += 1
        if is_known or self.count.bit_count() == 1:
            so_far = f" ({self.count} so far)" if self.count > 1 else ""
            logger.warning("dropped %s: %s%s", whose, why, so_far)
