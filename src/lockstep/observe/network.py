"""What all-reduces cost on a network that is known by name or numbers, or by a trace."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.errors import TraceError
from lockstep.observe.timelines import Collective

# Latencies of a message between two hosts, in us, and bandwidths in Gbit/s, as they usually are.
NETWORKS = {
    "1gbe": (50.0, 1.0),
    "10gbe": (30.0, 10.0),
    "25gbe": (20.0, 25.0),
    "100gbe": (10.0, 100.0),
    "200gb-ib": (3.0, 200.0),
    "400gb-ib": (2.0, 400.0),
}
_GOLDEN = (math.sqrt(5) - 1) / 2


class Network(NamedTuple):
    """The links between ranks; each rank sends and receives at the same time."""

    latency: float  # seconds that a message takes, however small
    bandwidth: float  # bytes a second
    # Whether transfers go on while the program computes, or else while it waits for them.
    in_background: bool = True

    def all_reduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the time of an all-reduce, on a ring or a tree, whichever is faster."""
        seconds = num_bytes / self.bandwidth
        ring = 2 * (num_ranks - 1) * (self.latency + seconds / num_ranks)
        tree = 2 * math.ceil(math.log2(num_ranks)) * (self.latency + seconds)
        return min(ring, tree)


def parse_network(text: str) -> Network:
    """Return the network of this name, or of ``LATENCY_US,GBIT``.

    Raises:
        TraceError: If it is neither.
    """
    latency = gigabits = math.nan
    with contextlib.suppress(ValueError):
        latency, gigabits = NETWORKS.get(text.lower()) or map(float, text.split(","))
    if not (0 <= latency < math.inf and 0 < gigabits < math.inf):
        raise TraceError(
            f"--network {text} isn't known: give the latency of a message in microseconds and the "
            f"bandwidth in Gbit/s, as in 20,25, or one of {', '.join(NETWORKS)}."
        )
    return Network(latency / 1e6, gigabits * 1e9 / 8)


_Fit = tuple[float, Network]


def fit(steps: Sequence[Sequence[Collective]]) -> _Fit:
    """Return the mean error of the ends of waits, and the network on which it is smallest.

    If all collectives have about one size, the latency can't be told, and is taken for 0.
    """
    sizes = [each.num_bytes for step in steps for each in step]
    has_latency = max(sizes) > 2 * min(sizes)

    def with_latency(in_background: bool, latency: float) -> _Fit:
        return _least(
            lambda power: _error(steps, Network(latency, 10**power, in_background)), 5, 13
        )

    if not has_latency:
        return min(with_latency(True, 0.0), with_latency(False, 0.0))
    return min(
        _least(lambda power: with_latency(True, 10**power), -7, -1),
        _least(lambda power: with_latency(False, 10**power), -7, -1),
    )


def _least(fit_of: Callable[[float], _Fit], first: int, last: int) -> _Fit:
    """Return the best fit between two numbers: of whole numbers, and then around the best one."""
    tried = {float(number): fit_of(number) for number in range(first, last + 1)}
    best = min(tried, key=lambda number: tried[number])
    low, high = best - 1, best + 1
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = fit_of(left), fit_of(right)
    for _ in range(10):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = fit_of(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = fit_of(right)
    return min(tried[best], at_left, at_right)


def _error(steps: Sequence[Sequence[Collective]], network: Network) -> _Fit:
    """Return by how much waits end earlier or later than on ``network``, on average."""
    errors = []
    for step in steps:
        link_is_free = 0.0
        for num_bytes, launched, came, waits in step:
            start = max(link_is_free, launched if network.in_background else came)
            link_is_free = start + network.all_reduce_seconds(num_bytes, len(waits))
            errors += [abs(stop - max(start, link_is_free)) for start, stop in waits]
    return statistics.fmean(errors), network
