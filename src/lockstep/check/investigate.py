"""Further runs that look for the cause of a difference: a suspect is switched off in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lockstep.check.causes import Evidence, Mistake, known, mistake, suspects
from lockstep.check.compare import Comparison, Parting, Runs, compare, gradients_differ
from lockstep.check.locate import first_difference
from lockstep.check.records import ALONE, CheckPlan, Records, Step, of_rank
from lockstep.check.trials import ALONE_ONLY, BOTH, Suspect

# Runs the program as a plan says, and returns whether it came to its end.
Run = Callable[[CheckPlan], bool]


class Cause(NamedTuple):
    """What has been found out about a difference."""

    mistakes: list[Mistake]  # one, or several that are the cause together; none if it isn't known
    known: list[str]  # what is known, if the cause isn't
    tried: list[Suspect]  # what isn't the cause by itself
    is_noise: bool = False  # whether ranks only draw random numbers of their own


def cause_of(comparison: Comparison, plan: CheckPlan, runs: Runs, run: Run) -> Cause:
    """Find the cause of the difference in ``comparison``; the suspects of ``plan`` stay off."""
    assert comparison.parting is not None
    return _Investigation(comparison.parting, plan, runs, run).cause()


class _Investigation:
    def __init__(self, parting: Parting, plan: CheckPlan, runs: Runs, run: Run) -> None:
        # An evaluation is over once the next step is taken.
        num_steps = parting.number + parting.in_evaluation
        self._parting, self._runs, self._run = parting, runs, run
        self._plan = plan._replace(num_steps=num_steps)
        self._always = {Suspect(name) for name in plan.suspects}
        self._count = 0

    def cause(self) -> Cause:
        evidence, place = self._look()
        tried: list[Suspect] = []
        for suspect in (each for each in suspects(evidence) if each not in self._always):
            explains = self._explains({suspect})
            if explains:
                return self._found([suspect], evidence)
            if explains is not None:
                tried.append(suspect)
        if together := self._together(tried):
            return self._found(together, evidence)
        return Cause([], [*place, *known(evidence)], tried)

    def _found(self, guilty: Sequence[Suspect], evidence: Evidence) -> Cause:
        drawn = {records.load("drawn") for records in self._ranks_of_last_trial}
        alike = len(drawn) == 1 and drawn != {0}
        mistakes = [mistake(each, evidence, drawn_alike=alike) for each in guilty]
        return Cause(mistakes, [], [], is_noise=[*guilty] == [Suspect.DRAWS] and not alike)

    def _look(self) -> tuple[Evidence, list[str]]:
        """Run both once more, and note what modules are given and which functions are called."""
        plan = self._new_plan()
        number = self._parting.number
        can_look = self._run(plan) and self._run(plan._replace(run=ALONE))
        ranks, alone = self._records(plan), plan.records(ALONE, plan.trial)
        sites: dict[str, list[str]] = {}
        for each in (*ranks, alone):
            for kind, lines in (each.load("sites") or {}).items():
                known = sites.setdefault(kind, [])
                known += [line for line in lines if line not in known]
        seeds = [(each.load("sites") or {}).get(Suspect.SEEDS, []) for each in ranks]
        sites[Suspect.SEEDS] = [
            line for line in sites.get(Suspect.SEEDS, []) if not all(line in each for each in seeds)
        ]
        steps = [step for each in self._runs.ranks if (step := each.step(number)) is not None]
        one: Step | None = self._runs.alone.step(number)
        assert one is not None
        evidence = Evidence(self._parting, steps, one, sites)
        is_trained = self._parting.name in one.trained
        if not can_look or self._parting.rank is not None or not is_trained:
            return evidence, []
        traces = [each.load(f"trace-{number}") or [] for each in ranks]
        name, is_known = first_difference(traces, alone.load(f"trace-{number}") or [], one.eps)
        if name:
            return evidence, [
                f"{name} is the first value that isn't, on all ranks together, that of one process."
            ]
        if is_known:
            return evidence, [
                "what all modules are given and give is, on all ranks together, that of one "
                "process: the difference comes after them, in the loss, gradients or the step. A "
                "loss that compares samples with each other (contrastive, of triplets) needs those "
                "of all ranks: lockstep.all_gather(embeddings)."
            ]
        return evidence, []

    def _together(self, possible: Sequence[Suspect]) -> list[Suspect]:
        """Those that are the cause together; none if they aren't."""
        guilty = [*possible]
        if len(guilty) < 2 or not self._explains({*guilty}):
            return []
        for suspect in possible:
            rest = {*guilty} - {suspect}
            if rest and self._explains(rest):
                guilty.remove(suspect)
        # The last trial may have been of less than that.
        return guilty if self._explains({*guilty}) else []

    def _explains(self, off: set[Suspect]) -> bool | None:
        """Whether the difference goes if ``off`` are switched off; None if they can't be."""
        off = off | self._always
        in_alone = off & (BOTH | ALONE_ONLY)
        on_ranks = off - ALONE_ONLY
        if Suspect.OPTIONS in off and self._parting.rank is None:
            in_alone, on_ranks = in_alone | {Suspect.OPTIONS}, on_ranks - {Suspect.OPTIONS}
        plan = self._new_plan()
        ranks, alone = self._runs.ranks, self._runs.alone
        if on_ranks:
            if not self._run(plan._replace(suspects=_names(on_ranks))):
                return None
            ranks = self._records(plan)
        if in_alone:
            if not self._run(plan._replace(run=ALONE, suspects=_names(in_alone))):
                return None
            alone = plan.records(ALONE, plan.trial)
        self._ranks_of_last_trial = ranks
        runs = self._runs._replace(ranks=ranks, alone=alone)
        number = self._parting.number
        found = compare(runs, number)
        # Ranks that do the same work are alike, whatever the mistake; and that is none of ours.
        if on_ranks and compare(self._runs._replace(ranks=ranks, alone=ranks[0]), number).are_same:
            return None
        if self._parting.rank is not None:
            is_between = found.parting is not None and found.parting.rank is not None
            return found.num_steps == number and not is_between
        if found.num_steps < number or found.parting is not None:
            return False
        return not gradients_differ(runs, number).counts

    def _new_plan(self) -> CheckPlan:
        self._count += 1
        return self._plan._replace(trial=f"{self._plan.trial or 'trial'}-{self._count}")

    def _records(self, plan: CheckPlan) -> list[Records]:
        return [plan.records(of_rank(rank), plan.trial) for rank in range(plan.num_ranks)]


def _names(off: set[Suspect]) -> tuple[str, ...]:
    return tuple(sorted(off))
