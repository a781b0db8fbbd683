"""What torch's module of a kind of devices has, such as ``torch.cuda``, over the simulated ones."""

from __future__ import annotations

from typing import Any

import torch

from tests.simulated.control import KIND, NUM_DEVICES, device, index_of


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device(KIND, index_of(device)))


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Event:
        return super().__new__(cls, device=KIND, enable_timing=enable_timing)


def exchange(index: int) -> int:
    """Make a device current; return the one that was."""
    before: int = device.get_device()
    if index >= 0:
        device.set_device(index)
    return before


def names() -> dict[str, Any]:
    """What every kind has."""
    accelerator = torch.accelerator
    return random() | {
        "is_available": lambda: NUM_DEVICES > 0,
        "device_count": device.num_devices,
        "current_device": device.get_device,
        "set_device": lambda given: device.set_device(index_of(given)),
        "synchronize": lambda given=None: accelerator.synchronize(index_of(given)),
        "current_stream": lambda given=None: accelerator.current_stream(index_of(given)),
        "Stream": Stream,
        "Event": Event,
        # In cycles of a clock of 2 GHz.
        "_sleep": lambda cycles: device.sleep(max(1, int(cycles / 2e6))),
    }


def random() -> dict[str, Any]:
    """Its generators of random numbers."""
    generators = tuple(map(device.default_generator, range(NUM_DEVICES)))

    def generator_of(given: Any = None) -> torch.Generator:
        return generators[index_of(given)]

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def set_all(states: list[torch.Tensor]) -> None:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)

    return {
        "default_generators": generators,
        "manual_seed": lambda seed: generator_of().manual_seed(seed) and None,
        "manual_seed_all": seed_all,
        "initial_seed": lambda: generator_of().initial_seed(),
        "get_rng_state": lambda given=None: generator_of(given).get_state(),
        "set_rng_state": lambda state, given=None: generator_of(given).set_state(state) and None,
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": set_all,
    }
