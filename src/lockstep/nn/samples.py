"""Samples of what lockstep keeps the same, by which ranks notice that a program has changed it."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch.optim import Optimizer

from lockstep.grad import part_of_gradient
from lockstep.nn.backward import engines_with
from lockstep.nn.engine import Engine
from lockstep.world import KeptInStep, Sample, parameters_of, samples_of

# How many parameters are looked at in one look, and how many of their elements. Each look has other
# ones.
_NUM_PARAMETERS, _NUM_ELEMENTS = 16, 4
_STRIDE = 7919  # a prime


def kept(optimizer: Optimizer) -> list[KeptInStep]:
    """Return the engines that keep parameters of ``optimizer`` in step."""
    parameters = parameters_of(optimizer)
    ids = {*map(id, parameters)}
    return [
        KeptInStep(engine.process_group, engine.num_backwards, partial(_samples, engine, ids))
        for engine in engines_with(parameters)
    ]


def _samples(engine: Engine, ids: Collection[int], number: int) -> list[Sample]:
    """Return samples of the parameters of ``engine`` whose id() is among ``ids``."""
    # Without synchronisation, or with a hook that averages over some ranks, replicas may differ.
    if not engine.is_syncing or engine.is_stale or engine.reducer.comm_hook is not None:
        return []
    named = [
        (name, parameter)
        for name, parameter in engine.reducer.table.named
        if id(parameter) in ids and parameter.is_floating_point() and parameter.numel()
    ]
    first = number * _NUM_PARAMETERS % max(len(named), 1)
    chosen = [*named[first:], *named[:first]][:_NUM_PARAMETERS]
    found = []
    for name, parameter in chosen:
        start = number * _STRIDE % max(parameter.numel() - _NUM_ELEMENTS + 1, 1)
        stop = min(start + _NUM_ELEMENTS, parameter.numel())
        is_local = engine.reducer.table.is_unreduced(parameter)
        gradient = None if is_local else part_of_gradient(parameter, start, stop)
        found.append((name, parameter.detach().reshape(-1)[start:stop], gradient))
    return samples_of(found)
