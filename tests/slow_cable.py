"""A cable between a host and the switch of tests/network.py that delays, loses or stalls packets.

    python -m tests.slow_cable HOST SWITCH PORT DELAY_SECONDS LOSS

As ``tc netem`` does, which not every kernel has: both ends are devices of this process, which
passes on each frame ``DELAY_SECONDS`` after it came, or drops it with the probability ``LOSS``. By
SIGUSR1 it stalls: nothing passes from then on, and nothing is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA  # Linux's request for a device
_IFF_TAP, _IFF_NO_PI = 0x2, 0x1000
_MOST_BYTES = 1 << 17  # of a frame, as far as the kernel splits none


def open_end(network: str, name: str) -> int:
    """Make a device in a network namespace; return the descriptor that has its frames."""
    with open(f"/run/netns/{network}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
    fcntl.ioctl(descriptor, _TUNSETIFF, request)
    return descriptor


def main() -> None:
    host, switch, port, delay, loss = sys.argv[1:]
    subprocess.run(["ip", "-n", switch, "link", "del", port], check=True)  # the fast cable
    ends = open_end(host, "cable"), open_end(switch, port)
    delay_seconds, probability = float(delay), float(loss)
    rng, is_stalled = random.Random(0), list[bool]()
    signal.signal(signal.SIGUSR1, lambda number, frame: is_stalled.append(True))
    print("ready", flush=True)
    waiting: deque[tuple[float, int, bytes]] = deque()
    selector = selectors.DefaultSelector()
    for end, other in (ends, ends[::-1]):
        selector.register(end, selectors.EVENT_READ, other)
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(left):
            frame = os.read(key.fd, _MOST_BYTES)
            if not is_stalled and rng.random() >= probability:
                waiting.append((time.monotonic() + delay_seconds, key.data, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device isn't up, or its queue is full
                os.write(other, frame)


if __name__ == "__main__":
    main()
