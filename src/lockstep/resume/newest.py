"""The newest state that a run can go on from: a snapshot, else a checkpoint."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint import Ranks, kind_of
from lockstep.resume.checkpoints import Checkpoints
from lockstep.resume.copies import Copies, Has, steps_of_all
from lockstep.resume.snapshots import Snapshots

_log = logging.getLogger("lockstep")
# What steps() keeps of itself on all ranks alike, and the state of a foreign loader.
State = tuple[dict[str, Any], Any]


def load_newest(
    ranks: Ranks,
    snapshots: Snapshots | None,
    copies: Copies | None,
    checkpoints: Checkpoints | None,
    num_alike: int,
) -> State | None:
    """Put all things into the newest state; return what steps() has kept of itself, if any.

    Where the same failure comes again and again, the state that it follows on may be the cause, so
    an older one is taken each time. Every rank calls it; it blocks.

    Args:
        ranks: All ranks.
        snapshots: This rank's, if there may be some.
        copies: Those in the memory of other hosts, if there may be some.
        checkpoints: Those of the run, if it has a folder.
        num_alike: How often the last failure has come, at the same step.
    """
    has = Has([], [], "", 0)
    if snapshots is not None:
        has = Has(snapshots.usable(), [], snapshots.key.hex(), 0)
    if copies is not None:
        has = has._replace(copies=copies.usable(), distance=copies.distance)
    told = ranks.gather(None, [*has, num_alike])
    num_alike = max(alike for *_, alike in told)
    every = [Has(local, [(s, k) for s, k in held], *rest) for local, held, *rest, _ in told]
    # Older ones are looked for among what each rank has itself.
    common = steps_of_all(every, with_copies=num_alike <= 1)
    saved = [] if checkpoints is None else checkpoints.numbers()
    if num_alike > 1:
        all_of_them = common, saved
        common, saved = _older(snapshots, checkpoints, common, saved, num_alike - 1)
        if ranks.rank == 0 and (common, saved) != all_of_them:
            newest = f"snapshot after step {common[0]}" if common else f"checkpoint {saved[0]}"
            _log.warning(
                "The same failure came %s times. The run goes on from the %s, as what is newer may "
                "be its cause.",
                num_alike,
                newest,
            )
    if snapshots is not None:
        snapshots.discard(but=common)
    if copies is not None:
        copies.discard(every, but=common)
        if common:
            copies.fetch(common[0], every)
    if common:
        assert snapshots is not None
        return _restored(ranks, snapshots, common[0])
    return None if checkpoints is None else checkpoints.load_first(saved)


def _older(
    snapshots: Snapshots | None,
    checkpoints: Checkpoints | None,
    common: list[int],
    saved: list[str],
    num_older: int,
) -> tuple[list[int], list[str]]:
    """Return the snapshots and checkpoints that are left without so many states, the newest ones.

    A snapshot and a checkpoint after the same step are one state. If a checkpoint is to be next, no
    snapshots are returned. The oldest state always stays. Every rank calls it; it blocks.
    """
    states: dict[int, tuple[list[int], list[str]]] = {}  # by how many steps of the run they have
    if checkpoints is not None:
        numbers = zip(checkpoints.steps_of(saved), saved, strict=True)
        whole = [(step, number) for step, number in numbers if step >= 0]
        for at, (step, _) in enumerate(whole):
            states.setdefault(step, ([], [number for _, number in whole[at:]]))
        newest = whole[0][0] if whole else -1
    if snapshots is not None and common:
        done = [snapshots.steps_of_run(step) for step in common]
        states |= {step: (common[at:], saved) for at, step in enumerate(done)}
        newest = done[0]
    # Later ones than what is the newest are from before the run went on from an older state.
    steps = sorted((step for step in states if step <= newest), reverse=True) if states else []
    return states[steps[min(num_older, len(steps) - 1)]] if steps else (common, saved)


def _restored(ranks: Ranks, snapshots: Snapshots, step: int) -> State:
    failure = state = None
    try:
        state = snapshots.restore(step)
    except Exception as error:
        failure = error
    ranks.gather(failure)
    assert state is not None
    return state


def key_of(ranks: Ranks, path: str, things: Mapping[str, Any], number: int) -> bytes:
    """Return the digest of the program, its arguments and its loop, to which snapshots belong.

    Args:
        ranks: All ranks.
        path: The folder of checkpoints, or "".
        things: What is in a snapshot.
        number: How many loops the program has had before.
    """
    digest = hashlib.blake2b(digest_size=32)
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    try:
        digest.update(Path(script).read_bytes())
    except OSError:
        digest.update(b"no file")
    kinds = {name: kind_of(thing) for name, thing in sorted(things.items())}
    facts = [script, sys.argv, path, kinds, number, ranks.rank, ranks.size]
    digest.update(repr(facts).encode())
    return digest.digest()
