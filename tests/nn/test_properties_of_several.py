"""However several models are trained in one script, ranks do what one process does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch import nn

import lockstep
from tests.counts import num_examples
from tests.nn.checking import (
    GROUP_TIMEOUT_SECONDS,
    LEARNING_RATE,
    Seen,
    check_all,
    compare,
    few_hundred,
    first_model,
)
from tests.nn.plans_of_several import Call, Pass, Plan, plans, touched
from tests.nn.random_models import WIDTH, RandomModel, Use, samples
from tests.ranks import run_ranks
from tests.same import gradients_of


class Trainer:
    """Trains the models, in one process and on whole batches."""

    def __init__(self, plan: Plan, models: Sequence[RandomModel]) -> None:
        self.plan, self.bare = plan, models
        self.models: Sequence[nn.Module] = models
        self.seen: list[Seen] = []
        # Models of which some rank has gradients that are not reduced yet.
        self.waiting: set[int] = set()
        trained = [nn.ModuleList(models)] if plan.has_one_optimizer else models
        self.optimizers = [
            torch.optim.SGD(part.parameters(), LEARNING_RATE, plan.settings[0].momentum)
            for part in trained
        ]

    def run(self) -> list[Seen]:
        for number, step in enumerate(self.plan.steps):
            for optimizer in self.optimizers if step.zero is not None else ():
                optimizer.zero_grad(set_to_none=step.zero is True)
            for index, one in enumerate(step.passes):
                self.run_pass(one, f"step {number}, pass {index}")
            for which in step.optimizers:
                self.optimizers[which].step()
            self.see(f"step {number}", has_gradients=True)
            values = [p.detach().clone() for model in self.bare for p in model.parameters()]
            self.seen.append(Seen(f"after step {number}", values, []))
        return self.seen

    def run_pass(self, one: Pass, moment: str) -> None:
        loss = self.loss(one)
        with contextlib.ExitStack() as contexts:
            for held in one.held:
                self.hold(held, contexts)
            if loss.requires_grad:
                loss.backward()
        by_any = {model for calls in one.calls for model in touched(self.bare, calls)}
        self.waiting = (self.waiting - by_any) | (by_any & set(one.held))
        self.see(moment, has_gradients=self.has_gradients(one))

    def see(self, moment: str, *, has_gradients: bool) -> None:
        for number, model in enumerate(self.bare):
            is_here = has_gradients and number not in self.waiting
            gradients = gradients_of(model) if is_here else None
            self.seen.append(Seen(f"{moment}, model {number}", gradients, []))

    def values(self, x: torch.Tensor, calls: Sequence[Call]) -> torch.Tensor:
        """One for each sample."""
        if calls:
            x = x.detach().requires_grad_()  # without, reentrant checkpoints give no gradients
        given, values = [x], x.square().sum(1)
        for call in calls:
            out = self.models[call.model](given[call.source], Use(left_out=call.left_out))
            given.append(out.unflatten(1, (-1, WIDTH)).mean(1))
            values = values + len(given) * out.square().sum(1)
        return values

    # What is another thing on a rank

    def hold(self, model: int, contexts: contextlib.ExitStack) -> None:
        """Have a model add up gradients without reducing them."""

    def has_gradients(self, one: Pass) -> bool:
        """Whether they are here when the backward is over."""
        return True

    def loss(self, one: Pass) -> torch.Tensor:
        parts = samples(one.seed, sum(one.sizes)).split(list(one.sizes))
        of_ranks = zip(parts, one.calls, strict=True)
        return torch.cat([self.values(x, calls) for x, calls in of_ranks]).mean()


class RankTrainer(Trainer):
    """Trains them on one rank's parts of the batches."""

    def __init__(
        self, plan: Plan, models: Sequence[RandomModel], rank: int, group: dist.ProcessGroup
    ) -> None:
        super().__init__(plan, models)
        self.rank, self.group = rank, group
        self.models = [
            (lockstep.DistributedDataParallel if setting.is_wrapped else lockstep.parallelize)(
                model, process_group=group, bucket_cap_mb=setting.bucket_cap_mb
            )
            for model, setting in zip(models, plan.settings, strict=True)
        ]

    def hold(self, model: int, contexts: contextlib.ExitStack) -> None:
        contexts.enter_context(lockstep.no_sync(self.models[model]))

    def has_gradients(self, one: Pass) -> bool:
        """Whether the loss touches something; else they come when the optimizers step."""
        calls = one.calls[self.rank]
        is_told = self.plan.is_of_means and not calls
        return is_told or bool(touched(self.bare, calls) - set(one.held))

    def loss(self, one: Pass) -> torch.Tensor:
        x = samples(one.seed, sum(one.sizes)).split(list(one.sizes))[self.rank]
        values = self.values(x, one.calls[self.rank])
        if self.plan.is_of_means:
            return lockstep.mean(values, process_group=self.group)
        return values.sum() * self.plan.world_size / sum(one.sizes)


def check_several(plan: Plan) -> None:
    """Assert that ranks have the gradients and parameters of one process throughout ``plan``."""
    models = [first_model(setting) for setting in plan.settings]
    oracle = Trainer(plan, copy.deepcopy(models)).run()

    def body(rank: int, group: dist.ProcessGroup) -> list[Seen]:
        return RankTrainer(plan, copy.deepcopy(models), rank, group).run()

    ranks = run_ranks(plan.world_size, body, group_timeout_seconds=GROUP_TIMEOUT_SECONDS)
    compare(plan.settings[0], ranks, oracle, 1e-12 if plan.is_of_means else 1e-10)


@pytest.mark.shortened
def test_any_course_of_several_models_is_that_of_one_process() -> None:
    # Three fifths of NUM_PLANS, where it is said how many are enough: these take longer.
    how = settings(few_hundred, max_examples=num_examples(75, soon=15))
    check_all(plans(), how, check_several)
