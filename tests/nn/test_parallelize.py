"""parallelize() and its wrapper: what stays as it was, and what is kept in step."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.models import Refusing, build
from tests.nn.parallel import BOTH, Net, net, parts, wrapped
from tests.ranks import BACKENDS, Backend, run_ranks


@BOTH
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_method_is_synchronised(parallel, world_size: int) -> None:
    model, data = net(), parts(world_size)
    oracle = copy.deepcopy(model)
    oracle.middle(data.flatten(0, 1)).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        mine = parallel(copy.deepcopy(model), group)
        mine.middle(data[rank]).square().mean().backward()
        return [p.grad for p in mine.parameters()]

    for gradients in run_ranks(world_size, body):
        for mine, theirs in zip(gradients, oracle.parameters(), strict=True):
            if theirs.grad is None:
                assert mine is None
            else:
                torch.testing.assert_close(mine, theirs.grad, rtol=1e-10, atol=1e-10)


def test_parallelize_leaves_the_object_as_it_was() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = net()
        keys, attributes = list(model.state_dict()), set(vars(model))
        assert lockstep.parallelize(model, process_group=group) is model
        assert type(model) is Net
        assert list(model.state_dict()) == keys
        assert set(vars(model)) == attributes
        pickle.loads(pickle.dumps(model))

    run_ranks(2, body)


def test_a_deep_copy_is_a_plain_model() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        average = copy.deepcopy(lockstep.parallelize(net(), process_group=group))
        if rank == 0:  # alone: a hook that came along would wait here for rank 1
            average(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            assert average.first.weight.grad is not None

    run_ranks(2, body)


def test_wrapper_passes_attributes_and_prefixes_keys() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = wrapped(net(), group)
        assert model.count == 0
        assert model.branches is model.module.branches
        assert all(key.startswith("module.") for key in model.state_dict())
        with pytest.raises(AttributeError, match="nowhere"):
            model.nowhere  # noqa: B018

    run_ranks(2, body)


@BOTH
def test_everyone_starts_from_rank_0(parallel) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(rank + 1)
        return parallel(model, group).state_dict()

    for state in run_ranks(3, body):
        assert all((tensor == 1).all() for tensor in state.values())


@BOTH
def test_different_branches_on_each_rank_each_step(parallel) -> None:
    data, steps = parts(3), [(0, 1, 1), (2, None, 0), (None, None, None), (1, 2, 0), (0, 0, 0)]
    model = net()

    def expected(step: tuple[int | None, ...]) -> dict[str, torch.Tensor | None]:
        copies = [copy.deepcopy(model) for _ in step]
        for one, branch, x in zip(copies, step, data, strict=True):
            one(x, branch).square().mean().backward()
        return {
            name: None
            if all(one.get_parameter(name).grad is None for one in copies)
            else sum(g for one in copies if (g := one.get_parameter(name).grad) is not None)
            / len(copies)
            for name, _ in model.named_parameters()
        }

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = parallel(copy.deepcopy(model), group, bucket_cap_mb=0.0002)
        bare = getattr(mine, "module", mine)
        for step in steps:
            mine.zero_grad()
            mine(data[rank], step[rank]).square().mean().backward()
            for name, theirs in expected(step).items():
                gradient = bare.get_parameter(name).grad
                assert (gradient is None) == (theirs is None), (name, step)
                if theirs is not None:
                    torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-10)

    run_ranks(3, body)


def test_unused_parameters_are_named_once(caplog) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        for branch in (rank, rank, None):
            model(parts(2)[rank], branch).sum().backward()

    with caplog.at_level("INFO", logger="lockstep"):
        run_ranks(2, body)
    (said,) = [record.getMessage() for record in caplog.records if "No rank used" in record.message]
    assert "branches.2.weight, branches.2.bias" in said
    assert "branches.1" not in said


@pytest.mark.parametrize("backend", ["threads", "shm", "gloo"])
def test_gradient_nobody_touched_keeps_its_bits(backend: str) -> None:
    """Three times a third is not one: what no rank used must not even pass through the sum."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        x = parts(3)[rank]
        for _ in range(2):
            model(x, 0).sum().backward()
        before = {name: p.grad.clone() for name, p in model.branches[0].named_parameters()}
        for _ in range(3):
            model(x, 1).sum().backward()
        for name, gradient in before.items():
            assert torch.equal(model.branches[0].get_parameter(name).grad, gradient)

    run_ranks(3, body, backend=backend)


def test_gradient_only_one_rank_adds_to_grows_by_its_share() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(1, 1, bias=False).double(), process_group=group)
        other = nn.Parameter(torch.ones(1, dtype=torch.float64))
        one = torch.ones(1, 1, dtype=torch.float64)
        model(one).sum().backward()
        assert model.weight.grad.item() == 1
        model.weight.grad.mul_(5)
        holder = nn.ParameterDict({"w": model.weight, "o": other})
        del holder
        ((model(one) * (4 if rank == 1 else 0)).sum()).backward()
        assert model.weight.grad.item() == 5 + 2

    run_ranks(2, body)


@BOTH
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["net", "wide"])
def test_no_sync_adds_up_and_the_next_backward_reduces(
    parallel, set_to_none: bool, name: str
) -> None:
    model = net() if name == "net" else build("wide")
    data = parts(4) if name == "net" else torch.randn(4, 4, 160, dtype=torch.float64)
    oracle = copy.deepcopy(model)
    for x in data:
        (oracle(x).square().mean() / 2).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        mine = parallel(copy.deepcopy(model), group)
        for context in (getattr(mine, "no_sync", None), lambda: lockstep.no_sync(mine)):
            if context is None:
                continue
            mine.zero_grad(set_to_none=set_to_none)
            with context():
                mine(data[rank]).square().mean().backward()
                local = next(mine.parameters()).grad.clone()
            others = [torch.empty_like(local) for _ in range(2)]
            group.allgather([others], [local]).wait()
            assert not torch.equal(*others)
            mine(data[rank + 2]).square().mean().backward()
            for gradient, theirs in zip(mine.parameters(), oracle.parameters(), strict=True):
                if theirs.grad is not None:
                    torch.testing.assert_close(gradient.grad, theirs.grad, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_no_sync_inside_of_no_sync() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, alone = lockstep.parallelize(net(), process_group=group), net()
        x = parts(2)[rank]
        with lockstep.no_sync(model):
            with lockstep.no_sync(model):
                pass
            model(x).sum().backward()
        alone(x).sum().backward()
        assert torch.equal(model.first.weight.grad, alone.first.weight.grad)

    run_ranks(2, body)


@pytest.mark.parametrize("change", ["cast and back", "clamp", "assign"])
def test_gradients_changed_behind_their_back_are_reduced_all_the_same(change: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(net(), process_group=group)
        x = parts(2)[rank]
        for step in range(3):
            model(x).square().mean().backward()
            if change == "cast and back":
                model.float().double()
            elif step < 2:
                for p in (*model.first.parameters(), *model.second.parameters()):
                    if change == "clamp":
                        p.grad.data = p.grad.data.clamp(-1, 1)
                    else:
                        p.grad = p.grad.clone()
            if change == "cast and back":
                model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    first, second = run_ranks(2, body)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert first[0].abs().sum() > 0


def test_gradient_dropped_after_no_sync_still_takes_part() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        x = parts(2)[rank]
        model(x, 0).sum().backward()
        with lockstep.no_sync(model):
            model(x, 0).sum().backward()
        model.zero_grad()
        model(x, 0 if rank == 1 else None).sum().backward()  # rank 0 leaves the branch out
        assert torch.equal(model.branches[0].bias.grad, torch.full((3,), 2.0, dtype=torch.float64))

    run_ranks(2, body)


def test_second_backward_of_one_forward_is_reduced_too() -> None:
    model, data = net(), parts(2)
    oracle = copy.deepcopy(model)
    for _ in range(2):
        oracle(data.flatten(0, 1)).square().mean().backward()

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        loss = mine(data[rank]).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return mine.first.weight.grad

    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, oracle.first.weight.grad, rtol=1e-10, atol=1e-10)


def test_gradients_have_the_layout_of_their_parameters() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        model = lockstep.parallelize(conv, process_group=group)
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()

    run_ranks(2, body)


def test_gradients_are_views_of_few_buffers() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        model(torch.ones(2, 4, dtype=torch.float64), 0).sum().backward()
        used = [p.grad for p in model.parameters() if p.grad is not None]
        assert len({g.untyped_storage().data_ptr() for g in used}) == 1 < len(used)

    run_ranks(2, body)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_begin_where_those_of_one_process_may_begin(
    dtype: torch.dtype, backend: Backend
) -> None:
    """On some processors the bits of a dot product depend on where numbers begin."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        sizes = [3, 33, 0, 1, 300, 7]
        model = nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)
        lockstep.parallelize(model, process_group=group)
        for step in range(1, 4):
            sum((p * (step + rank)).sum() for p in model).backward()
            gradients = [p.grad for p in model]
            assert all(gradient.data_ptr() % 64 == 0 for gradient in gradients)
            (memory,) = {g.untyped_storage().data_ptr(): g for g in gradients}.values()
            whole = torch.empty(0, dtype=dtype).set_(memory.untyped_storage())
            # The padding is as it was: here are gradients, and what ranks told each other.
            assert whole.count_nonzero() <= sum(sizes) + len(sizes)
            model.zero_grad()

    run_ranks(2, body, backend=backend)


def test_a_failed_backward_does_not_spoil_the_next() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group, bucket_cap_mb=0.0001)
        x = parts(2)[rank]
        model(x).sum().backward()
        expected = model.second.bias.grad.clone()
        model.zero_grad()
        with pytest.raises(ArithmeticError):
            model.second(Refusing.apply(model.middle(x))).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        assert torch.equal(model.second.bias.grad, expected)

    run_ranks(2, body)


def test_what_a_failed_backward_leaves_is_reduced_with_the_next() -> None:
    """As it is added to in one process, unless somebody drops it."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, data = lockstep.parallelize(net(), process_group=group), parts(2)
        for _ in range(3):
            model.zero_grad()
            model(data[rank], branch=0).sum().backward()
        model.zero_grad()
        with pytest.raises(ArithmeticError):
            model.second(Refusing.apply(model.middle(data[rank]))).square().sum().backward()
        model.middle(data[rank]).sum().backward()
        oracle = net()
        for x in data:
            (oracle.second(oracle.middle(x).detach()).square().sum() / 2).backward()
            (oracle.middle(x).sum() / 2).backward()
        for mine, its in zip(model.parameters(), oracle.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None)
            assert mine.grad is None or torch.allclose(mine.grad, its.grad, rtol=0, atol=1e-12)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_double_backward_leaves_gradients_without_history() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(net(), process_group=group)
        model(parts(2)[rank]).square().sum().backward(create_graph=True)
        assert not model.first.weight.grad.requires_grad

    run_ranks(2, body)


@BOTH
def test_engine_goes_with_its_module(parallel) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = parallel(net(), group)
        parameter = weakref.ref(model.first.weight)
        model(parts(2)[rank]).sum().backward()
        del model
        gc.collect()
        assert parameter() is None

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["net", "wide"])
def test_hooks_of_others_may_change_the_mean(name: str) -> None:
    """As they change the gradient in one process, of small gradients and of large ones."""
    model = net() if name == "net" else build("wide")
    x = parts(2) if name == "net" else torch.randn(2, 4, 160, dtype=torch.float64)

    def body(rank: int, group: dist.ProcessGroup) -> list:
        mine = lockstep.parallelize(copy.deepcopy(model), process_group=group)
        first = next(mine.parameters())

        def clamp(parameter: torch.Tensor) -> None:
            parameter.grad = parameter.grad.clamp(-0.01, 0.01)

        first.register_post_accumulate_grad_hook(clamp)
        after = []
        for _ in range(3):
            mine.zero_grad()
            mine(x[rank]).square().sum().backward()
            after.append(first.grad.clone())
        return after

    sum(model(part).square().sum() / 2 for part in x).backward()
    expected = next(model.parameters()).grad.clamp(-0.01, 0.01)
    for after in run_ranks(2, body):
        for gradient in after:
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_a_failed_backward_inside_of_a_checkpoint_does_not_spoil_the_next() -> None:
    """Its graph lives on, as in a notebook, and with it what was to be called at its end."""

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = lockstep.parallelize(net(), process_group=group)
        x = parts(2)[rank].requires_grad_()

        def loss_of(fails: bool) -> torch.Tensor:
            def block(x: torch.Tensor) -> torch.Tensor:
                return model.second(Refusing.apply(model.middle(x)) if fails else model.middle(x))

            inside = checkpoint(block, x, use_reentrant=True, preserve_rng_state=False)
            return inside.square().sum()

        loss_of(False).backward()
        kept = loss_of(True)
        with pytest.raises(ArithmeticError):
            kept.backward()
        model.zero_grad()
        loss_of(False).backward()
        return model.first.weight.grad

    assert torch.equal(*run_ranks(2, body))
