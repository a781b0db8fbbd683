"""What a communication hook is given, when it is called, and what becomes of what it returns.

Hooks have no annotations here: torch's wrapper, which is given them too, reads them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    default_hooks,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.nn import parallel
from tests.nn.hooked import FEATURES, SEVERAL_BUCKETS_MB, OurDDP, hooked_net
from tests.nn.parallel import parts
from tests.ranks import run_ranks
from tests.same import gradients_of

Future = torch.futures.Future


def batches(world_size: int) -> torch.Tensor:
    """The same data every time, a part for each rank."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(world_size, 4, FEATURES, dtype=torch.float64, generator=generator)


def wrapped(group: dist.ProcessGroup, hook: Callable[..., Any] | None = None) -> nn.Module:
    """A model in several buckets, with ``hook``, whose state is the group."""
    model = OurDDP(hooked_net(), process_group=group, bucket_cap_mb=SEVERAL_BUCKETS_MB)
    if hook is not None:
        model.register_comm_hook(group, hook)
    return model


def done(tensor: Any) -> Future:
    future: Future = Future()
    future.set_result(tensor)
    return future


def test_a_hook_that_comes_between_steps_is_called_from_then_on() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, calls = wrapped(group), []

        def note(_, bucket):
            calls.append(bucket.index())
            return default_hooks.allreduce_hook(group, bucket)

        for step in range(4):
            if step == 2:
                model.register_comm_hook(None, note)
            model.zero_grad()
            model(batches(2)[rank]).sum().backward()
            if not step:
                expected = gradients_of(model)
            assert bool(calls) == (step >= 2)
            for gradient, its in zip(gradients_of(model), expected, strict=True):
                torch.testing.assert_close(gradient, its)

    run_ranks(2, body)


def test_a_hook_is_called_for_each_bucket_once_in_index_order() -> None:
    steps, state = 4, object()

    def body(rank: int, group: dist.ProcessGroup) -> list[tuple[int, bool, tuple[str, ...]]]:
        model = OurDDP(hooked_net(), process_group=group, bucket_cap_mb=SEVERAL_BUCKETS_MB)
        names = {id(p): name for name, p in model.named_parameters()}
        calls = []

        def note(given, bucket):
            assert given is state
            inside = tuple(names[id(p)] for p in bucket.parameters())
            calls.append((bucket.index(), bucket.is_last(), inside))
            return default_hooks.allreduce_hook(group, bucket)

        model.register_comm_hook(state, note)
        for step in range(steps):
            model(batches(2)[rank]).sum().backward()
            assert [index for index, _, _ in calls] == list(range(len(calls)))
            assert len(calls) > 2
            assert [is_last for _, is_last, _ in calls] == [False] * (len(calls) - 1) + [True]
            inside = [name for _, _, some in calls for name in some]
            assert sorted(inside) == sorted(names.values())
            if step < steps - 1:
                calls.clear()
        return calls

    first, second = run_ranks(2, body)
    assert first == second


def test_a_bucket_has_this_ranks_gradients_undivided() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        alone = hooked_net()
        alone(batches(2)[rank]).sum().backward()
        local = {name: p.grad for name, p in alone.named_parameters()}
        seen = set()

        def look(_, bucket):
            buffer, tensors, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
            assert buffer.dim() == 1
            assert buffer.numel() == sum(p.numel() for p in parameters)
            assert len(tensors) == len(parameters)
            for tensor, parameter in zip(tensors, parameters, strict=True):
                name = names[id(parameter)]
                assert tensor.shape == parameter.shape
                assert torch.equal(tensor, local[name])
                seen.add(name)
            for place, tensor in enumerate(tensors):
                tensor.fill_(place)
            together = torch.cat([torch.full((p.numel(),), i) for i, p in enumerate(parameters)])
            assert torch.equal(buffer, together.double())
            return done(buffer)

        model = wrapped(group, look)
        names = {id(p): name for name, p in model.module.named_parameters()}
        for _ in range(3):
            model.zero_grad()
            model(batches(2)[rank]).sum().backward()
        assert seen == set(local)

    run_ranks(2, body)


def test_what_the_future_holds_is_the_gradient() -> None:
    def new_values(group, bucket):
        return done(torch.full_like(bucket.buffer(), 10 * group.rank() + bucket.index()))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, new_values)
        for _ in range(2):
            model(batches(2)[rank]).sum().backward()
        values = {value for gradient in gradients_of(model) for value in gradient.unique().tolist()}
        assert values == {10.0 * rank + index for index in range(len(values))}
        assert len(values) > 2

    run_ranks(2, body)


@pytest.mark.parametrize("wrap", [OurDDP, TorchDDP], ids=["ours", "torch's"])
def test_a_buffer_that_was_set_is_the_buckets_from_then_on(wrap: type[nn.Module]) -> None:
    def halve(_, bucket):
        original = bucket.buffer()
        bucket.set_buffer(original.to(torch.float16))
        assert bucket.buffer().dtype is torch.float16
        for tensor, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert tensor.shape == parameter.shape
            tensor.fill_(3)  # in the buffer that is there now
        assert bucket.buffer().eq(3).all()
        return done(original.fill_(0).copy_(bucket.buffer()))

    def body(world: lockstep.World) -> None:
        model = wrap(hooked_net())
        model.register_comm_hook(None, halve)
        model(batches(2)[world.rank]).sum().backward()
        assert all(gradient.eq(3).all() for gradient in gradients_of(model))

    lockstep.launch(body, 2, ranks="threads")


def test_a_buffer_of_another_size_is_refused() -> None:
    def cut(_, bucket):
        bucket.set_buffer(bucket.buffer()[1:])
        return done(bucket.buffer())

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, cut)
        with pytest.raises(ValueError, match=r"set_buffer\(\) was given \d+ elements"):
            model(batches(2)[rank]).sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("adds", [1, 30])
def test_a_hook_may_resize_its_buffer_meanwhile(adds: int) -> None:
    """As batched PowerSGD does, to have a square."""

    def padded(group, bucket):
        buffer = bucket.buffer()
        numel = buffer.numel()
        buffer.resize_(numel + adds)
        buffer[numel:].fill_(0)
        buffer.div_(group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0].resize_(numel))

    check_branches(padded)


def check_branches(hook: Callable[..., Any]) -> None:
    """Different parameters on each rank and in each step, compared with torch's wrapper."""
    steps = [(0, 1), (2, None), (None, None), (1, 1), (0, 2)]

    def body(world: lockstep.World) -> list[list[torch.Tensor | None]]:
        seen = []
        for wrap in (OurDDP, TorchDDP):
            model = wrap(parallel.net(), find_unused_parameters=True, bucket_cap_mb=0.0003)
            model.register_comm_hook(dist.group.WORLD, hook)
            for step in steps:
                model.zero_grad()
                model(parts(2)[world.rank], step[world.rank]).square().sum().backward()
                seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        half = len(seen) // 2
        for ours, theirs in zip(seen[:half], seen[half:], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        return seen

    with warnings.catch_warnings():
        # torch says so where every parameter was used after all.
        warnings.simplefilter("ignore", UserWarning)
        first, _ = lockstep.launch(body, 2, ranks="threads")
    assert any(gradient is None for gradient in first)


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
def test_parameters_that_some_ranks_or_none_use(name: str) -> None:
    check_branches(getattr(default_hooks, name))


class Refused(Exception):
    """What a hook of these tests raises."""


@pytest.mark.parametrize("where", [0, 1, "last"])
def test_a_hook_that_raises_ends_this_backward_alone(where: int | str) -> None:
    should_raise = False

    def sometimes(group, bucket):
        if should_raise and where == ("last" if bucket.is_last() else bucket.index()):
            raise Refused("by the hook")
        return default_hooks.allreduce_hook(group, bucket)

    expected = run_ranks(2, lambda rank, group: three_steps(rank, wrapped(group)))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        nonlocal should_raise
        model = wrapped(group, sometimes)
        torch.testing.assert_close(three_steps(rank, model), expected[rank], rtol=0, atol=1e-12)
        group.barrier().wait()
        should_raise = True
        with pytest.raises(Refused, match="by the hook"):
            model(batches(2)[rank]).sum().backward()
        group.barrier().wait()
        should_raise = False
        torch.testing.assert_close(three_steps(rank, model), expected[rank], rtol=0, atol=1e-12)

    run_ranks(2, body)


def three_steps(rank: int, model: nn.Module) -> list[torch.Tensor]:
    for _ in range(3):
        model.zero_grad()
        model(batches(2)[rank]).sum().backward()
    return gradients_of(model)


def test_a_future_that_fails_is_told_of_with_what_it_says() -> None:
    should_fail = False

    def fails(group, bucket):
        def callback(future: Future) -> torch.Tensor:
            if should_fail:
                raise Refused("in a callback")
            return future.value()

        return default_hooks.allreduce_hook(group, bucket).then(callback)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        nonlocal should_fail
        model = wrapped(group, fails)
        before = three_steps(rank, model)
        group.barrier().wait()
        should_fail = True
        with pytest.raises(RuntimeError, match="Refused: in a callback"):
            model(batches(2)[rank]).sum().backward()
        group.barrier().wait()
        should_fail = False
        assert all(map(torch.equal, before, three_steps(rank, model)))

    run_ranks(2, body)


def nothing(_, bucket):
    bucket.buffer().fill_(1)


@pytest.mark.parametrize(
    ("hook", "error", "says"),
    [
        (nothing, TypeError, r"hook nothing returned a NoneType, but must\s+return a .*Future"),
        (lambda _, bucket: bucket.buffer(), TypeError, "returned a Tensor"),
        (lambda _, bucket: done(None), TypeError, "holds a NoneType, but must hold"),
        (lambda _, bucket: done([bucket.buffer()] * 2), TypeError, "holds a list"),
        (lambda _, bucket: done(bucket.buffer()[1:]), ValueError, "the bucket has 1320"),
        # It would fit each gradient, if it were expanded.
        (lambda _, bucket: done(bucket.buffer()[:1]), ValueError, "holds 1 elements"),
    ],
    ids=["nothing", "a tensor", "none", "two tensors", "too short", "one number"],
)
def test_what_is_no_future_of_the_buffer_is_refused(
    hook: Callable[..., Any], error: type[Exception], says: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, hook)
        with pytest.raises(error, match=says) as caught:
            model(batches(2)[rank]).sum().backward()
        assert isinstance(caught.value, RuntimeError)  # which torch raises

    run_ranks(2, body)


def test_what_cannot_be_called_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(TypeError, match="'fp16', which can't be called"):
            wrapped(group, "fp16")  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_hook_is_refused(world_size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, default_hooks.allreduce_hook)
        with pytest.raises(RuntimeError, match="allreduce_hook is registered already"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with pytest.raises(RuntimeError, match="allreduce_hook is registered already"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        with pytest.raises(RuntimeError, match="allreduce_hook is registered already"):
            register_ddp_comm_hook(DDPCommHookType.NOOP, model)

    run_ranks(world_size, body)


def test_a_hook_is_called_where_a_rank_is_alone() -> None:
    def ten(_, bucket):
        return done(torch.full_like(bucket.buffer(), 10))

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(group, ten)
        model(batches(1)[rank]).sum().backward()
        assert all(gradient.eq(10).all() for gradient in gradients_of(model))

    run_ranks(1, body)


def test_no_sync_calls_no_hook_and_the_next_backward_reduces_the_sum() -> None:
    def body(world: lockstep.World) -> None:
        results = []
        for wrap in (OurDDP, TorchDDP):
            calls = []

            def counted(group, bucket, calls=calls):
                calls.append(bucket.index())
                return default_hooks.fp16_compress_hook(group, bucket)

            model = wrap(hooked_net(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
            model.register_comm_hook(dist.group.WORLD, counted)
            three_steps(world.rank, model)
            model.zero_grad()
            calls.clear()
            for factor in (1, 2):
                with model.no_sync():
                    model(factor * batches(2)[world.rank]).sum().backward()
            assert not calls
            model(3 * batches(2)[world.rank]).sum().backward()
            assert calls == list(range(len(calls)))
            assert len(calls) > 2
            results.append(gradients_of(model))
        ours, theirs = results
        assert all(map(torch.equal, ours, theirs))

    lockstep.launch(body, 2, ranks="threads")
