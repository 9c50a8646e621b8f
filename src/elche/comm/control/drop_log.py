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

    def add(self, whose: str, why: object) -> None:
        """A connection is dropped.

        Args:
            whose: in words, after "dropped".
            why: the reason.
        """
        self.count += 1
        if self.count.bit_count() == 1:
            so_far = f" ({self.count} so far)" if self.count > 1 else ""
            logger.warning("dropped %s: %s%s", whose, why, so_far)
