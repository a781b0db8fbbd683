"""Gradients that nobody has summed look as if they were, to whoever reads or changes them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter

import lockstep
from lockstep.grad import bucket_of, unsummed_bucket_of
from tests.nn.models import Digits
from tests.optim.programs import BACKENDS, adamw, losses, sharded
from tests.ranks import run_ranks


def is_pending(model: nn.Module) -> list[bool]:
    return [unsummed_bucket_of(parameter) is not None for parameter in model.parameters()]


@BACKENDS
def test_a_gradient_is_summed_when_it_is_read_on_one_rank(backend: str) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        model, optimizer = sharded(group, first)
        for number in range(3):
            for each in plain, model:
                next(losses(each, rank, 1, number)).backward()
            assert all(is_pending(model))
            if rank == number % 2:
                assert torch.equal(model.conv2.weight.grad, plain.conv2.weight.grad)
                assert is_pending(model).count(False) == 1
            optimizer.step()
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)  # after the step, too
            plain.zero_grad()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
            with torch.no_grad():
                for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                    a.copy_(b)

    run_ranks(2, body, backend=backend)


CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda p: p.grad.mul_(0.5),
    "through data": lambda p: p.grad.data.clamp_(-0.01, 0.01),
    "replaced": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "dropped": lambda p: setattr(p, "grad", None),
    "deleted": lambda p: delattr(p, "grad"),
    "zeroed": lambda p: p.grad.zero_(),
}


@BACKENDS
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_a_gradient_counts(change: str, backend: str) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        model, divided = sharded(group, first)
        for each, optimizer in (plain, adamw(plain.parameters())), (model, divided):
            for loss in losses(each, rank, 3):
                loss.backward()
                CHANGES[change](each.conv2.weight)
                CHANGES[change](each.fc1.weight)
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, body, backend=backend)


def test_hooks_of_parameters_see_the_mean() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        model, _ = sharded(group, first)
        seen: list[torch.Tensor] = []
        for each in plain, model:
            each.fc1.weight.register_post_accumulate_grad_hook(
                lambda p: seen.append(p.grad.clone())
            )
            next(losses(each, rank, 1)).backward()
        assert torch.equal(*seen)

    run_ranks(2, body)


def test_copies_and_pickles_have_plain_parameters() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = sharded(group, Digits())
        next(losses(model, rank, 1)).backward()
        assert isinstance(model.fc1.weight, nn.Parameter)
        for made in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
            for a, b in zip(made.parameters(), model.parameters(), strict=True):
                assert type(a) is nn.Parameter
                assert bucket_of(a) is None
                assert torch.equal(a, b)
        assert all(is_pending(model))
        optimizer.step()

    run_ranks(2, body)


def test_a_communication_hook_reduces_as_before() -> None:
    first = Digits()

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce([bucket.buffer()])
        return work.get_future().then(lambda done: done.value()[0].div_(state.size()))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        models = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.DistributedDataParallel(copy.deepcopy(first), process_group=group)
            model.sample = first.sample
            optimizer = shard(adamw(model.parameters()))
            for number, loss in enumerate(losses(model, rank, 4)):
                if number == 2:
                    optimizer.zero_grad()
                    model.register_comm_hook(group, hook)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            models.append(model)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, body)


class Tagged(nn.Parameter):
    """A parameter with a method of its own."""

    def tag(self) -> str:
        return "tagged"


def test_a_class_of_parameters_of_ones_own_stays() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = nn.Linear(3, 3)
        model.weight = Tagged(torch.ones(3, 3))
        lockstep.parallelize(model, process_group=group)
        optimizer = lockstep.shard_optimizer(adamw(model.parameters()))
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.weight.tag() == "tagged"
        assert "DeferredParameter" not in repr(model.bias)

    run_ranks(2, body)


@BACKENDS
def test_a_gradient_that_the_program_holds_stays_the_same_tensor(backend: str) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        seen = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(adamw(model.parameters()))
            for loss in losses(model, rank, 2):  # before the second one, buckets are made anew
                optimizer.zero_grad()
                loss.backward()
            held = [parameter.grad for parameter in model.parameters()]
            found = []
            for number, loss in enumerate(losses(model, rank, 4, 1)):
                if number != 2:  # else it is added to
                    optimizer.zero_grad(set_to_none=False)
                loss.backward()
                found += [gradient.clone() for gradient in held]
                held[0].mul_(2)
                optimizer.step()
            assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
            seen.append([*found, *(parameter.detach() for parameter in model.parameters())])
        torch.testing.assert_close(*seen, rtol=0, atol=0)

    run_ranks(2, body, backend=backend)


@BACKENDS
@pytest.mark.parametrize("how", ["no_sync", "clip", "second backward", "midst"])
def test_a_gradient_stays_the_same_tensor_whatever_sums_it(how: str, backend: str) -> None:
    first = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        seen = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer = shard(torch.optim.SGD(model.parameters(), lr=0.01))
            x, held = torch.ones(4, 3) * (rank + 1), list[torch.Tensor]()
            for _ in range(3):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            model(x).sum().backward()
            if how == "midst":
                parameter = model[1].weight
                hook = model[0].bias.register_hook(
                    lambda _, p=parameter, to=held: to.append(p.grad)
                )
                model(x).sum().backward()
                hook.remove()
            else:
                parameter = model[0].weight
                if how == "no_sync":
                    with lockstep.no_sync(model):
                        model(x).sum().backward()
                elif how == "clip":
                    lockstep.clip_grad_norm_([parameter], 1e9)
                else:
                    model(x).sum().backward()
                held.append(parameter.grad)
            model(x).sum().backward()
            values = [float(parameter.grad is held[0]), held[0].clone(), parameter.grad.clone()]
            held[0].zero_()
            optimizer.step()
            seen.append([*values, *(parameter.detach() for parameter in model.parameters())])
        torch.testing.assert_close(*seen, rtol=0, atol=0)

    run_ranks(2, body, backend=backend)


def test_gradients_are_seen_in_the_midst_of_a_backward() -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        seen: list[list[float]] = []
        for shard in (lambda optimizer: optimizer), lockstep.shard_optimizer:
            model = lockstep.parallelize(copy.deepcopy(first), process_group=group)
            optimizer, found = shard(adamw(model.parameters())), list[float]()

            def look(*_: object, local: nn.Module = model, to: list[float] = found) -> None:
                gradients = [local.fc2.weight.grad, local.fc1.weight.grad]
                to.extend(0.0 if g is None else g.abs().sum().item() for g in gradients)

            model.conv2.register_full_backward_hook(look)
            for loss in losses(model, rank, 4):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen.append(found)
        assert seen[0] == seen[1]
        assert any(seen[0])

    run_ranks(2, body)


@BACKENDS
def test_a_gradient_that_is_read_in_inference_mode_is_an_ordinary_tensor(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, _ = sharded(group, nn.Linear(3, 3))
        model(torch.ones(1, 3)).sum().backward()
        with torch.inference_mode():
            assert model.weight.grad is not None
        model.weight.grad.mul_(2)
        model(torch.ones(1, 3)).sum().backward()
        assert (model.weight.grad == 3).all()

    run_ranks(2, body, backend=backend)


def test_compiled_code_is_not_compiled_again_when_gradients_come() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> int:
        model, optimizer = sharded(group, nn.Linear(3, 3))
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for _ in range(3):
            compiled(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return int(counter.frame_count)

    try:
        assert run_ranks(2, body, backend="shm") == [1, 1]
    finally:
        torch._dynamo.reset()


def test_equal_gradients_of_all_ranks_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        for same in True, False:
            model, _ = sharded(group, nn.Linear(3, 3))
            for _ in range(4):
                model(torch.full((1, 3), 1.0 if same else 1.0 + rank)).sum().backward()
                model.zero_grad()

    run_ranks(2, body)
    assert caplog.text.count("all ranks had the same gradients") == 1


ENDING = """
import sys, torch, lockstep
world = lockstep.init()
def train():
    model = lockstep.parallelize(torch.nn.Linear(3, 3))
    optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    return model, optimizer
kept = train() if sys.argv[1] == "kept" else [*train()[:0]]
print("through")
"""


@pytest.mark.true_start
@pytest.mark.long
@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_a_program_may_end_with_gradients_unread(how: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("through") == 2


@BACKENDS
def test_gradients_stay_for_a_rank_that_reads_them_late(backend: str) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        model, _ = sharded(group, first)
        expected = []
        for loss in losses(plain, rank, 4):
            plain.zero_grad()
            loss.backward()
            expected.append([parameter.grad.clone() for parameter in plain.parameters()])
        for number, loss in enumerate(losses(model, rank, 4)):
            loss.backward()
            if rank == number % 2:
                time.sleep(0.2)  # the other one is in the next backward
                found = [parameter.grad for parameter in model.parameters()]
                torch.testing.assert_close(found, expected[number], rtol=0, atol=0)
            for parameter in model.parameters():
                parameter.grad = None

    run_ranks(2, body, backend=backend)


@BACKENDS
def test_one_buffer_is_enough_where_ranks_drop_gradients_in_time(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> int:
        model, optimizer = sharded(group, Digits())
        for loss in losses(model, rank, 5):
            optimizer.zero_grad()
            group.barrier().wait()
            loss.backward()
            optimizer.step()
        bucket, _ = bucket_of(model.conv1.weight)
        return len(bucket.shared.local)

    assert run_ranks(2, body, backend=backend) == [1, 1]


class Stacked(nn.Module):
    """Autograd computes all gradients as views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.ones(4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack([*self.rows]).T


def test_gradients_in_one_memory_of_autograd_are_not_taken_for_kept() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(Stacked(), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(3):
            model(torch.ones(2, 4) * (rank + 1)).sum().backward()
            assert all(is_pending(model))
            optimizer.step()
            optimizer.zero_grad()

    run_ranks(2, body)
