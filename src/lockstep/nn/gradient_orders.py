"""The orders in which gradients become ready, by which a run that goes on has the same buckets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.nn.backward import engines_with, finish_failed
from lockstep.nn.engine import Engine
from lockstep.nn.parallel_state import refresh_engines_of


def _engines_over(num_ranks: int, parameters: Sequence[nn.Parameter]) -> list[Engine]:
    """Return the engines that all ranks have: one of some ranks alone has no order to be kept."""
    return [e for e in engines_with(parameters) if e.process_group.size() == num_ranks]


def gradient_orders(parameters: Sequence[nn.Parameter], num_ranks: int) -> list[list[int]]:
    """Return the order in which gradients become ready, by engine; none before its first backward.

    Every one of the ``num_ranks`` calls it between backwards; it blocks, until they agree. A part
    of the model that is parallel over fewer ranks is left out.
    """
    engines = _engines_over(num_ranks, parameters)
    for engine in engines:
        finish_failed(engine.process_group)
    reducers = [engine.reducer for engine in engines]
    return [reducer.order.agreed(reducer.last.order) for reducer in reducers]


def expect_gradient_orders(
    parameters: Sequence[nn.Parameter], num_ranks: int, orders: Sequence[Sequence[int]]
) -> None:
    """Let engines divide gradients among buckets as in a run that had found these orders.

    Every one of the ``num_ranks`` calls it before a first backward; it may block. Other engines
    learn their orders.
    """
    refresh_engines_of(parameters)
    engines = _engines_over(num_ranks, parameters)
    if len(engines) == len(orders):
        for engine, order in zip(engines, orders, strict=True):
            if not engine.reducer.buckets:
                engine.reducer.order.expect(order)
