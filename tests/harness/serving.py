"""A coordinator in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator

from elche.comm.control.addresses import listen
from elche.comm.control.frames import KEY_BYTES
from elche.runtime.process import coordinator
from elche.runtime.process.launchers import LaunchFacts, rank_environment


@contextlib.contextmanager
def serve_in_thread(
    world_size: int, fence: Callable[[int], None] | None = None, joiners: int = 0
) -> Iterator[list[dict[str, str]]]:
    """Serves a run from a thread of this process, which does not train.

    Args:
        world_size: ranks of the run, and of those that join it.
        fence: kills a rank's process, so that the run may go on without it.
        joiners: so many of them, the last ones, are to join it.

    Yields:
        Each rank's environment.
    """
    key = secrets.token_bytes(KEY_BYTES)
    founders = world_size - joiners
    server = coordinator.CoordinatorServer(founders, key, survives=fence is not None)
    server.on_lost = fence or server.on_lost
    server.sees_ends = False
    loop = asyncio.new_event_loop()
    address = loop.run_until_complete(server.start(listen("127.0.0.1", 0)))
    thread = threading.Thread(target=loop.run_forever, name="elche-coordinator")
    thread.start()
    try:
        environments = [
            rank_environment(rank, founders, address, key) for rank in range(founders)
        ]
        joining = environments[0] | LaunchFacts(joins=True).environment()
        late = range(founders, world_size)
        yield [*environments, *({**joining, "RANK": str(rank)} for rank in late)]
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()
