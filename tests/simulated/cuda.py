"""The disguise: what ``torch.cuda`` does, by the simulated devices."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from tests.simulated import nccl

device: Any = sys.modules.get("_simulated")
NUM_DEVICES = device.num_devices() if device else 0
# Milliseconds for which no test runs: what nobody waits for runs when the process ends.
FOR_EVER = 10**9
NAME = "Simulated GPU"


def install() -> None:
    """Make device type "cuda" the simulated one, in the torch that has just been imported."""
    import torch.cuda.nccl

    for name, value in _names_of_c().items():
        setattr(torch._C, name, value)
    for module, names in (
        (torch.cuda, _devices() | _streams() | _memory() | _random() | _properties()),
        (torch.cuda.memory, _memory()),
        (torch.cuda.random, _random()),
        (torch.cuda.streams, {"Stream": Stream, "Event": Event}),
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
        (torch.cuda.nccl, {"version": lambda: (2, 0, 0), "is_available": lambda tensors: False}),
    ):
        for name, value in names.items():
            setattr(module, name, value)
    torch.UntypedStorage.clone = _clone
    nccl.install()
    set_delay(os.environ.get("SIM_DELAY", "0,0"))
    atexit.register(device.finish)


_clone_others = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _clone_others(storage)
    as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return as_bytes.clone().untyped_storage()


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


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", index_of(device)))


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device="cuda", enable_timing=enable_timing)


def _exchange(index: int) -> int:
    before = device.get_device()
    if index >= 0:
        device.set_device(index)
    return before


def _names_of_c() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "_cuda_getDeviceCount": device.num_devices,
        "_cuda_getDevice": device.get_device,
        "_cuda_setDevice": device.set_device,
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_isInBadFork": device.is_forked,
        "_cuda_synchronize": lambda: accelerator.synchronize(device.get_device()),
        "_cuda_hasPrimaryContext": lambda index: device.is_used(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_init": lambda: None,
        "_cuda_getCurrentRawStream": lambda index: accelerator.current_stream(index).stream_id,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_scatter": _scatter,
        "_gather": _gather,
        "_broadcast_coalesced": lambda tensors, devices, size: [
            [_on(tensor, index) for tensor in tensors] for index in devices
        ],
        "_broadcast": lambda tensor, devices: [_on(tensor, index) for index in devices],
    }


def _on(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor if tensor.device.index == index else tensor.to(torch.device("cuda", index))


def _scatter(tensor: torch.Tensor, devices: Any, sizes: Any, dim: int, streams: Any) -> Any:
    parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    return [
        part.to(torch.device("cuda", index), non_blocking=True)
        for part, index in zip(parts, devices, strict=False)
    ]


def _gather(tensors: Any, dim: int, target: int | None) -> torch.Tensor:
    where = torch.device("cpu") if target in (None, -1) else torch.device("cuda", target)
    return torch.cat([tensor.to(where) for tensor in tensors], dim)


def _devices() -> dict[str, Any]:
    return {
        "_initialized": True,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda function, **_: function(),
        "_exchange_device": _exchange,
        "_maybe_exchange_device": _exchange,
        "init": lambda: None,
        "is_available": lambda: NUM_DEVICES > 0,
        "is_initialized": lambda: True,
        "device_count": device.num_devices,
        "current_device": device.get_device,
        "set_device": lambda given: device.set_device(index_of(given)),
        "synchronize": lambda given=None: torch.accelerator.synchronize(index_of(given)),
    }


def _streams() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda given=None: accelerator.current_stream(index_of(given)),
        "default_stream": lambda given=None: torch.Stream(
            stream_id=0, device_index=index_of(given), device_type=1
        ),
        "set_stream": accelerator.set_stream,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "is_current_stream_capturing": lambda: False,
        # In cycles of a clock of 2 GHz.
        "_sleep": lambda cycles: device.sleep(max(1, int(cycles / 2e6))),
    }


def _memory() -> dict[str, Any]:
    def stats(given: Any = None) -> dict[str, int]:
        now, peak, total = device.memory(index_of(given))
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "allocated_bytes.all.allocated": total,
        }

    return {
        "memory_allocated": lambda given=None: device.memory(index_of(given))[0],
        "max_memory_allocated": lambda given=None: device.memory(index_of(given))[1],
        "reset_peak_memory_stats": lambda given=None: device.reset_peak(index_of(given)),
        "memory_stats": stats,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
    }


def _random() -> dict[str, Any]:
    generators = tuple(map(device.default_generator, range(NUM_DEVICES)))

    def own(given: Any = None) -> torch.Generator:
        return generators[index_of(given)]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: own().manual_seed(seed) and None,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: own().initial_seed(),
        "get_rng_state": lambda given="cuda": own(given).get_state(),
        "set_rng_state": lambda state, given="cuda": own(given).set_state(state) and None,
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: (
            [
                generator.set_state(state)
                for generator, state in zip(generators, states, strict=False)
            ]
            and None
        ),
    }


def _properties() -> dict[str, Any]:
    properties = types.SimpleNamespace(
        name=NAME, total_memory=1 << 36, major=9, minor=0, multi_processor_count=1
    )
    return {
        "get_device_properties": lambda given=None: properties,
        "get_device_name": lambda given=None: NAME,
        "get_device_capability": lambda given=None: (9, 0),
        "can_device_access_peer": lambda one, other: True,
        "is_bf16_supported": lambda *_, **__: True,
    }
