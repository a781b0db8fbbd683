"""``seed()``: one seed for a run, from which each rank has random numbers of its own."""

from __future__ import annotations

from functools import partial

import torch

from lockstep.arguments import as_whole_number, refusal
from lockstep.generators import global_generators, mixed
from lockstep.world import set_seed_of_run, shares_generators, this_rank

__all__ = ["seed"]


def seed(number: int) -> None:
    """Seed the random numbers of Python, NumPy and torch, on the CPU and all devices. ::

        lockstep.seed(0)
        model = lockstep.parallelize(Net())

    Call it on every rank, with the same number, before the model is made; it doesn't block. Until
    the first :func:`parallelize` or DistributedDataParallel after it, all ranks draw the same
    numbers: for the model, for a split of the data. From then on each rank draws numbers of its
    own, for dropout and noise; rank 0 goes on as one process does. Ranks that gave different
    numbers are named there.

    A :class:`DataLoader` takes its seed from it, the same one on all ranks: for the order of the
    samples, for what the dataset draws, for its workers. Workers of torch's loader follow the
    numbers of their rank.

    Ranks that are threads of ``launch()`` share the generators, which rank 0 seeds; which of them
    draws first is chance. Give a generator of its own to what is to be the same again there.

    Args:
        number: From 0 to 2 ** 63 - 1.

    Raises:
        TypeError: If ``number`` isn't a whole number.
        ValueError: If it is negative or too large.
    """
    wanted = "a whole number from 0 to 2 ** 63 - 1"
    number = as_whole_number("number", number, wanted, at_least=0)
    if number >= 2**63:
        raise ValueError(refusal("number", number, wanted))
    rank, is_shared = this_rank(), shares_generators()
    if not (is_shared and rank):
        torch.manual_seed(number)  # of all devices
        _seed_python_and_numpy(number)
    set_seed_of_run(number, None if is_shared else partial(_begin_noise, number, rank))


def _begin_noise(number: int, rank: int) -> None:
    """Let this rank draw numbers of its own; the first draws what one process does."""
    if rank:
        local_number = mixed(number, rank)
        # `lockstep run --check` takes torch.manual_seed() for a seed of the program's.
        torch.random.manual_seed(local_number)
        _seed_python_and_numpy(local_number)


def _seed_python_and_numpy(number: int) -> None:
    for name, generator in global_generators().items():
        if name != "torch":
            generator.seed(number)
