"""The runs of a check, and what is said of them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console

from lockstep.check.batches import OUR_LOADER, is_divided_by_program, repeated
from lockstep.check.causes import Mistake
from lockstep.check.compare import Comparison, Parting, Runs, compare, other_start
from lockstep.check.investigate import Cause, cause_of
from lockstep.check.recorder import WatchedProgram
from lockstep.check.records import ALONE, ROUNDED, CheckPlan, End, Records, of_rank
from lockstep.check.trials import Suspect
from lockstep.errors import BadLaunch
from lockstep.launcher import Job, job_of, supervise, whole_number


class CheckFinding(NamedTuple):
    """Something to tell: what is wrong, why and what to do, as far as that is known."""

    where: str
    mistakes: list[Mistake]
    known: list[str] = []  # noqa: RUF012
    tried: str = ""


def check(steps: str, *, float64: bool = False, **options: Any) -> int:
    """Run a program on several ranks and in one process, and say whether and where they part.

    Args:
        steps: The number of optimizer steps to compare.
        float64: Whether to compute in float64, where rounding explains next to nothing.
        options: Those of ``lockstep run``.

    Returns:
        The exit code: 0 if all steps are alike, 1 if not, or that of a run that failed.

    Raises:
        BadLaunch: If an option makes no sense, or the program takes no optimizer step.
    """
    num_steps = whole_number(steps, "--check", "5 steps tell most mistakes.")
    job = job_of(**options)
    if job.num_ranks < 2 or job.meeting is not None:
        raise BadLaunch(
            "--check compares several ranks of one host with one process. Give -n 2 or more, and "
            "no --nnodes."
        )
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-check-") as folder:
        plan = CheckPlan(folder, num_steps, float64, job.num_ranks)
        ranks = [plan.records(of_rank(rank)) for rank in range(job.num_ranks)]
        console.print(f"[bold]check:[/bold] {num_steps} steps on {job.num_ranks} ranks")
        begin = time.monotonic()
        if code := _run(job, plan, console):
            return code
        plan = plan._replace(patience=10 + 3 * (time.monotonic() - begin))
        ends = [records.end() or End() for records in ranks]
        if not any(end.num_steps for end in ends):
            raise BadLaunch(
                "The program ended before it had taken an optimizer step, so that there is nothing "
                "to compare. Check a program, or options of it, that train."
            )
        plan = plan._replace(divides_itself=is_divided_by_program(ranks))
        for run, words in (
            (ALONE, "the same global batches in one process"),
            (ROUNDED, "once more, to see what rounding does"),
        ):
            console.print(f"[bold]check:[/bold] {words}")
            if code := _run(job._replace(num_ranks=1), plan._replace(run=run), console):
                return code
        runs = _runs(plan, joins=any(end.joins for end in ends))
        comparison, findings, notes = _findings(runs, plan, ends, job, console)
        told = [note for end in [*ends, runs.alone.end() or End()] for note in end.notes]
        _tell(console, comparison, findings, [*dict.fromkeys([*told, *notes])], ends, num_steps)
    return 1 if findings else 0


def _run(job: Job, plan: CheckPlan, console: Console) -> int:
    outcome = supervise(job._replace(around=partial(WatchedProgram, plan)))
    if outcome.exit_status:
        console.print(outcome.message or "The run failed.", markup=False)
        if plan.run is not None:
            console.print(
                "That was in one process, on the ranks' batches joined: without several ranks the "
                "program fails, so that there is nothing to compare with.",
                markup=False,
            )
    return outcome.exit_status


def _findings(
    runs: Runs, plan: CheckPlan, ends: list[End], job: Job, console: Console
) -> tuple[Comparison, list[CheckFinding], list[str]]:
    """What is compared, what is to be told, and what is only to be noted."""

    def run(plan: CheckPlan) -> bool:
        num_ranks = plan.num_ranks if plan.run is None else 1
        trial = job._replace(num_ranks=num_ranks, around=partial(WatchedProgram, plan), live=False)
        return not supervise(trial).exit_status

    findings, notes = [], []
    comparison = as_it_is = compare(runs)
    if comparison.parting is not None and comparison.parting.in_bits:
        findings.append(_of_bits(comparison.parting))
    elif comparison.parting is not None:
        console.print("[bold]check:[/bold] they part; further runs look for the cause")
        cause = cause_of(comparison, plan, runs, run)
        if cause.is_noise:
            # The ranks' noise is no mistake. Whether there is one besides it shows without it.
            plan = plan._replace(trial="draws", suspects=(Suspect.DRAWS,))
            if all(run(plan._replace(run=name)) for name in (None, ALONE, ROUNDED)):
                runs = _runs(plan, joins=runs.joins)
                comparison = compare(runs)
                notes.append(
                    f"{cause.mistakes[0].cause} They are no difference: both were given the same"
                )
                if comparison.parting is not None:
                    cause = cause_of(comparison, plan, runs, run)
        if comparison.parting is not None:
            if not cause.mistakes:
                _check_batches_of_program(runs, comparison.parting.number)
            findings.append(_of_difference(comparison, cause))
    if name := comparison.not_finite:
        findings.append(_not_finite(name, comparison.num_steps))
    base = _runs(plan._replace(trial=""), joins=runs.joins)
    found = _of_all_steps(as_it_is, base, ends)
    return comparison, [*findings, *(each for each in found if each is not None)], notes


def _check_batches_of_program(runs: Runs, number: int) -> None:
    """Raise unless the program's own batches, which no loader gave, are divided among ranks."""
    steps = [*(records.step(number) for records in runs.ranks), runs.alone.step(number)]
    *ranks, alone = (sum(b.num_rows for b in step.backwards) if step else 0 for step in steps)
    if sum(ranks) == alone or any(records.passes() for records in runs.ranks):
        return
    raise BadLaunch(
        f"In step {number} the ranks train on {sum(ranks)} samples together, and one process on "
        f"{alone}: the program makes its batches itself, and not as parts of global ones, so that "
        "there is nothing to compare. Let a loader give them, or each rank take its part of a "
        "batch: rows[rank::world_size]."
    )


def _runs(plan: CheckPlan, *, joins: bool) -> Runs:
    ranks = [plan.records(of_rank(rank), plan.trial) for rank in range(plan.num_ranks)]
    alone = plan.records(ALONE, plan.trial)
    return Runs(ranks, alone, alone, plan.records(ROUNDED, plan.trial), joins)


def _of_difference(comparison: Comparison, cause: Cause) -> CheckFinding:
    parting = comparison.parting
    assert parting is not None
    others = "one process" if parting.rank is None else f"rank {parting.rank}"
    who = "All ranks" if parting.rank is None else "Rank 0"
    when = "in an evaluation or a save after" if parting.in_evaluation else "in"
    where = (
        f"{who} and {others} part {when} step {parting.number}, in {parting.name!r}: by "
        f"{parting.difference:.1e}, where rounding explains {parting.tolerance:.1e}."
    )
    return CheckFinding(where, cause.mistakes, cause.known, ", ".join(cause.tried))


def _of_bits(parting: Parting) -> CheckFinding:
    others = "one process" if parting.rank is None else f"rank {parting.rank}"
    return CheckFinding(
        f"Rank 0 and {others} part in step {parting.number}, first in {parting.name!r}: by "
        f"{parting.difference:.1e}, which rounding explains. But steps in shards have the same "
        "bits on any number of ranks.",
        [
            Mistake(
                "something outside of the loop over lockstep.shards() depends on the number of "
                "ranks, or a forward keeps state besides buffers, or draws from a generator that "
                "isn't global.",
                "Compute it of what the loop leaves (the gradients, its loss), which is the same "
                "on all ranks; and keep state in buffers.",
            )
        ],
    )


def _not_finite(name: str, number: int) -> CheckFinding:
    return CheckFinding(
        f"After step {number}, {name!r} isn't finite on the ranks and in one process, so that "
        "later steps can't be compared.",
        [
            Mistake(
                "the training diverges by itself, in one process too.",
                "See which value is the first that isn't finite: torch.autograd.detect_anomaly(), "
                "a smaller learning rate, --float64.",
            )
        ],
    )


def _of_all_steps(comparison: Comparison, runs: Runs, ends: list[End]) -> list[CheckFinding | None]:
    """What all steps together show, also where they are alike."""
    again = repeated(runs.ranks)
    of_samples = again and CheckFinding(again.where, [Mistake(again.cause, again.remedy)])
    if comparison.are_same:
        of_samples = CheckFinding(
            "All ranks train on the same samples, so that each does the work of all.",
            [
                Mistake(
                    "the loader's sampler, or the program, doesn't divide the samples among the "
                    "ranks.",
                    f"Use {OUR_LOADER}.",
                )
            ],
        )
    further = (_of_numbers(runs, ends), _of_division(runs.ranks), _of_start(runs))
    return [of_samples, *further, _of_evaluation(ends)]


def _of_numbers(runs: Runs, ends: list[End]) -> CheckFinding | None:
    numbers = [end.num_steps for end in ends]
    if len({*numbers}) == 1 or runs.joins:
        return None
    told = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(numbers))
    return CheckFinding(
        f"The ranks take different numbers of steps ({told}).",
        [
            Mistake(
                "a rank leaves out steps, or has fewer batches than others.",
                f"Let every rank take each step; {OUR_LOADER}, gives all ranks equally many "
                "batches.",
            )
        ],
    )


def _of_start(runs: Runs) -> CheckFinding | None:
    """Whether one process, which went on from the ranks' values, would have begun with others."""
    if not (name := other_start(runs)):
        return None
    return CheckFinding(
        f"The models start from other values on the ranks than in one process, in {name!r}.",
        [
            Mistake(
                "initial values depend on a rank's own samples, or on the number of ranks.",
                "Compute them from what all ranks have in common, such as lockstep.reduce(value).",
            )
        ],
    )


def _of_evaluation(ends: list[End]) -> CheckFinding | None:
    if not (name := next((end.not_evaluating for end in ends if end.not_evaluating), "")):
        return None
    return CheckFinding(
        "The model is evaluated with its weights of training, on the ranks and in one process.",
        [
            Mistake(
                f"{name} has other weights for evaluations, and its eval() isn't called before.",
                "Call optimizer.eval() before an evaluation or a save, and optimizer.train() after "
                "it.",
            )
        ],
    )


def _of_division(ranks: Sequence[Records]) -> CheckFinding | None:
    """Whether a mean over all micro-batches is divided by their number."""
    number = 1
    while (step := ranks[0].step(number)) is not None:
        micro_batches = len(step.backwards)
        are_divided = all(back.divisor == micro_batches for back in step.backwards)
        if step.accumulates and micro_batches > 1 and are_divided:
            return CheckFinding(
                f"The gradients of step {number} are {micro_batches} times too small, on the "
                "ranks and in one process.",
                [
                    Mistake(
                        f"each loss is divided by {micro_batches}, the number of micro-batches "
                        "in the step. Under lockstep.accumulate() that is done already: "
                        "gradients are those of the mean over all of them.",
                        "Leave the division out.",
                    )
                ],
            )
        number += 1
    return None


def _tell(
    console: Console,
    comparison: Comparison,
    findings: list[CheckFinding],
    notes: list[str],
    ends: list[End],
    num_steps: int,
) -> None:
    for note in notes:
        console.print("[bold]check:[/bold]", end=" ")
        console.print(f"{note}.", markup=False)
    fewest = min(end.num_steps for end in ends)
    if fewest < num_steps:
        console.print(f"[bold]check:[/bold] the program took {fewest} steps.")
    for found in findings:
        console.print(found.where, style="red", markup=False)
        for each in found.mistakes:
            console.print(f"Likely cause: {each.cause}", markup=False)
            console.print(f"What to do: {each.remedy}", markup=False)
        if not found.mistakes:
            console.print("The cause isn't known.")
        for fact in found.known:
            console.print(f"Known: {fact}", markup=False)
        if found.tried and not found.mistakes:
            console.print(f"Switched off, one by one and together, without success: {found.tried}.")
    if comparison.num_steps and comparison.parting is None and comparison.not_finite is None:
        if comparison.in_shards:
            console.print(
                "[green]All parameters and buffers are the same, bit by bit, after each of "
                f"{comparison.num_steps} steps[/green], all of them in shards."
            )
            return
        console.print(
            f"[green]All parameters and buffers are alike after each of {comparison.num_steps} "
            f"steps[/green]: the largest difference is {comparison.difference:.1e}, and rounding "
            f"explains {comparison.tolerance:.1e}."
        )
        if comparison.are_even:
            console.print(
                "[bold]check:[/bold] the ranks had equally many samples in each of these steps. A "
                "mean of means shows only in a batch that is divided unevenly, such as the last of "
                "an epoch: check as many steps."
            )
