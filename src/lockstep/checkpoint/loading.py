"""``load``: puts what a checkpoint has into models, optimizers and other things."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.arguments import check_flag
from lockstep.checkpoint.folder import MAX_REMOVED, Manifest, newest
from lockstep.checkpoint.ranks import Ranks
from lockstep.checkpoint.saving import background_of
from lockstep.checkpoint.things import kind_of, names_of, prepare
from lockstep.folders import path_given
from lockstep.generators import generator_of_device
from lockstep.nn import refuse_in_shard
from lockstep.tree import decode
from lockstep.world import accelerator, num_accelerators

# In which things of a kind are read; others between these.
_ORDER = {"module": 0, "value": 2}


def load(
    path: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    random_state: bool = True,
    strict: bool = True,
    **things: Any,
) -> dict[str, Any]:
    """Load what :func:`lockstep.save` has saved, into ``things``. ::

        found = lockstep.load("run", model=model, optimizer=optimizer, epoch=0)
        first_epoch = found["epoch"] + 1

    Modules, optimizers, tensors, generators and objects with ``load_state_dict()`` get what was
    saved of them, in place; of anything else, such as a number or None, the value is returned that
    was saved under that name (of a module or optimizer, its state dict). Plain values that were
    saved are returned unasked; other things that aren't asked for aren't loaded. All that is loaded
    is read and verified before anything is changed.

    It loads at any number of ranks, whatever it was at saving. Each rank gets its own random states
    back; ranks that weren't there at saving get states that follow from those of rank 0.

    Every rank calls it, with things of the same names; it blocks. Nothing is unpickled.

    Args:
        path: The folder that was given to :func:`lockstep.save`, of which the newest checkpoint is
            loaded; or one of the checkpoints in it.
        process_group: The ranks; by default all of ``lockstep.init()``.
        random_state: Whether to restore the random states.
        strict: Whether a module has to have the parameters and buffers that were saved, and no
            others; shapes and dtypes have to agree in any case.
        things: What to load, by name.

    Returns:
        The values by name: of those things that aren't changed in place, and all plain ones.

    Raises:
        CheckpointNotFound: If there is no checkpoint.
        CheckpointDamaged: If a file of it is missing or isn't as it was written.
        CheckpointMismatch: If it is one of other things, or the ranks ask for different ones.
        Exception: Whatever the ``load_state_dict()`` of an object raises that is no module or
            optimizer. All objects are as they were then.
    """
    refuse_in_shard("lockstep.load() is called")
    check_flag("random_state", random_state)
    check_flag("strict", strict)
    path = path_given("path", path, "run")
    ranks = Ranks(process_group)
    background_of(ranks.group).finish_on(ranks)
    asked = {name: kind_of(things[name]) for name in sorted(things)}
    ranks.check_same({"path": path, "things": asked}, "load")
    actions: dict[str, Callable[[], object]]
    for left in reversed(range(MAX_REMOVED)):
        failure, folder, actions = None, "", {}
        try:
            folder = str(newest(Path(path))) if ranks.rank == 0 else ""
        except Exception as error:
            failure = error
        folder = ranks.gather(failure, folder)[0]
        try:
            manifest = Manifest(Path(folder))
            kinds = asked | dict.fromkeys(manifest.plain_values() - asked.keys(), "value")
            names = names_of(things)
            states = _read_random_states(manifest, ranks.rank, ranks.size) if random_state else {}
            # Modules first: an optimizer may take over their values. Plain values last, which share
            # memory as they did when they were saved, but not with what is loaded in place.
            order = sorted(kinds, key=lambda name: _ORDER.get(kinds[name], 1))
            for before, name in zip(["", *order], order, strict=False):
                if kinds[name] != "value" or kinds.get(before) != "value":
                    manifest.forget()
                actions[name] = prepare(name, things.get(name), manifest, names, strict=strict)
        except Exception as error:
            failure = error
        # A save may have removed it meanwhile, as there is a newer one.
        was_removed = failure is not None and not os.path.exists(folder)
        if not (left and any(ranks.gather(None, was_removed))):
            break
    ranks.gather(failure)
    restored = {name: actions.pop(name) for name, kind in kinds.items() if kind == "state"}
    _load_or_restore(ranks, {name: things[name] for name in restored}, restored)
    values = {}
    try:
        for name, action in actions.items():
            value = action()
            if kinds[name] == "value":
                values[name] = value
        _restore(states)
    except Exception as error:
        failure = error
    ranks.gather(failure)
    return {name: values[name] for name in [*things, *values] if name in values}


def _load_or_restore(
    ranks: Ranks, things: dict[str, Any], actions: dict[str, Callable[[], object]]
) -> None:
    """Load objects that check their states themselves; if one refuses, restore all of them.

    Every rank calls it, before anything else is changed.
    """
    failure: Exception | None = None
    changed, before = list[str](), dict[str, Any]()
    try:
        before = {name: deepcopy(thing.state_dict()) for name, thing in things.items()}
        for name, action in actions.items():
            changed.append(name)  # even if it raises, which it may do halfway
            action()
    except Exception as error:
        failure = error
    try:
        ranks.gather(failure)
    except BaseException as error:
        for name in changed:
            try:
                things[name].load_state_dict(before[name])
            except Exception as refusal:  # the others are restored all the same
                error.add_note(f"{name!r} couldn't be restored: {refusal!r}. Make it anew.")
        raise


def _read_random_states(manifest: Manifest, rank: int, size: int) -> dict[str, Any]:
    def states_of(number: int) -> dict[str, Any]:
        states = decode(manifest.facts["random"][number], manifest.read)
        # So that what is wrong is noticed before anything is changed.
        random.Random().setstate(states["python"])
        torch.Generator().set_state(states["torch"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.RandomState().set_state(states["numpy"])
        for device, state in _states_of_devices(states):
            torch.Generator(device=device).set_state(state)
        return {name: state for name, state in states.items() if name != "seed"}

    # Those of ranks that aren't there any more too, so that all of every file is verified.
    num_saved = len(manifest.facts["random"])
    states = [manifest.parse(states_of, number) for number in range(rank, num_saved, size)]
    if states:
        return dict(states[0])
    first = json.dumps([manifest.parse(states_of, 0)["torch"].tolist(), rank])
    return {"seed": int.from_bytes(hashlib.blake2b(first.encode(), digest_size=4).digest())}


def _restore(states: dict[str, Any]) -> None:
    numpy = sys.modules.get("numpy")
    if "seed" in states:
        random.seed(states["seed"])
        torch.manual_seed(states["seed"])
        if numpy is not None:
            numpy.random.seed(states["seed"])
    if "python" in states:
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
    for device, state in _states_of_devices(states):
        generator_of_device(device).generator.set_state(state)


def _states_of_devices(states: dict[str, Any]) -> Iterator[tuple[torch.device, torch.Tensor]]:
    """Yield the devices of this process of whose generators there are states."""
    if (kind := accelerator()) in states:
        of_devices = states[kind]
        if isinstance(of_devices, torch.Tensor):  # of a release that saved the current device's
            of_devices = [None] * torch.accelerator.current_device_index() + [of_devices]
        for index, state in enumerate(of_devices[: num_accelerators()]):
            if state is not None:
                yield torch.device(kind, index), state
