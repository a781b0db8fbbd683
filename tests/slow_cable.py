"""A cable between a host and the switch of tests/network.py that delays, loses or stalls packets.

    python -m tests.slow_cable HOST SWITCH PORT DELAY_SECONDS LOSS [INSIDE OUTSIDE]

As ``tc netem`` does, which not every kernel has: both ends are devices of this process, which
passes on each frame ``DELAY_SECONDS`` after it came, or drops it with the probability ``LOSS``. By
SIGUSR1 it stalls: nothing passes from then on, and nothing is told.

Given two IPv4 addresses, it translates as a NAT does: the host, which has the one INSIDE, has the
other for all that are OUTSIDE, and nobody there can connect to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import selectors
import signal
import socket
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


def translated(frame: bytes, old: bytes, new: bytes, *, is_coming: bool) -> bytes:
    """Put the ``new`` address in place of the ``old`` one; b"" in place of what is let through not.

    Where it ``is_coming`` to the host, the address is that of the receiver, else of the sender.
    """
    data, kind = bytearray(frame), frame[12:14]
    at = {b"\x08\x06": 38 if is_coming else 28, b"\x08\x00": 30 if is_coming else 26}.get(kind, 0)
    if not at or data[at : at + 4] != old:
        return frame
    data[at : at + 4] = new
    if kind == b"\x08\x00":
        after = 14 + 4 * (data[14] & 15)
        is_tcp = data[23] == socket.IPPROTO_TCP
        if is_coming and (not is_tcp or data[after + 13] & 0x12 == 0x02):  # SYN without ACK
            return b""
        for place in [24, after + 16] if is_tcp else [24]:
            (total,) = struct.unpack_from("!H", data, place)
            # Source: RFC 1624, equation 3.
            words = [total ^ 0xFFFF, *(word ^ 0xFFFF for word in struct.unpack("!2H", old))]
            total = sum(words) + sum(struct.unpack("!2H", new))
            total = (total & 0xFFFF) + (total >> 16)
            struct.pack_into("!H", data, place, ((total & 0xFFFF) + (total >> 16)) ^ 0xFFFF)
    return bytes(data)


def main() -> None:
    host, switch, port, delay, loss, *addresses = sys.argv[1:]
    inside_outside = [socket.inet_aton(address) for address in addresses]
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
            if inside_outside:
                is_coming = key.fd == ends[1]
                old, new = inside_outside[::-1] if is_coming else inside_outside
                frame = translated(frame, old, new, is_coming=is_coming)
            if not frame:
                continue
            if not is_stalled and rng.random() >= probability:
                waiting.append((time.monotonic() + delay_seconds, key.data, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, other, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device isn't up, or its queue is full
                os.write(other, frame)


if __name__ == "__main__":
    main()
