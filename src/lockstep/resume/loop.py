"""``steps``: the loop over a run's steps, which goes on where the run was ended."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, overload

import torch.distributed as dist

from lockstep.arguments import as_whole_number
from lockstep.checkpoint import Ranks, kind_of
from lockstep.folders import path_given
from lockstep.resume.checkpoints import STATE, Checkpoints
from lockstep.resume.epochs import Epochs, Numbers
from lockstep.resume.pace import SnapshotPace
from lockstep.resume.run import Steps

T = TypeVar("T")
_SAVE_EVERY = timedelta(minutes=10)


@overload
def steps(
    loader: int,
    path: str | os.PathLike[str] | None = None,
    *,
    save_every: int | timedelta = ...,
    keep: int = ...,
    snapshot_every: int | None = ...,
    seed: int | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    **things: Any,
) -> Steps[int]: ...


@overload
def steps(
    loader: Iterable[T],
    path: str | os.PathLike[str] | None = None,
    *,
    epochs: int | None = ...,
    num_steps: int | None = ...,
    save_every: int | timedelta = ...,
    keep: int = ...,
    snapshot_every: int | None = ...,
    seed: int | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    **things: Any,
) -> Steps[T]: ...


def steps(
    loader: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    epochs: int | None = None,
    num_steps: int | None = None,
    save_every: int | timedelta = _SAVE_EVERY,
    keep: int = 2,
    snapshot_every: int | None = None,
    seed: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    **things: Any,
) -> Steps[Any]:
    """Iterate over the steps of a run; a run that was ended goes on where it was. ::

        loader = lockstep.DataLoader(dataset, batch_size, shuffle=True)
        steps = lockstep.steps(loader, "run", epochs=10, model=model, optimizer=optimizer)
        for x, y in steps:
            loss = lockstep.mean(F.cross_entropy(model(x), y, reduction="none"))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    It yields the batches of all epochs. When the next step begins, the last one is committed: all
    that the things are then belongs to the state after it. Call it behind all that changes them
    before training, such as ``parallelize()`` and ``shard_optimizer()``: it puts the things into
    the newest state that there is, in the midst of an epoch too, and yields what follows:

    - under ``lockstep run --restarts N``, the last snapshot in memory, if this is the same program
      with the same arguments;
    - else the newest whole checkpoint in ``path``, at any number of ranks;
    - else the program begins.

    Before each step Python's, NumPy's and torch's generators of random numbers are seeded from the
    seed, the step and the rank. So what a step draws doesn't depend on whether the run was ended
    before, and the parameters at the end are the same in every bit, with the same number of ranks.
    All that lasts from step to step is to be among the things. Buffers, tensors and generators may
    differ between ranks: as many ranks as before get their own back, other numbers those of rank 0.
    So may the states of other objects, and of a loader that isn't lockstep's.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the program at the end of a step, the same on all
    ranks: it saves a checkpoint to ``path``, takes a snapshot, and exits with code 75, which means
    that it is to be started again.

    Snapshots are taken at the end of steps, so often that they cost at most a hundredth of the
    time. Of more than 10 MB, a thread copies what an optimizer's step changes, and the next
    ``optimizer.step()`` waits for it: change parameters in that step alone, or behind it.

    Every rank calls it, with things of the same names; it blocks.

    Args:
        loader: What gives batches: a :class:`lockstep.DataLoader`, or another iterable with
            ``state_dict()`` and ``load_state_dict()``. Or how many steps there are, to get their
            numbers.
        path: The folder for checkpoints; None for none, so that snapshots alone outlive a rank.
        epochs: How many epochs there are. With a loader, either this or ``num_steps`` is needed.
        num_steps: How many steps there are, in as many epochs as it takes.
        save_every: After how many steps a checkpoint is written, a whole number; or after what
            time, a ``timedelta``. One more is written at the end.
        keep: How many checkpoints are left in ``path``.
        snapshot_every: The steps between two snapshots; by default chosen.
        seed: Of all random numbers; by default that of :func:`torch.manual_seed` on the first rank
            when the run began.
        process_group: The ranks; by default all of ``lockstep.init()``.
        things: All that a step changes, by name: modules, optimizers, tensors, generators, and
            objects with ``state_dict()`` and ``load_state_dict()``, such as schedulers.

    Raises:
        TypeError: If the loader can't tell its state, or a thing can't be put back.
        ValueError: If an argument is out of range, or the loader isn't that of the checkpoint.
        CheckpointMismatch: If ``path`` has checkpoints of another program or model; nothing was
            loaded, and nothing there was changed.
    """
    if isinstance(loader, int) and not isinstance(loader, bool):
        if epochs is not None or num_steps is not None:
            raise ValueError("steps() of a number of steps takes no epochs and no num_steps.")
        batches: Any = Numbers(as_whole_number("loader", loader, at_least=0))
        num_steps = loader
    else:
        batches = _epochs_of(loader, epochs, num_steps)
    _check_things(things)
    keep = as_whole_number("keep", keep, "1 or more", at_least=1)
    if not isinstance(save_every, timedelta):
        save_every = as_whole_number("save_every", save_every, "1 or more", at_least=1)
    if snapshot_every is not None:
        snapshot_every = as_whole_number("snapshot_every", snapshot_every, "1 or more", at_least=1)
    ranks = Ranks(process_group)
    checkpoints = None
    if path is not None:
        folder = Path(path_given("path", path, "run")).absolute()
        checkpoints = Checkpoints(folder, ranks, things, save_every, keep)
    pace = SnapshotPace(ranks.group, snapshot_every)
    found = Steps[Any](ranks, batches, things, checkpoints, pace)
    found.resume(seed, math.inf if num_steps is None else num_steps)
    return found


def _epochs_of(loader: Any, epochs: int | None, num_steps: int | None) -> Epochs:
    name = type(loader).__name__
    has_state = callable(getattr(loader, "state_dict", None)) and hasattr(loader, "load_state_dict")
    if not has_state or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"steps() can't go on with a {name} in the midst of an epoch, as it has no "
            "state_dict() and load_state_dict(). Use lockstep.DataLoader, which takes torch's "
            "arguments, or torchdata's StatefulDataLoader."
        )
    if (epochs is None) == (num_steps is None):
        raise ValueError("Give steps() either epochs or num_steps: how long the run is.")
    which, number = ("epochs", epochs) if num_steps is None else ("num_steps", num_steps)
    as_whole_number(which, number, "0 or more", at_least=0)
    return Epochs(loader, epochs)


def _check_things(things: dict[str, Any]) -> None:
    for name, thing in things.items():
        if name == STATE:
            raise ValueError(f"{STATE!r} is the name of what steps() keeps itself. Use another.")
        if kind_of(thing) == "value":
            raise TypeError(
                f"{name!r} is a {type(thing).__name__}, into which steps() can't put back what it "
                "was. Give modules, optimizers, tensors, generators, and objects with state_dict() "
                "and load_state_dict()."
            )
