"""Whether the tests on simulated devices notice that a wait is missing: in copies of the source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import lockstep
from tests.simulated.build import CannotBuild, environment

SOURCE = Path(lockstep.__file__).parent


class Mutation(NamedTuple):
    """A change of the source, and tests that fail then.

    Attributes:
        file: The source file.
        there, instead: What is there, once, and what takes its place.
        tests: What pytest is to run.
        delay: Of the streams.
    """

    file: str
    there: str
    instead: str
    tests: str
    delay: str = "lazy"


MUTATIONS = {
    "a bucket isn't waited for": Mutation(
        "grad/bucket.py",
        "            self.now.work = None\n            work.wait()\n",
        "            self.now.work = None\n",
        "tests/gpu/test_training.py tests/simulated/test_streams.py",
    ),
    "the first stream alone waits for an update": Mutation(
        "optim/arriving.py",
        "        if stream.stream_id not in self._streams:\n",
        "        if not self._streams:\n",
        "tests/simulated/test_overlap.py",
    ),
    "an output is copied to the CPU without a wait": Mutation(
        "nn/replicas/devices.py",
        'non_blocking=device.type != "cpu")',
        "non_blocking=True)",
        "tests/gpu/test_data_parallel.py",
    ),
    "a parameter is copied to the CPU without a wait": Mutation(
        "nn/replicas/kept_replica.py",
        'non_blocking=leaf.device.type != "cpu")',
        "non_blocking=True)",
        "tests/simulated/test_replicas.py",
    ),
    "a gradient is accumulated on the stream that is current": Mutation(
        "nn/autograd.py",
        "    if not leaves:\n        return []\n    with torch.enable_grad():\n        uses",
        "    return []\n    with torch.enable_grad():\n        uses",
        "tests/simulated/test_streams.py",
        "2,7",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS)
def test_missing_wait_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    try:
        variables = environment(delay=mutation.delay, devices=3)
    except CannotBuild as error:
        pytest.skip(str(error))
    copy = shutil.copytree(SOURCE, tmp_path / "lockstep")
    text = (copy / mutation.file).read_text()
    assert text.count(mutation.there) == 1
    (copy / mutation.file).write_text(text.replace(mutation.there, mutation.instead))
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.simulated.plugin"]
    run = subprocess.run(
        [*command, *mutation.tests.split()],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout[-3000:]
