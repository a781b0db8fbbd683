"""The orders in which gradients become ready, by which a run that goes on has the same buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.nn.backward import engines_with
from lockstep.nn.parallel_state import refresh_engines_of


def gradient_orders(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Return the order in which gradients become ready, by engine; none before its first backward.

    Every rank calls it between backwards; it blocks, until they agree.
    """
    reducers = [engine.reducer for engine in engines_with(parameters)]
    return [reducer.order.agreed(reducer.last.order) for reducer in reducers]


def expect_gradient_orders(
    parameters: Sequence[nn.Parameter], orders: Sequence[Sequence[int]]
) -> None:
    """Let engines divide gradients among buckets as in a run that had found these orders.

    Every rank calls it before a first backward; it may block. Other engines learn their orders.
    """
    refresh_engines_of(parameters)
    engines = engines_with(parameters)
    if len(engines) == len(orders):
        for engine, order in zip(engines, orders, strict=True):
            if not engine.reducer.buckets:
                engine.reducer.order.expect(order)
