"""``make test-simulated``: the tests of ``tests/gpu``, and those here, on simulated devices.

Three times: with devices that work at once, with some that lag, and with some on which nothing runs
for which nobody waits.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.simulated.build import CannotBuild, environment

# Of delays on default streams and on others.
SETTINGS = ("0,0", "2,7", "lazy")


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
        run = subprocess.run([*command, *arguments], env=os.environ | variables)
        failed += run.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
