"""``guard``: a step that all ranks take, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lockstep.arguments import as_finite_number, as_whole_number, check_flag, check_type, refusal
from lockstep.guarding.context import Guard
from lockstep.guarding.step import GuardOptions, OnSkip


def guard(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *others: Any,
    on_skip: OnSkip = "drop",
    max_consecutive: int = 8,
    undo: bool = True,
    spike: float | None = None,
    trace_nonfinite: bool = False,
    verify_every: int | None = None,
) -> Guard:
    """Let all ranks take a step, or none: what fails on one rank is skipped by all. ::

        for x, y in loader:
            with lockstep.guard(model, optimizer) as step:
                loss = lockstep.mean(F.cross_entropy(model(x), y, reduction="none"))
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            if step.skipped:
                print(step.blame)

    Around the forward, the backward and the update. If any rank raises an Exception there, runs out
    of memory, or its gradients aren't finite, the body ends on all ranks, at their next call of all
    ranks or update; no rank waits for ever. Parameters, buffers, the optimizer's state and options,
    the random states (torch's, Python's, NumPy's, and those of generators that modules and
    optimizers have) and all of ``others`` are then as before the step, in every bit; gradients are
    None. The code behind the ``with`` goes on, on all ranks, with the same ``step.blame``.

    What else the body changes isn't put back: change it behind the ``with``, where
    ``step.skipped`` is known. The batch is used up. KeyboardInterrupt and SystemExit pass, and a
    rank that is lost ends the run as without a guard.

    Every rank must call it, for the same steps. It may be entered on one rank, too.

    A skipped step costs what it costs; a good one two exchanges of some bytes between the ranks,
    two passes over the gradients, to see whether they are finite, and with ``undo`` a copy of
    parameters and optimizer state.

    Args:
        model: The parallel model, or several that are parallel over the same ranks.
        optimizer: Its optimizer, or all that step in the body, each once. They may be sharded.
        others: What else is to be put back: modules, such as a moving average of the weights, and
            objects with ``state_dict()`` and ``load_state_dict()``, such as a learning rate
            scheduler that steps in the body. And the GradScaler, if there is one: steps that it
            skips itself are skipped steps, and keep its new scale.
        on_skip: What follows a skipped step. ``"drop"``: the next one. ``"retry"``: the same again,
            with the same random numbers, for which the body has to be a function:
            ``guard(...).run(body)``. ``"verify"``: the next one, after repeats that tell whether
            the samples, the rank's device or neither is to blame, ``step.blame.verdict``; with
            ``guard(...).run(body, *batch)``, as another rank is given the batch. A function is
            called with the step, on every rank.
        max_consecutive: So many skipped steps in a row raise StepSkipped on every rank.
        undo: Whether to keep copies of parameters and optimizer state, so that a failure in the
            update, or behind it in the body, is undone. Without them it raises on every rank.
        spike: A step is skipped, too, if the norm of a rank's own gradients, before they are summed
            and clipped, is more than so many standard deviations above the mean of the last 64
            good steps' (of each the largest rank's), at least 16 of them. 6.0 is far. On one rank
            it is the norm before the update. The same goes for the mean of the ranks' losses, where
            the body gives them to ``step.watch(loss)``; one that isn't finite is too large.
        trace_nonfinite: Repeat a step whose gradients aren't finite, with the same random numbers,
            and look at what each module takes and gives: ``step.blame.origin`` tells where it
            began. The body has to be a function: ``guard(...).run(body)``.
        verify_every: Repeat each so many steps' gradients before it is taken, here and with each
            rank's samples on the next rank, and skip it where they differ in a bit: no comparison
            of replicas sees a wrong gradient, which is in the mean of all. It takes the time of two
            more steps. The body has to be a function: ``guard(...).run(body, *batch)``.

    Returns:
        A context manager, whose ``as`` is a :class:`GuardedStep`, with a method ``run()``.

    Raises:
        StepSkipped: After ``max_consecutive`` skipped steps, with the last one's blame.
        ModelError: In the ``with``: if the model isn't parallel, or the body isn't one step; then
            everything is put back before.
        TypeError: If an argument is of a wrong type.
        ValueError: If ``on_skip``, ``max_consecutive`` or ``spike`` is none of those above.
    """
    models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    optimizers: list[Any] = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for each in models:
        check_type("model", each, nn.Module, "a torch.nn.Module")
    for one in optimizers:
        check_type("optimizer", one, Optimizer, "a torch.optim.Optimizer")
    if not models or not optimizers:
        raise TypeError("guard() takes a model and an optimizer, and got none.")
    for other in others:
        has_state = hasattr(other, "state_dict") and hasattr(other, "load_state_dict")
        if isinstance(other, Optimizer) or not has_state:
            wanted = "a module, or an object with state_dict() and load_state_dict()"
            raise TypeError(refusal("One of guard()'s others", other, wanted))
    if not callable(on_skip) and on_skip not in ("drop", "retry", "verify"):
        raise ValueError(refusal("on_skip", on_skip, '"drop", "retry", "verify" or a function'))
    as_whole_number("max_consecutive", max_consecutive, "1 or more", at_least=1)
    check_flag("undo", undo)
    check_flag("trace_nonfinite", trace_nonfinite)
    if spike is not None:
        spike = as_finite_number("spike", spike, "a number of deviations, 0 or more, or None", 0)
    if verify_every is not None:
        as_whole_number("verify_every", verify_every, "1 or more, or None", at_least=1)
    repeats = trace_nonfinite or on_skip == "verify" or verify_every is not None
    if repeats and not undo and len(optimizers) > 1:
        raise ValueError(
            "guard() repeats steps of several optimizers with their updates but the last, which "
            "have to be undone then: leave out undo=False."
        )
    if spike is not None and sum(isinstance(each, GradScaler) for each in others) > 1:
        raise ValueError(
            "guard(spike=) knows which loss a GradScaler has scaled only if there is one alone."
        )
    options = GuardOptions(on_skip, max_consecutive, undo, spike, trace_nonfinite, verify_every)
    return Guard(models, optimizers, others, options)
