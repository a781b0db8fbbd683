"""``make test-simulated``: the tests of ``tests/gpu``, and those here, on simulated devices.

Three times: with devices that work at once, with some that lag, and with some on which nothing runs
for which nobody waits.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulated.build import CannotBuild, environment

# Of delays on default streams and on others.
SETTINGS = ("0,0", "2,7", "lazy")
# What runs in the last setting alone, as it would find nothing more in others: tests that set
# delays themselves, and those of memory, which devices keep longest where they run nothing unasked.
IN_THE_LAST = (
    "tests/simulated/",
    "tests/gpu/test_data_parallel_memory.py",
    "tests/gpu/test_data_parallel.py::test_the_examples_run_on_a_gpu",
)


def main(arguments: list[str]) -> int:
    """Run pytest in each setting with ``arguments``; return in how many it has failed."""
    failed = 0
    for delay in SETTINGS:
        try:
            variables = environment(delay=delay, devices=3)
        except CannotBuild as error:
            print(f"skipped: {error}")
            return 0
        print(f"== streams with a delay of {delay} ms", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.simulated.plugin"]
        fine = {pytest.ExitCode.OK}
        if delay != SETTINGS[-1]:
            command += [f"--deselect={name}" for name in IN_THE_LAST]
            fine.add(pytest.ExitCode.NO_TESTS_COLLECTED)
        run = subprocess.run([*command, *arguments], env=os.environ | variables)
        failed += run.returncode not in fine
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
