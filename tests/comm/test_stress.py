"""The stress of benchmarks/stress.py, shorter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import stress
from tests.counts import num_examples
from tests.processes import Processes, processes

pytestmark = [pytest.mark.forks, pytest.mark.shortened]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(stress.SIZE) as started:
        yield started


def test_random_collectives_from_several_threads_of_processes(ranks: Processes) -> None:
    ranks.run(stress.stress_process, "", stress.SIZE, num_examples(600), 1)


def test_random_collectives_from_several_threads_of_threads() -> None:
    stress.stress_threads(num_examples(600), 2)
