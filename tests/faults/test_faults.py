"""A chosen few of the faults that ``python -m tests.faults`` makes at random, and its own parts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.judge import outcome_of, to_next_step
from tests.faults.kills import killed_at_random
from tests.faults.plan import KINDS, PHASES, Fault, Run, draw, fail_at
from tests.faults.trial import StepEnd, Trial

pytestmark = pytest.mark.forks

PLAIN = Run(2, "shm", is_sharded=False, num_workers=0, has_path=False)
SHARDED = Run(3, "shm", is_sharded=True, num_workers=0, has_path=True)
WITH_WORKERS = PLAIN._replace(num_workers=1, has_path=True)


def check(fault: Fault, run: Run) -> None:
    outcome = outcome_of(fault, run)
    assert not outcome.problems, outcome.output


@pytest.mark.parametrize(
    ("fault", "run"),
    [
        (fail_at(1, 6, "update", "SIGKILL"), PLAIN._replace(is_sharded=True)),
        (fail_at(1, 6, "backward", "launcher killed"), PLAIN),
    ],
    ids=str,
)
def test_the_end_has_the_bits_of_an_undisturbed_run(fault: Fault, run: Run) -> None:
    check(fault, run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "run"),
    [
        (fail_at(1, 6, "update", "SIGKILL"), SHARDED),
        (fail_at(0, 4, "forward", "exception"), PLAIN),
        (fail_at(1, 4, "snapshot", "full disk"), PLAIN),
        (fail_at(1, 0, "start", "memory"), SHARDED),
        (fail_at(2, 4, "evaluation", "nan"), SHARDED),
        (fail_at(1, 5, "data", "inf"), PLAIN._replace(size=4, network="gloo")),
        (fail_at(1, 0, "start", "lock"), PLAIN),
        (fail_at(2, 9, "save", "memory"), SHARDED),
        (fail_at(2, 6, "save", "SIGKILL"), SHARDED._replace(network="two levels")),
        (fail_at(0, 8, "snapshot", "SIGKILL"), PLAIN._replace(network="gloo")),
        (fail_at(1, 1, "backward", "SIGSEGV"), PLAIN),
        (fail_at(0, 9, "update", "exit 0"), SHARDED),
        (fail_at(1, 3, "update", "SIGSTOP"), PLAIN._replace(network="gloo")),
        (fail_at(0, 7, "data", "loop"), SHARDED),
        (fail_at(2, 3, "save", "lock"), SHARDED),
        (fail_at(1, 2, "forward", "interpreter"), PLAIN),
        (fail_at(1, 9, "evaluation", "slow"), SHARDED._replace(network="gloo")),
        (fail_at(1, 3, "backward", "SIGTERM"), WITH_WORKERS),
        (fail_at(0, 5, "update", "SIGTERM to group"), WITH_WORKERS),
        (fail_at(0, 6, "save", "SIGTERM to launcher"), SHARDED),
        (fail_at(1, 6, "forward", "worker killed"), WITH_WORKERS),
        (fail_at(1, 5, "forward", "corrupted"), SHARDED),
    ],
    ids=str,
)
def test_other_faults(fault: Fault, run: Run) -> None:
    check(fault, run)


@pytest.mark.long
def test_ranks_killed_at_random_moments() -> None:
    killed = killed_at_random("0")
    assert not killed.problems, killed.output
    assert killed.num_kills > 1


def test_all_kinds_are_drawn_in_all_their_phases() -> None:
    drawn = [draw(str(seed)) for seed in range(4000)]
    pairs = {(fault.kind, fault.phase) for fault, _ in drawn}
    assert pairs == {(kind, phase) for kind in KINDS for phase in KINDS[kind].phases}
    assert {phase for _, phase in pairs} == {*PHASES}
    assert {fault.rank for fault, _ in drawn} == {0, 1, 2, 3}
    assert draw("1") == draw("1")


@pytest.mark.parametrize(
    ("step", "phase", "kind"),
    [(0, "save", "SIGKILL"), (3, "data", "nonsense"), (10, "data", "nan")],
)
def test_a_fault_that_cannot_be_is_refused(step: int, phase: str, kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        fail_at(0, step, phase, kind)


def test_the_next_step_is_one_that_no_rank_had_done() -> None:
    rows = [(0, 0, 1), (1, 0, 2), (0, 1, 3), (0, 0, 5), (1, 0, 6), (0, 1, 7), (1, 1, 9)]
    ends = [StepEnd(0, rank, step, float(seconds)) for rank, step, seconds in rows]
    assert to_next_step(ends, 2.5, 2) == 6.5
    assert to_next_step(ends, 3.5, 2) is None


@pytest.mark.parametrize(("load", "is_too_long"), [(0.0, True), (1000.0, False)])
def test_a_run_has_more_time_where_the_machine_has_much_to_do(
    load: float, is_too_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("tests.faults.trial._LOOK_SECONDS", 0.05)
    with Trial(PLAIN) as trial:
        (trial.folder / "output").touch()
        process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1)"])
        seen = trial.end_of(process, 0.2)
        assert seen.hung == is_too_long
        assert ("no step had ended" in seen.output) == is_too_long
