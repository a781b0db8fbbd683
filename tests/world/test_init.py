"""init() in this process: alone, in a group that exists, and where a store isn't there."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import errors
from lockstep.world import Placement, Starter, agreement
from lockstep.world import world as world_module
from lockstep.world.world import RankContext, _place_on_host
from tests.launcher.bench import free_port
from tests.processes import Processes, processes

pytestmark = pytest.mark.usefixtures("what_torch_opens_for_good", "a_fresh_process")

SOON = timedelta(seconds=1)
LATER = timedelta(seconds=60)


@pytest.fixture(scope="module")
def two_processes() -> Iterator[Processes]:
    with processes(2) as both:
        yield both


def torch_variables(monkeypatch, rank: int, world_size: int, port: int) -> None:
    values = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_alone_there_is_no_process_group() -> None:
    world = lockstep.init()
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert world.process_group is None
    assert not dist.is_initialized()
    with pytest.raises(AttributeError):
        world.rank = 1


def test_alone_every_call_still_works() -> None:
    model = lockstep.parallelize(torch.nn.Linear(2, 1))
    with lockstep.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    lockstep.average_gradients(model)
    other = lockstep.DistributedDataParallel(torch.nn.Linear(2, 1))
    with other.no_sync():
        other(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == other.module.weight.grad.tolist() == [[1.0, 1.0]]


def test_init_twice_is_the_same_world() -> None:
    assert lockstep.init() is lockstep.init(device="cpu") is lockstep.init(backend="gloo")


def test_another_device_the_second_time_is_refused() -> None:
    lockstep.init(device="cpu")
    with pytest.raises(errors.ContradictoryInit, match="already computes on cpu"):
        lockstep.init(device="cuda")


def test_one_rank_of_torchrun_has_a_group(monkeypatch) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())
    world = lockstep.init()
    assert world.starter is Starter.TORCHRUN
    assert world.process_group is dist.group.WORLD
    assert dist.get_backend() == "shm"
    assert (world.local_rank, world.local_world_size) == (0, 1)


def test_another_backend_the_second_time_is_refused(monkeypatch) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())
    assert lockstep.init(backend="gloo") is lockstep.init(backend="cpu:gloo,cuda:gloo")
    with pytest.raises(errors.ContradictoryInit, match="already uses 'cpu:gloo,cuda:gloo'"):
        lockstep.init(backend="mpi")


def test_a_group_that_exists_is_used() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = lockstep.init()
    assert world.starter is Starter.PROCESS_GROUP
    assert world.process_group is dist.group.WORLD
    assert (world.local_rank, world.local_world_size) == (0, 1)


@pytest.mark.parametrize("group", [0, False, (), "", "gloo", dist.GroupMember.NON_GROUP_MEMBER])
def test_what_is_no_group_is_not_taken_for_all_ranks(group: object) -> None:
    model = torch.nn.Linear(2, 1)
    calls: list[Callable[[], object]] = [
        lambda: lockstep.parallelize(model, process_group=group),
        lambda: lockstep.DistributedDataParallel(model, process_group=group),
        lambda: lockstep.mean(torch.ones(2), process_group=group),
        lambda: lockstep.average_gradients(model, process_group=group),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="process_group is "):
            call()


def init_with(told: list[dict[str, str]]) -> tuple[int, int, int]:
    """What init() makes of the group that is there, with variables of each rank's own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told[dist.get_rank()].items():
            patch.setenv(name, value)
        world = lockstep.init(timeout=LATER)
    return world.rank, world.local_rank, world.local_world_size


def variables(rank: object, world_size: object = 2, **more: object) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "x", "MASTER_PORT": 1, **more}
    return {name: str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ("told", "local"),
    [
        # As accelerate.debug_launcher leaves it: by their environment, both are rank 0.
        ([variables(0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=2)] * 2, [(0, 2), (1, 2)]),
        ([variables(0, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1), {}], [(0, 2), (1, 2)]),
        ([{}, variables(1, "many")], [(0, 2), (1, 2)]),
        # As torchrun on two hosts whose names are one.
        ([variables(rank, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1) for rank in (0, 1)], [(0, 1), (0, 1)]),
    ],
)
def test_all_ranks_of_a_group_that_exists_go_by_the_same_facts(
    two_processes: Processes, told: list[dict[str, str]], local: list[tuple[int, int]]
) -> None:
    found = two_processes.run(init_with, "gloo", 2, told)
    assert found == [(rank, *place) for rank, place in enumerate(local)]


def init_in_a_network_of_its_own() -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        network = f"that of rank {dist.get_rank()}"
        patch.setattr("lockstep.world.reach.this_kernel", lambda namespace: network)
        world = lockstep.init(timeout=LATER)
    return world.local_rank, world.local_world_size


def test_hosts_of_one_name_are_different_hosts(two_processes: Processes) -> None:
    """As machines that were cloned, and containers."""
    assert two_processes.run(init_in_a_network_of_its_own, "gloo", 2) == [(0, 1), (0, 1)]


def test_local_ranks_are_told_by_the_hosts() -> None:
    place = Placement(Starter.TORCHRUN, 3, 5, None, None)
    assert _place_on_host(place, ["a", "b", "a", "b", "b"]) == (1, 3)
    told = Placement(Starter.TORCHRUN, 3, 5, 7, 8)
    assert _place_on_host(told, ["a", "b", "a", "b", "b"]) == (7, 8)


def test_two_groups_never_share_a_prefix_in_a_store() -> None:
    context = RankContext()
    assert len({context.new_prefix() for _ in range(3)}) == 3


def test_gloo_stays_on_loopback_when_all_ranks_are_on_one_host(monkeypatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    torch_variables(monkeypatch, 0, 1, free_port())
    lockstep.init()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"backend": "bogus"}, errors.BackendUnavailable, "'bogus'"),
        ({"device": "cuda:77"}, errors.BackendUnavailable, "use no accelerator here"),
        ({"timeout": 5}, TypeError, "timedelta"),
        ({"timeout": timedelta(0)}, ValueError, "more than 0 seconds"),
        ({"timeout": -SOON}, ValueError, "more than 0 seconds"),
    ],
)
def test_what_cannot_be_asked_for_leaves_no_world(options: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        lockstep.init(**options)
    assert lockstep.init(device="cpu").device.type == "cpu"


def test_a_new_group_makes_a_new_world(monkeypatch) -> None:
    port = free_port()
    torch_variables(monkeypatch, 0, 1, port)
    first = lockstep.init()
    dist.destroy_process_group()
    second = lockstep.init()
    assert second is not first
    assert second.process_group is dist.group.WORLD
    dist.all_reduce(torch.ones(1))


def test_store_on_loopback_listens_nowhere_else(monkeypatch) -> None:
    port = free_port()
    torch_variables(monkeypatch, 0, 1, port)
    lockstep.init()
    listening = [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    assert port in {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def test_a_store_that_is_not_there_is_named(monkeypatch) -> None:
    port = free_port()
    torch_variables(monkeypatch, 1, 2, port)
    began = time.monotonic()
    with pytest.raises(errors.RendezvousFailed, match=f"127.0.0.1:{port} within 1 s"):
        lockstep.init(timeout=SOON)
    assert time.monotonic() - began < 100  # by default it is ten minutes


def test_a_host_that_is_not_there_is_named(monkeypatch) -> None:
    torch_variables(monkeypatch, 1, 2, 29500)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(errors.RendezvousFailed, match=r"no-such-host\.invalid:29500 within 1 s"):
        lockstep.init(timeout=SOON)


def test_a_port_that_is_taken_is_named(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        torch_variables(monkeypatch, 0, 1, other.getsockname()[1])
        with pytest.raises(errors.RendezvousFailed, match=f"127.0.0.1:{other.getsockname()[1]}"):
            lockstep.init(timeout=SOON)


def test_ranks_that_do_not_come_are_named(monkeypatch) -> None:
    torch_variables(monkeypatch, 0, 3, free_port())
    with pytest.raises(errors.RendezvousFailed, match="did not see rank 1, 2"):
        lockstep.init(timeout=SOON)


def test_an_explicit_backend_that_fails_is_an_error(monkeypatch) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())
    with pytest.raises(errors.BackendUnavailable, match="cuda:nccl' can't be used on rank 0"):
        lockstep.init(backend="cpu:gloo,cuda:nccl", timeout=LATER)
    assert lockstep.init().process_group is not None  # and nothing of it is left


def test_interfaces_that_nccl_does_not_have_are_told_of_before_ranks_connect(monkeypatch) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=nope")
    monkeypatch.setattr(agreement, "uses_nccl", lambda *_: True)
    with pytest.raises(errors.BackendUnavailable, match=r"On rank 0: NCCL_SOCKET_IFNAME=.*has lo"):
        lockstep.init()


@pytest.mark.skipif(dist.is_nccl_available(), reason="needs a torch whose NCCL fails")
def test_without_nccl_it_says_why_and_goes_on_with_gloo(monkeypatch, caplog) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())
    monkeypatch.setattr(world_module, "choose_backend", lambda _: "cpu:gloo,cuda:nccl")
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        world = lockstep.init()
    (record,) = caplog.records
    assert record.getMessage().startswith("cpu:gloo,cuda:nccl can't be used, going on with Gloo.")
    assert "on rank 0" in caplog.text
    assert dist.get_backend() == "gloo"
    assert world.process_group is dist.group.WORLD


def test_without_shared_memory_it_says_why_and_goes_on_with_gloo(monkeypatch, caplog) -> None:
    torch_variables(monkeypatch, 0, 1, free_port())

    def refuse(*_: object) -> int:
        raise OSError("not permitted here")

    monkeypatch.setattr("os.memfd_create", refuse)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        lockstep.init()
    (record,) = caplog.records
    assert record.getMessage().startswith("shm can't be used, going on with Gloo.")
    assert "not permitted here" in caplog.text
    assert dist.get_backend() == "gloo"
