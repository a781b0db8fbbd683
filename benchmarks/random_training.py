"""Courses of training drawn at random: ranks, as threads, do what one process does.

What is drawn and compared is said in ``tests/nn/random_plans.py`` and
``tests/nn/test_properties.py`` for one model, and in ``tests/nn/plans_of_several.py`` for several
of them; the tests do the same for a few hundred.

    python -m benchmarks.random_training --examples 10000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter

import torch
from hypothesis import given, seed, settings

from tests.nn import plans_of_several
from tests.nn.checking import Checker, few_hundred
from tests.nn.random_plans import mean_trainings, trainings
from tests.nn.test_properties import check_plan
from tests.nn.test_properties_of_several import check_several
from tests.nn.training_plans import MeanTraining, Training

Plan = Training | MeanTraining | plans_of_several.Plan
PLANS = {
    "sums": trainings(),
    "means": mean_trainings(),
    "several models": plans_of_several.plans(),
}
PROGRESS_SECONDS = 10


class Progress:
    """Counts plans, and says how many there were every ten seconds."""

    def __init__(self, num_plans: int) -> None:
        self._num_plans = num_plans
        self._started = self._said = time.monotonic()
        self.counts: Counter[str] = Counter()

    def count(self, plan: Plan) -> None:
        setting = plan.settings[0] if isinstance(plan, plans_of_several.Plan) else plan.setting
        self.counts[f"{setting.world_size} ranks"] += 1
        if time.monotonic() - self._said > PROGRESS_SECONDS:
            self._said = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        done = self.counts.total()
        parts = ", ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items()))
        seconds = time.monotonic() - self._started
        return f"{done:,} of {self._num_plans:,} ({parts}), {seconds:.0f} s"


def check(plan: Plan) -> None:
    check_several(plan) if isinstance(plan, plans_of_several.Plan) else check_plan(plan)


def check_plans(kind: str, examples: int, first_seed: int) -> Progress:
    """Check so many plans, which the seed decides.

    Raises:
        Exception: What the smallest plan that fails has raised; the plan is in its notes.
    """
    progress, checked = Progress(examples), Checker(check)

    @seed(first_seed)
    @settings(few_hundred, max_examples=examples, derandomize=False)
    @given(plan=PLANS[kind])
    def check_one(plan: Plan) -> None:
        checked(plan)
        progress.count(plan)

    check_one()
    return progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", choices=list(PLANS), help="by default all in turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    try:
        for kind in [arguments.plans] if arguments.plans else PLANS:
            progress = check_plans(kind, arguments.examples, arguments.seed)
            print(f"{kind}: {progress}: all alike", flush=True)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
