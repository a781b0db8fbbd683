"""What tests say to the simulated devices, whichever disguise they have."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

device: Any = sys.modules.get("_simulated")
# As torch names them.
KIND = os.environ.get("SIM_DISGUISE", "cuda")
# The backend of torch.distributed for their tensors. Gloo carries those of CUDA as well.
BACKEND = {"cuda": "nccl", "sim": "simccl"}[KIND]
NUM_DEVICES = device.num_devices() if device else 0
# Milliseconds for which no test runs: what nobody waits for runs when the process ends.
FOR_EVER = 10**9


def index_of(given: Any = None) -> int:
    if given is None:
        return device.get_device()
    index = given if isinstance(given, int) else torch.device(given).index
    return device.get_device() if index is None or index < 0 else index


def set_delay(delay: str, only: int = -1) -> None:
    """Let work wait unless it is waited for; ``only`` on one device.

    Args:
        delay: Milliseconds on default streams and on others, such as "0,20"; "lazy" is for ever.
        only: The device's index.
    """
    first, _, second = delay.partition(",")
    times = [FOR_EVER if time == "lazy" else int(time) for time in (first, second or first)]
    device.set_delay(*times, only)


@contextlib.contextmanager
def delayed(delay: str, only: int = -1) -> Iterator[None]:
    """Let work on streams wait for a time, and then run all of it."""
    set_delay(delay, only)
    try:
        yield
    finally:
        set_delay(os.environ.get("SIM_DELAY", "0,0"))


@contextlib.contextmanager
def counted_host_waits() -> Iterator[Counter[str]]:
    """Count how often the host waits for a device, by the line that makes it wait.

    It is the innermost line of lockstep, or else of the program, with what it waits for.
    """
    waits: Counter[str] = Counter()

    def note(what: str) -> None:
        frames, frame = [], sys._getframe().f_back  # None in a thread of autograd's
        while frame is not None:
            code = frame.f_code
            frames.append((code.co_filename, f"{frame.f_lineno} {code.co_name} ({what})"))
            frame = frame.f_back
        ours = [each for each in frames if "/src/lockstep/" in each[0]]
        others = [each for each in frames if "/torch/" not in each[0]]
        path, place = (ours or others or [("autograd", what)])[0]
        waits[f"{os.path.basename(path)}:{place}"] += 1

    device.observe_host_waits(note)
    try:
        yield waits
    finally:
        device.observe_host_waits(None)
