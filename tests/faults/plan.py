"""What may happen to a rank, where, and in which run; and what has to come of it."""

from __future__ import annotations

import random
from enum import Enum
from typing import NamedTuple

NUM_STEPS, STEPS_PER_EPOCH, SAVE_EVERY = 10, 5, 3
# How long ranks wait for each other, and how long a slow one makes them wait.
TIMEOUT_SECONDS, SLOW_SECONDS = 4.0, 1.2


class End(Enum):
    """What a run comes to, after which its parameters have to be those of an undisturbed one."""

    RESTARTS = "restarts once, and names the rank"
    STOPS = "saves and stops (75); the same command goes on"
    IS_ENDED = "ends with its launcher; the same command goes on"
    GOES_ON = "goes on, and blames nobody"


IN_STEP = ("data", "forward", "backward", "update")
IN_LOOP = (*IN_STEP, "snapshot", "save", "evaluation")
PHASES = ("start", *IN_LOOP)


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        phases: Where it may be.
        end: What comes of it.
        reason: What the launcher says of the rank: a regular expression.
        at_start: What comes of it before ``init()``, if that is something else.
        with_workers: Whether the loader has worker processes, or None for either.
        is_of_code: Whether it happens in the program's own code, as an exception does, and not to
            the process as a whole.
    """

    phases: tuple[str, ...]
    end: End
    reason: str = ""
    at_start: End | None = None
    with_workers: bool | None = None
    is_of_code: bool = False


_WAITED = r"stood still|did not come|timeout|timed out|Timeout|waited"
KINDS = {
    "exception": Kind(PHASES, End.RESTARTS, "planned", is_of_code=True),
    "memory": Kind(PHASES, End.RESTARTS, "[Mm]emory", is_of_code=True),
    "nan": Kind(("data", "forward", "evaluation"), End.RESTARTS, "finite", is_of_code=True),
    "inf": Kind(("data", "forward", "evaluation"), End.RESTARTS, "finite", is_of_code=True),
    "SIGKILL": Kind(PHASES, End.RESTARTS, "SIGKILL"),
    "SIGSEGV": Kind(PHASES, End.RESTARTS, "SIGSEGV"),
    "exit 0": Kind(PHASES, End.RESTARTS, "left early"),
    "SIGSTOP": Kind(PHASES, End.RESTARTS, _WAITED),
    "loop": Kind(PHASES, End.RESTARTS, _WAITED, is_of_code=True),
    "lock": Kind(PHASES, End.RESTARTS, _WAITED, is_of_code=True),
    "interpreter": Kind(PHASES, End.RESTARTS, _WAITED),
    "slow": Kind(PHASES, End.GOES_ON, is_of_code=True),
    "SIGTERM": Kind(PHASES, End.STOPS, "SIGTERM", at_start=End.RESTARTS),
    "SIGTERM to group": Kind(("forward", "backward", "update"), End.STOPS, with_workers=True),
    "SIGTERM to launcher": Kind(PHASES, End.STOPS, at_start=End.IS_ENDED),
    "launcher killed": Kind(PHASES, End.IS_ENDED),
    "worker killed": Kind(
        ("forward", "backward", "update"), End.RESTARTS, "worker", with_workers=True
    ),
    "full disk": Kind(("save", "snapshot"), End.RESTARTS, "[Tt]oo large", is_of_code=True),
    "corrupted": Kind(IN_LOOP, End.RESTARTS, "SIGKILL"),
}


class Fault(NamedTuple):
    """A kind of fault at a place."""

    kind: str
    rank: int
    step: int
    phase: str

    @property
    def end(self) -> End:
        """What has to come of it."""
        kind = KINDS[self.kind]
        if self.kind == "full disk" and self.phase == "snapshot":
            return End.GOES_ON
        return kind.at_start or kind.end if self.phase == "start" else kind.end


def fail_at(rank: int, step: int, phase: str, kind: str) -> Fault:
    """Return the fault.

    Raises:
        ValueError: If it can't be there.
    """
    if kind not in KINDS or phase not in KINDS[kind].phases or step not in steps_of(phase, kind):
        raise ValueError(f"There is no {kind!r} in {phase!r} of step {step}.")
    return Fault(kind, rank, step, phase)


def steps_of(phase: str, kind: str) -> list[int]:
    """The steps at which a fault of this kind may be in the phase."""
    if phase == "start":
        return [0]
    found = [*range(NUM_STEPS)]
    if phase in ("snapshot", "save"):  # those are of so many steps that are done
        found = [*range(1, NUM_STEPS)]
    if phase == "save":
        found = [step for step in found if step % SAVE_EVERY == 0]
    if phase == "evaluation":
        found = [step for step in found if (step + 1) % STEPS_PER_EPOCH == 0]
    if kind in ("worker killed", "SIGTERM to group"):
        # A worker that has read all of its epoch isn't missed.
        found = [step for step in found if step % STEPS_PER_EPOCH < 2]
    if phase == "data" and kind in ("nan", "inf"):
        found = found[1:]  # the first sample may be read before, to compare ranks' datasets
    if kind == "corrupted":
        found = [step for step in found if step > 2]  # there are two snapshots
    return found


class Run(NamedTuple):
    """What is run."""

    size: int
    network: str  # "shm", "gloo" or "two levels"
    is_sharded: bool
    num_workers: int
    has_path: bool


NETWORKS = ("shm", "gloo", "two levels")


def draw(seed: str) -> tuple[Fault, Run]:
    """Draw a fault, and the run in which it is."""
    draw = random.Random(seed)
    kind = draw.choice([*KINDS])
    phase = draw.choice(KINDS[kind].phases)
    steps = steps_of(phase, kind)
    size = draw.randint(2, 4)
    with_workers = KINDS[kind].with_workers
    if with_workers is None:
        with_workers = phase != "data" and draw.random() < 0.3
    run = Run(
        size,
        draw.choice(NETWORKS),
        is_sharded=draw.random() < 0.5,
        num_workers=int(with_workers),
        # Without room a save fails as well, and then the run.
        has_path=phase == "save" or (kind != "full disk" and draw.random() < 0.5),
    )
    return fail_at(draw.randrange(size), draw.choice(steps), phase, kind), run
