"""Programs to which the kernel refuses ``memfd_create``, as sandboxes do."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The number of the system call.
NUMBER = {"x86_64": 319, "aarch64": 279}.get(platform.machine())
# Have the kernel refuse it to this process and all that it starts, as sandboxes do.
REFUSED = """
import ctypes, os, struct, sys
number, errno = map(int, sys.argv[1:3])
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | errno), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit("no seccomp")
"""

needs_seccomp = pytest.mark.skipif(
    NUMBER is None
    or subprocess.run([sys.executable, "-c", REFUSED, str(NUMBER), "1"], check=False).returncode,
    reason="needs seccomp, and the number of the system call",
)
