"""The two runs of a check, and what is said of them."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

from rich.console import Console

from lockstep.check.causes import Finding, finding, is_divided_by_program
from lockstep.check.recorder import Plan, Recorder
from lockstep.check.records import ALONE, ROUNDED, End, Records, of_rank
from lockstep.errors import BadLaunch
from lockstep.launcher import Job, job_of, supervise, whole_number


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
        plan = Plan(folder, num_steps, float64, job.num_ranks)
        ranks = [Records(folder, of_rank(rank)) for rank in range(job.num_ranks)]
        console.print(f"[bold]check:[/bold] {num_steps} steps on {job.num_ranks} ranks")
        if code := _run(job, plan, console):
            return code
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
        alone, with_rounding = Records(folder, ALONE), Records(folder, ROUNDED)
        found = finding(ranks, alone, with_rounding)
        notes = dict.fromkeys(note for end in [*ends, alone.end() or End()] for note in end.notes)
        _tell(console, found, [*notes], ends, num_steps)
    return 0 if found.cause is None else 1


def _run(job: Job, plan: Plan, console: Console) -> int:
    outcome = supervise(job._replace(around=partial(Recorder, plan)))
    if outcome.exit_status:
        console.print(outcome.message or "The run failed.", markup=False)
        if plan.run is not None:
            console.print(
                "That was in one process, on the ranks' batches joined: without several ranks the "
                "program fails, so that there is nothing to compare with.",
                markup=False,
            )
    return outcome.exit_status


def _tell(
    console: Console, found: Finding, notes: list[str], ends: list[End], num_steps: int
) -> None:
    for note in notes:
        console.print(f"[bold]check:[/bold] {note}.")
    fewest = min(end.num_steps for end in ends)
    if fewest < num_steps:
        console.print(f"[bold]check:[/bold] the program took {fewest} steps.")
    if found.cause is None:
        console.print(
            f"[green]All parameters and buffers are alike after each of {found.num_steps} steps"
            f"[/green]: the largest difference is {found.difference:.1e}, and rounding explains "
            f"{found.tolerance:.1e}."
        )
        if found.is_even:
            console.print(
                "[bold]check:[/bold] the ranks had equally many samples in each of these steps. A "
                "mean of means shows only in a batch that is divided unevenly, such as the last of "
                "an epoch: check as many steps."
            )
        return
    console.print(f"[red]{found.where}[/red]", soft_wrap=True)
    console.print(f"Likely cause: {found.cause}", markup=False)
    console.print(f"What to do: {found.remedy}", markup=False)
