"""Windows of a run, as its coordinator has heard of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from elche.coordination.protocol.events import BatchesDone, ModelUpdated
from elche.coordination.protocol.instructions import Reduce
from elche.runtime.process import coordinator
from tests.harness.serving import serve_in_thread


@dataclass
class Window:
    """One window; what it lists is by rank.

    Attributes:
        parts: batches, as ranges in the order of training.
        adopt_at: batches of this window after which the last result was adopted.
        reduce: the plan of its reduction.
    """

    parts: dict[int, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    adopt_at: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    reduce: Reduce | None = None


class WindowRecord:
    """Records the windows of the run that :meth:`serve` serves."""

    def __init__(self) -> None:
        self._epochs: dict[int, dict[int, Window]] = defaultdict(
            lambda: defaultdict(Window)
        )

    @property
    def epochs(self) -> list[list[Window]]:
        """Windows that were reduced, in their order, by epoch."""
        return [
            [window for _, window in sorted(windows.items()) if window.reduce]
            for _, windows in sorted(self._epochs.items())
        ]

    @contextmanager
    def serve(self, world_size: int) -> Iterator[list[dict[str, str]]]:
        """A setup of a rank pool's case, as `serve_in_thread` is."""
        real = coordinator.CoordinatorServer

        def make(*args: Any, **settings: Any) -> coordinator.CoordinatorServer:
            server = real(*args, **settings)
            server.on_message = self._take
            return server

        with (
            patch.object(coordinator, "CoordinatorServer", make),
            serve_in_thread(world_size) as environments,
        ):
            yield environments

    def _take(self, message: Any) -> None:
        if isinstance(message, BatchesDone):
            window = self._epochs[message.epoch][message.window]
            window.parts[message.rank].append((message.start, message.stop))
        elif isinstance(message, ModelUpdated):
            window = self._epochs[message.epoch][message.window + 1]
            window.adopt_at[message.rank] = message.adopted_at
        elif isinstance(message, Reduce):
            self._epochs[message.epoch][message.window].reduce = message
