"""What torch builds on process groups, unmodified, over ``"shm"`` between real processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep.errors import GroupClosed
from tests.counts import pairs
from tests.processes import Processes, processes
from tests.training import train

SIZES = (2, 3)
STEPS = 3
FEATURES = 6


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(4) as started:
        yield started


def build() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )
    # Ranks that are threads draw from one generator, which is why each fills in its own numbers.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.double().parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def parts_of(rank: int, size: int) -> list[torch.Tensor]:
    """This rank's parts of batches that are the same whoever takes them."""
    generator = torch.Generator().manual_seed(2)
    shape = (STEPS, 12, FEATURES)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64)
    return [batch.chunk(size)[rank] for batch in whole]


def weights_of_one_process() -> list[torch.Tensor]:
    model = build()
    train(model, torch.optim.Adam(model.parameters(), 0.01), parts_of(0, 1))
    return [parameter.detach() for parameter in model.parameters()]


def assert_same_as_one_process(parameters: list[torch.Tensor]) -> None:
    torch.testing.assert_close(parameters, weights_of_one_process(), rtol=1e-9, atol=1e-12)


# What is compared: each gives a rank's parameters after some steps.


def ours(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    group = group or dist.group.WORLD
    assert group is not None
    model = lockstep.DistributedDataParallel(build(), process_group=group)
    return _trained(model, group)


def ours_by_parallelize(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    group = group or dist.group.WORLD
    assert group is not None
    model = build()
    lockstep.parallelize(model, process_group=group)
    return _trained(model, group)


def torchs(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    group = group or dist.group.WORLD
    assert group is not None
    return _trained(TorchDDP(build(), process_group=group, bucket_cap_mb=1), group)


def fsdp2(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = parts_of(dist.get_rank(), dist.get_world_size())
    train(model, torch.optim.Adam(model.parameters(), 0.01), parts)
    full = []
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        full.append(parameter.full_tensor().detach())
    return full


def zero_redundancy(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    # Its import compiles with torch.jit, which warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = TorchDDP(build())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, overlap_with_ddp=False, lr=0.01
    )
    train(model, optimizer, parts_of(dist.get_rank(), dist.get_world_size()))
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return [parameter.detach() for parameter in model.parameters()]


def _trained(model: nn.Module, group: dist.ProcessGroup) -> list[torch.Tensor]:
    parts = parts_of(group.rank(), group.size())
    train(model, torch.optim.Adam(model.parameters(), 0.01), parts)
    return [parameter.detach() for parameter in model.parameters()]


METHODS = {
    method.__name__: method
    for method in (ours, ours_by_parallelize, torchs, fsdp2, zero_redundancy)
}


def check_training(method: str) -> list[torch.Tensor]:
    parameters = METHODS[method](None)
    assert_same_as_one_process(parameters)
    return parameters


@pairs("method, backend, size", METHODS, ["gloo", "shm"], SIZES)
def test_training_gives_what_one_process_gives(
    ranks: Processes, method: str, backend: str, size: int
) -> None:
    results = ranks.run(check_training, backend, size, method)
    for parameters in results[1:]:
        assert all(map(torch.equal, parameters, results[0]))


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_training_over_threads_gives_what_one_process_gives(method: str, size: int) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        return check_training(method)

    results = lockstep.launch(body, nprocs=size, ranks="threads", output="plain")
    for parameters in results[1:]:
        assert all(map(torch.equal, parameters, results[0]))


def check_torchs_hooks_and_options() -> None:
    group = dist.group.WORLD
    assert group is not None
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
        assert_same_as_one_process(_trained(TorchDDP(build(), **options), group))
    model = TorchDDP(build())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert_same_as_one_process(_trained(model, group))
    model = TorchDDP(build())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _trained(model, group)
    synced = [torch.empty_like(p) for p in model.parameters()]
    for parameter, other in zip(model.parameters(), synced, strict=True):
        other.copy_(parameter.detach())
        dist.broadcast(other, 0)
        assert torch.equal(other, parameter)
    sparse = nn.EmbeddingBag(10, 3, sparse=True)
    model = TorchDDP(sparse)
    model(torch.tensor([[dist.get_rank(), 5]])).sum().backward()
    assert sparse.weight.grad is not None
    gradient = sparse.weight.grad.to_dense()
    expected = torch.zeros(10, 3)
    expected[: dist.get_world_size()] = 0.5 / dist.get_world_size()
    expected[5] += 0.5
    torch.testing.assert_close(gradient, expected)


def test_torchs_ddp_with_its_hooks_and_options(ranks: Processes) -> None:
    ranks.run(check_torchs_hooks_and_options, "shm", 2)


def check_powersgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = TorchDDP(nn.Linear(20, 20))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    # It waits, in a callback, for the future of another call.
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.full((2, 20), 1.0 + dist.get_rank())).sum().backward()
    assert model.module.weight.grad is not None
    torch.testing.assert_close(model.module.weight.grad, torch.full((20, 20), 3.0))


def test_powersgd_runs_over_it(ranks: Processes) -> None:
    ranks.run(check_powersgd, "shm", 2)


def check_torchs_join() -> None:
    rank = dist.get_rank()
    model = TorchDDP(nn.Linear(2, 1, bias=False))
    means = []
    # torch's reducer keeps, in C++ alone, the work of the count of those who are still here.
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            model.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            assert model.module.weight.grad is not None
            means.append(model.module.weight.grad[0, 0].item())
    assert means == [1.5, 1.5, 2.0][: 2 + rank]


def test_torchs_join_divides_by_those_that_are_still_here(ranks: Processes) -> None:
    ranks.run(check_torchs_join, "shm", 2)


def test_torchs_ddp_is_told_of_a_lost_rank() -> None:
    def body(world: lockstep.World) -> None:
        model = TorchDDP(nn.Linear(3, 3))
        for _ in range(2):  # it rebuilds its buckets after the first
            model(torch.ones(2, 3)).sum().backward()
        if world.rank == 1:
            dist.destroy_process_group()
            return
        # torch's reducer reads the outcome in C++.
        with pytest.raises(RuntimeError, match="PeerLost: Rank 1 has left"):
            model(torch.ones(2, 3)).sum().backward()

    lockstep.launch(body, nprocs=2, ranks="threads")


def check_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * 1000 * rank, "tensor": torch.full((3,), float(rank))}
    everyone: list = [None] * size
    dist.all_gather_object(everyone, mine)
    assert [other["rank"] for other in everyone] == list(range(size))
    assert [len(other["text"]) for other in everyone] == [1000 * r for r in range(size)]
    shared = [mine, "a list"] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared[0]["rank"] == 1
    assert shared[1] == "a list"
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert gathered is None or gathered[0]["rank"] == 0
    output: list = [None]
    dist.scatter_object_list(output, list(range(10, 10 + size)) if rank == 0 else None, src=0)
    assert output == [10 + rank]
    if rank == 0:
        dist.send_object_list(["an object", 2], dst=1)
    elif rank == 1:
        received: list = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["an object", 2]


@pytest.mark.parametrize("size", SIZES)
def test_objects_are_gathered_broadcast_and_scattered(ranks: Processes, size: int) -> None:
    ranks.run(check_objects, "shm", size)


def check_functional() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    mine = torch.full((size, 2), float(rank))
    total = float(sum(range(size)))
    assert torch.equal(functional.all_reduce(mine, "sum", group), torch.full((size, 2), total))
    average = functional.all_reduce(mine, "avg", group)
    torch.testing.assert_close(average, torch.full((size, 2), total / size))
    gathered = functional.all_gather_tensor(mine, 0, group)
    assert gathered.view(size, size, 2)[:, 0, 0].tolist() == list(range(size))
    scattered = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    assert torch.equal(scattered, torch.full((1, 2), total))
    exchanged = functional.all_to_all_single(mine, None, None, group)
    assert exchanged[:, 0].tolist() == list(range(size))
    splits = [size - rank] + [0] * (size - 1) if rank == 0 else [0] * size
    splits = [1] * size if sum(splits) != size else splits
    assert functional.broadcast(mine, 1, group)[0, 0] == 1
    several = functional.all_reduce_coalesced([mine, mine[0]], "sum", group)
    assert torch.equal(several[1], torch.full((2,), total))
    several = functional.all_gather_into_tensor_coalesced([mine, mine[:1]], group)
    assert several[1].shape == (size, 2)
    several = functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], group)
    assert torch.equal(several[1], torch.full((1, 2), total))
    leaf = torch.ones(3, requires_grad=True)
    functional.all_reduce(leaf * 2, "sum", group)


@pytest.mark.parametrize("size", SIZES)
def test_functional_collectives(ranks: Processes, size: int) -> None:
    ranks.run(check_functional, "shm", size)


def check_mesh() -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    assert dist.get_backend(mesh.get_group("shard")) == "shm"
    tensor = torch.ones(1) * rank
    dist.all_reduce(tensor, group=mesh.get_group("shard"))
    assert tensor.item() == (1 if rank < 2 else 5)
    dist.all_reduce(tensor, group=mesh.get_group("replicate"))
    assert tensor.item() == 6
    whole = torch.arange(24.0).view(6, 4)
    split = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert split.to_local().shape == (3, 2)
    product = split @ distribute_tensor(whole.T.contiguous(), mesh, [Replicate(), Shard(0)])
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.Adam(model.parameters(), 0.01), parts_of(rank, 4))
    full = [parameter.full_tensor().detach() for parameter in model.parameters()]
    assert_same_as_one_process(full)


def test_a_mesh_of_two_dimensions_and_hybrid_sharding(ranks: Processes) -> None:
    ranks.run(check_mesh, "shm", 4)


def check_subgroups(backend: str) -> None:
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [1, 2], [2, 0])]
    tensor = torch.tensor([float(rank)])
    for i, pair in enumerate(pairs):
        members = ([0, 1], [1, 2], [0, 2])[i]
        if rank in members:
            assert dist.get_backend(pair) == backend
            assert dist.get_process_group_ranks(pair) == members
            total = tensor.clone()
            dist.all_reduce(total, group=pair)
            assert total.item() == sum(members)
            root = tensor.clone()
            dist.broadcast(root, src=members[1], group=pair)
            assert root.item() == members[1]
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]], backend=backend)
    total = tensor.clone()
    dist.all_reduce(total, group=mine)
    assert total.item() == (1 if rank == 1 else 2)
    for pair in pairs:
        if rank in dist.get_process_group_ranks(pair):
            dist.destroy_process_group(pair)


@pytest.mark.parametrize("world", ["gloo", "shm"])
def test_subgroups(ranks: Processes, world: str) -> None:
    ranks.run(check_subgroups, world, 3, "shm")


def check_messages() -> None:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for numel in (3, 1_000_000):
        sent = [torch.full((numel,), 10.0 * rank + i) for i in range(3)]
        received = [torch.empty(numel) for _ in range(3)]
        sends = [dist.P2POp(dist.isend, tensor, other) for tensor in sent]
        receives = [dist.P2POp(dist.irecv, tensor, other) for tensor in received]
        for batch in (sends + receives, receives + sends):
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            for i, tensor in enumerate(received):
                assert tensor.eq(10 * other + i).all()
                tensor.zero_()
    tensor = torch.empty(2)
    if rank == 0:
        dist.send(torch.ones(2), dst=1, tag=3)
        assert dist.recv(tensor) == 1
    else:
        dist.recv(tensor, src=0, tag=3)
        dist.send(tensor, dst=0)


def test_messages_and_batches_of_them(ranks: Processes) -> None:
    ranks.run(check_messages, "shm", 2)


def check_group() -> None:
    assert dist.get_backend() == "shm"
    assert dist.is_initialized()
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    # dist.monitored_barrier refuses every backend but Gloo by its name; the group's own works.
    group.monitored_barrier(timeout=timedelta(seconds=10))
    group.monitored_barrier(wait_all_ranks=True)
    shared = group.empty(3, 4)
    shared.fill_(1)
    dist.all_reduce(shared)
    assert torch.equal(shared, torch.full((3, 4), float(dist.get_world_size())))
    number = group._get_sequence_number_for_group()
    work = dist.all_reduce(shared, async_op=True)
    assert group._get_sequence_number_for_group() == number + 1
    assert work is not None
    assert work.get_future().wait()[0][0, 0] == dist.get_world_size() ** 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_group_of_init_process_group(ranks: Processes, size: int) -> None:
    ranks.run(check_group, "shm", size)


def check_device_config(path: str, rank: int, size: int) -> None:
    for i, config in enumerate(("cpu:shm,cuda:gloo", "cpu:shm")):
        dist.init_process_group(
            config, init_method=f"file://{path}-{i}", rank=rank, world_size=size
        )
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3
        everyone: list = [None] * size
        dist.all_gather_object(everyone, rank)
        assert everyone == list(range(size))
        dist.barrier()
        group = dist.new_group(list(range(size)))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [size**2] * 3
        dist.destroy_process_group()


def test_shm_beside_a_backend_for_another_device(ranks: Processes) -> None:
    ranks.run(check_device_config, "", 2)


def check_again_and_again(path: str, rank: int, size: int) -> None:
    before = None
    for i in range(5):
        dist.init_process_group("shm", init_method=f"file://{path}-{i}", rank=rank, world_size=size)
        tensor = torch.ones(300_000)
        dist.all_reduce(tensor)
        old = dist.group.WORLD
        shared = old.empty(10)
        dist.all_reduce(shared.fill_(1), async_op=True).wait()
        dist.destroy_process_group()
        with pytest.raises(GroupClosed):
            old.allreduce([tensor]).wait()
        assert shared.tolist() == [size] * 10
        del old, shared
        after = (len(os.listdir("/proc/self/fd")), len(threading.enumerate()))
        assert before is None or after == before
        before = after


def test_a_process_may_init_and_destroy_again_and_again(ranks: Processes) -> None:
    ranks.run(check_again_and_again, "", 2)


def check_checkpoint(folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weight": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), "step": 7}
    checkpoint.save(state, checkpoint_id=folder)
    other = {"weight": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
    checkpoint.load(other, checkpoint_id=folder)
    assert torch.equal(other["weight"].full_tensor(), torch.arange(8.0))
    assert other["step"] == 7


def test_a_sharded_checkpoint_is_saved_and_loaded(ranks: Processes, tmp_path: os.PathLike) -> None:
    ranks.run(check_checkpoint, "shm", 2, str(tmp_path))
