"""A switch that holds every frame back for a while, in user space.

Kernels often lack `netem`, the queue that delays. This process is the bridge instead:
it reads Ethernet frames from the ports of its network namespace and writes each one to
the port where its receiver is, so many milliseconds later. Rates are left to the queues
of the ports. Linux, root.
"""

from __future__ import annotations

import argparse
import contextlib
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

PACKET_VNET_HDR = 15  # of <linux/if_packet.h>, which Python's socket does not name
PACKET_IGNORE_OUTGOING = 23
SOL_PACKET = 263
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # of <asm-generic/socket.h>
EVERY_PROTOCOL = 3  # ETH_P_ALL
OFFLOAD_BYTES = 10
"""Before a frame stands what its checksum and segments are, as the sender left it."""
MOST_BYTES = OFFLOAD_BYTES + (1 << 17)
BUFFER_BYTES = 1 << 26
"""Of a port, so that its own queue, and not the socket, says what is dropped."""


class Switch:
    """Ports, and which addresses are behind them.

    Args:
        ports: one end of a connection for each.
        delay_s: how long a frame is held back.
    """

    def __init__(self, ports: Sequence[socket.socket], delay_s: float) -> None:
        self._ports = list(ports)
        self._delay_s = delay_s
        self._behind: dict[bytes, socket.socket] = {}
        self._held: deque[tuple[float, socket.socket, bytes]] = deque()

    def take(self, port: socket.socket, now_s: float) -> None:
        """Reads what has come at a port."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = port.recv(MOST_BYTES)
                sender = frame[OFFLOAD_BYTES + 6 : OFFLOAD_BYTES + 12]
                self._behind[sender] = port
                self._held.append((now_s + self._delay_s, port, frame))

    def pass_on(self, now_s: float) -> float | None:
        """Sends what is due; seconds until more is, None if nothing is held."""
        while self._held and self._held[0][0] <= now_s:
            _, origin, frame = self._held.popleft()
            receiver = frame[OFFLOAD_BYTES : OFFLOAD_BYTES + 6]
            behind = self._behind.get(receiver)
            for port in self._ports if behind is None else [behind]:
                if port is not origin:
                    with contextlib.suppress(OSError):  # a full queue drops
                        port.send(frame)
        return self._held[0][0] - now_s if self._held else None


def serve(devices: Sequence[str], delay_s: float) -> None:
    """Passes frames on between these devices until standard input ends.

    Raises:
        OSError: a device cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_opened(device)) for device in devices]
        switch = Switch(ports, delay_s)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        wait_s: float | None = None
        while True:
            readable, _, _ = select.select([sys.stdin, *ports], [], [], wait_s)
            if sys.stdin in readable:
                return
            for port in ports:
                if port in readable:
                    switch.take(port, time.monotonic())
            wait_s = switch.pass_on(time.monotonic())


def _opened(device: str) -> socket.socket:
    port = socket.socket(
        socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)
    )
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for forced_size in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, forced_size, BUFFER_BYTES)
    port.bind((device, EVERY_PROTOCOL))
    port.setblocking(False)
    return port


def main() -> None:
    """``python delay.py DELAY_MS DEVICE...``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("devices", nargs="+")
    options = parser.parse_args()
    serve(options.devices, options.delay_ms / 1e3)


if __name__ == "__main__":
    main()
