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
from lockstep.resume.snapshots import Snapshots

_log = logging.getLogger("lockstep")
# What steps() keeps of itself on all ranks alike, and the state of a foreign loader.
State = tuple[dict[str, Any], Any]


def load_newest(
    ranks: Ranks, snapshots: Snapshots | None, checkpoints: Checkpoints | None, num_alike: int
) -> State | None:
    """Put all things into the newest state; return what steps() has kept of itself, if any.

    Where the same failure comes again and again, the state that it follows on may be the cause, so
    an older one is taken each time. Every rank calls it; it blocks.

    Args:
        ranks: All ranks.
        snapshots: This rank's, if there may be some.
        checkpoints: Those of the run, if it has a folder.
        num_alike: How often the last failure has come, at the same step.
    """
    usable = [] if snapshots is None else snapshots.usable()
    every = ranks.gather(None, [usable, num_alike])
    common = sorted(set.intersection(*({*steps} for steps, _ in every)), reverse=True)
    saved = [] if checkpoints is None else checkpoints.numbers()
    num_older = max(0, max(alike for _, alike in every) - 1)
    num_older = max(0, min(num_older, len(common) + len(saved) - 1))
    older, saved = common[num_older:], saved[max(0, num_older - len(common)) :]
    if num_older and ranks.rank == 0:
        newest = f"the snapshot after step {older[0]}" if older else f"the checkpoint {saved[0]}"
        _log.warning(
            "The same failure came %s times. The run goes on from %s, as what is newer may be its "
            "cause.",
            num_alike,
            newest,
        )
    if snapshots is not None:
        snapshots.discard(but=older)
    if older:
        assert snapshots is not None
        return _restored(ranks, snapshots, older[0])
    return None if checkpoints is None else checkpoints.load_first(saved)


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
