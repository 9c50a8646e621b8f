"""Rate-limited log lines about dropped connections."""

from __future__ import annotations

import logging
from typing import final

logger = logging.getLogger(__name__)


@final
class DropLog:
    """Counts dropped connections; logs the first, second, fourth, eighth, ...

    So a client that connects again and again cannot fill the disk.

    Attributes:
        count: number of dropped connections.
    """

    def __init__(self) -> None:
        self.count = 0

    def add(self, whose: str, why: object, *, is_known: bool = False) -> None:
        """Records a dropped connection.

        Args:
            whose: description of the connection, to follow "dropped".
            why: reason for dropping it.
            is_known: True if the peer has authenticated: always logged, as it may be
                the only hint why the run ends.
        """
        self.count += 1
        if is_known or self.count.bit_count() == 1:
            so_far = f" ({self.count} so far)" if self.count > 1 else ""
            logger.warning("dropped %s: %s%s", whose, why, so_far)
