"""``make test-simulated``: the tests of ``tests/gpu``, and those here, on simulated devices.

On GPUs that lag, and on such on which nothing runs for which nobody waits; then on accelerators of
a kind that torch doesn't know: those that work at once, and such on which nothing runs unasked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.simulated.build import CannotBuild, environment

# What runs on GPUs that do nothing unasked alone, as it would find nothing more in other settings:
# tests that set delays themselves, and those of memory, which devices keep longest there.
ONCE = (
    "tests/simulated/",
    "tests/gpu/test_data_parallel_memory.py",
    "tests/gpu/test_data_parallel.py::test_the_examples_run_on_a_gpu",
)
# Those that set delays, and in which nothing depends on the kind of the devices.
OF_ANY_KIND = tuple(
    f"tests/simulated/test_{name}.py"
    for name in ("launch_order", "memory", "overlap", "random_programs", "streams")
)


class Setting(NamedTuple):
    """The devices, as :func:`tests.simulated.build.environment` has them, and what isn't run."""

    disguise: str
    delay: str
    num_devices: int
    left_out: tuple[str, ...] = ()


SETTINGS = (
    Setting("cuda", "2,7", 3, ONCE),
    Setting("cuda", "lazy", 3),
    Setting("sim", "0,0", 4, ONCE),
    Setting("sim", "lazy", 4, ("tests/gpu/", *OF_ANY_KIND)),
)


def main(arguments: list[str]) -> int:
    """Run pytest in each setting with ``arguments``; return in how many it has failed."""
    failed = 0
    for disguise, delay, num_devices, left_out in SETTINGS:
        try:
            variables = environment(disguise, num_devices, delay)
        except CannotBuild as error:
            print(f"skipped: {error}")
            return 0
        print(f"== {disguise}: streams with a delay of {delay} ms", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.simulated.plugin"]
        command += [f"--deselect={name}" for name in left_out]
        fine = {pytest.ExitCode.OK}
        if left_out:
            fine.add(pytest.ExitCode.NO_TESTS_COLLECTED)
        run = subprocess.run([*command, *arguments], env=os.environ | variables)
        failed += run.returncode not in fine
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
