"""Each fault in each phase of a run of two hosts: trials of benchmarks/faults_between_hosts.py."""

from __future__ import annotations

import pytest

from benchmarks.faults_between_hosts import FAULTS, PHASES, try_out

pytestmark = pytest.mark.forks

SHORT = {("launcher killed", "training")}


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        pytest.param(*each, marks=[] if each in SHORT else pytest.mark.long)
        for each in ((fault, phase) for fault in FAULTS for phase in PHASES)
    ],
)
def test_fault_is_named_on_every_host_in_time(fault: str, phase: str) -> None:
    assert not try_out(fault, phase).problems
