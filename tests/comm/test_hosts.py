"""The scheme on two levels, with ranks as threads and hosts as they are told to be."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import SharedMemoryGroup, Signature
from lockstep.comm import hosts as hosts_module
from lockstep.comm.hosts import Network
from lockstep.comm.shm.barrier import Fault
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.comm.ranks_on_hosts import run_hosts

HANDLER = torch.utils.data._utils.signal_handling.__file__

HOSTS = {
    "two and two": [[0, 1], [2, 3]],
    "uneven": [[0, 1, 2], [3]],
    "scattered": [[0, 2], [1, 3]],
    "three": [[0], [1, 2], [3]],
}


@pytest.fixture(params=HOSTS.values(), ids=HOSTS)
def hosts(request: pytest.FixtureRequest) -> Sequence[Sequence[int]]:
    chosen: Sequence[Sequence[int]] = request.param
    return chosen


def values(rank: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("numel", [0, 1, 7, 100_000])
def test_all_reduce_has_the_same_bits_everywhere(
    hosts: Sequence[Sequence[int]], numel: int
) -> None:
    check_bits_of_all_reduce(hosts, numel)


def test_all_reduce_in_many_pieces(
    hosts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "_PIECE_BYTES", 256 * 1024)
    check_bits_of_all_reduce(hosts, 100_001)


@pytest.mark.long
def test_all_reduce_in_pieces_as_large_as_they_are() -> None:
    check_bits_of_all_reduce(HOSTS["uneven"], 9_000_001)


def check_bits_of_all_reduce(hosts: Sequence[Sequence[int]], numel: int) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = values(rank, numel)
        group.allreduce([tensor]).wait()
        return tensor

    results = run_hosts(hosts, body)
    # In rank order within each host, and then in the order of the hosts.
    per_host = [sum(values(rank, numel) for rank in ranks) for ranks in hosts]
    expected = sum(per_host[1:], per_host[0])
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float8_e4m3fn])
def test_all_reduce_of_dtypes_that_the_network_knows_nothing_of(dtype: torch.dtype) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = torch.full((1000,), rank + 1.0).to(dtype)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        group.allreduce([tensor], options).wait()
        return tensor

    for result in run_hosts(HOSTS["two and two"], body):
        assert torch.equal(result.float(), torch.full((1000,), 4.0))


def test_average_divides_by_all_ranks(hosts: Sequence[Sequence[int]]) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = torch.full((5,), float(rank))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        group.allreduce([tensor], options).wait()
        return tensor

    for result in run_hosts(hosts, body):
        assert torch.equal(result, torch.full((5,), 1.5))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 60_000.0), (torch.bfloat16, 1.0078125), (torch.float8_e4m3fn, 400.0)],
)
def test_average_of_narrow_numbers_is_rounded_once(
    hosts: Sequence[Sequence[int]], dtype: torch.dtype, value: float
) -> None:
    whole = torch.full((5,), value).to(dtype)

    def body(rank: int, group: SharedMemoryGroup) -> list[float]:
        tensor = whole.clone()
        group.allreduce([tensor], dist.ReduceOp.AVG).wait()
        return tensor.float().tolist()

    assert run_hosts(hosts, body) == [whole.float().tolist()] * sum(map(len, hosts))


def test_a_lost_store_does_not_hide_who_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> object:
        group.barrier().wait()
        if rank == 0:
            group.shutdown()
            return None

        def gone(*_: object) -> bool:
            raise dist.DistNetworkError("the store is gone")

        for network in filter(None, (group.transport.everyone, group.transport.leaders)):
            network._store = types.SimpleNamespace(check=gone, set=gone)
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            group.allreduce([torch.ones(3)]).wait()
        assert time.monotonic() - began < 15
        return caught.value.ranks

    assert run_hosts([[0, 1], [2, 3]], body, seconds=20) == [None, (0,), (0,), (0,)]


@pytest.mark.parametrize("numel", [7, 100_000])
def test_a_factor_multiplies_each_ranks_values_once(
    hosts: Sequence[Sequence[int]], numel: int
) -> None:
    size, op = sum(map(len, hosts)), dist._make_nccl_premul_sum(0.5)

    def body(rank: int, group: SharedMemoryGroup) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = torch.full((numel,), 2.0**rank)
        group.allreduce([tensor], options).wait()
        assert (tensor == (2.0**size - 1) / 2).all()

    run_hosts(hosts, body)


def test_every_collective_gives_what_one_host_gives(hosts: Sequence[Sequence[int]]) -> None:
    size = sum(map(len, hosts))

    def body(rank: int, group: SharedMemoryGroup) -> None:
        for root in range(size):
            tensor = values(rank, 3, 5)
            group.broadcast(tensor, root).wait()
            assert torch.equal(tensor, values(root, 3, 5))
            tensor = values(rank, 4)
            group.reduce(tensor, root).wait()
            expected = sum(values(r, 4) for r in range(size)) if rank == root else values(rank, 4)
            assert torch.allclose(tensor, expected)  # another association than in rank order
            gathered = [torch.empty(4, dtype=torch.float64) for _ in range(size)]
            group.gather([gathered] if rank == root else [], [values(rank, 4)], _root(root)).wait()
            if rank == root:
                assert all(torch.equal(part, values(r, 4)) for r, part in enumerate(gathered))
            tensor = torch.empty(2, dtype=torch.float64)
            given = [[values(10 * root + r, 2) for r in range(size)]] if rank == root else []
            options = torch._C._distributed_c10d.ScatterOptions()
            options.rootRank = root
            group.scatter([tensor], given, options).wait()
            assert torch.equal(tensor, values(10 * root + rank, 2))
        outputs = [torch.empty(6, dtype=torch.float64) for _ in range(size)]
        group.allgather([outputs], [values(rank, 6)]).wait()
        assert all(torch.equal(part, values(r, 6)) for r, part in enumerate(outputs))
        outputs = [torch.empty(r, dtype=torch.float64) for r in range(size)]
        group.allgather([outputs], [values(rank, rank)]).wait()
        assert all(torch.equal(part, values(r, r)) for r, part in enumerate(outputs))
        output = torch.empty(3, dtype=torch.float64)
        group.reduce_scatter([output], [[values(10 * rank + r, 3) for r in range(size)]]).wait()
        expected = values(rank, 3)
        for r in range(1, size):
            expected = expected + values(10 * r + rank, 3)
        assert torch.equal(output, expected)
        outputs = [torch.empty(r + rank, dtype=torch.float64) for r in range(size)]
        inputs = [values(10 * rank + r, rank + r) for r in range(size)]
        group.alltoall(outputs, inputs).wait()
        for r, part in enumerate(outputs):
            assert torch.equal(part, values(10 * r + rank, r + rank))
        group.barrier().wait()
        received = torch.empty(3, dtype=torch.float64)
        sending = group.send([values(rank, 3)], (rank + 1) % size, 5)
        group.recv([received], (rank - 1) % size, 5).wait()
        sending.wait()
        assert torch.equal(received, values((rank - 1) % size, 3))

    run_hosts(hosts, body)


def _root(rank: int) -> object:
    options = torch._C._distributed_c10d.GatherOptions()
    options.rootRank = rank
    return options


def test_memory_of_the_group_is_reduced_where_it_is() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> torch.Tensor:
        tensor = group.empty(300_000, dtype=torch.float64)
        tensor.copy_(values(rank, 300_000))
        group.allreduce([tensor]).wait()
        return tensor.clone()

    results = run_hosts(HOSTS["two and two"], body)
    expected = (values(0, 300_000) + values(1, 300_000)) + (values(2, 300_000) + values(3, 300_000))
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("numel", [2, 100_000])
@pytest.mark.parametrize("others", [{1}, {2}, {2, 3}])
def test_mismatch_is_told_to_every_rank_of_every_host(others: set[int], numel: int) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> str:
        tensor = torch.ones(numel + (rank in others))
        with pytest.raises(CollectiveMismatch) as caught:
            group.allreduce([tensor]).wait()
        return str(caught.value)

    for text in run_hosts([[0, 1], [2, 3]], body, seconds=20):
        assert f"({numel},)" in str(text)
        assert f"({numel + 1},)" in str(text)


def test_all_gather_of_large_tensors(hosts: Sequence[Sequence[int]]) -> None:
    size = sum(map(len, hosts))

    def body(rank: int, group: SharedMemoryGroup) -> None:
        outputs = [torch.empty(100, 200, dtype=torch.float64) for _ in range(size)]
        group.allgather([outputs], [values(rank, 100, 200)]).wait()
        for other, output in enumerate(outputs):
            assert torch.equal(output, values(other, 100, 200))

    run_hosts(hosts, body)


@pytest.mark.parametrize("numel", [2, 100_000])
@pytest.mark.parametrize("lost", range(4))
def test_lost_rank_is_named_on_all_hosts(lost: int, numel: int) -> None:
    gone = threading.Event()

    def body(rank: int, group: SharedMemoryGroup) -> tuple[str, tuple[int, ...]] | None:
        if rank == lost:
            group.shutdown()
            gone.set()
            return None
        gone.wait(10)
        with pytest.raises(PeerLost) as caught:
            group.allreduce([torch.ones(numel)]).wait()
        return str(caught.value), caught.value.ranks

    for told in run_hosts([[0, 1], [2, 3]], body, seconds=8):
        if told is not None:
            text, ranks = told
            assert ranks == (lost,), text
            assert f"ank {lost} is gone" in text or f"{lost}]" in text, text


# From one rank to another.


def test_messages_of_any_layout_and_dtype() -> None:
    sent = torch.arange(24.0).view(4, 6).t()[::2]

    def body(rank: int, group: SharedMemoryGroup) -> None:
        message = sent.to(torch.bfloat16) + rank
        works = [group.send([message], peer, 5) for peer in range(4) if peer != rank]
        for peer in range(4):
            if peer != rank:
                came = torch.zeros(4, 3, dtype=torch.bfloat16).t()
                group.recv([came], peer, 5).wait()
                assert torch.equal(came, sent.to(torch.bfloat16) + peer)
        for work in works:
            work.wait()

    run_hosts(HOSTS["two and two"], body)


@pytest.mark.parametrize("sender", [1, 2])
def test_a_message_of_another_dtype_or_size_is_refused(sender: int) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> None:
        if rank == sender:
            group.send([torch.ones(3)], 0, 0).wait()
        elif rank == 0:
            came = torch.empty(3, dtype=torch.complex64)
            with pytest.raises(CollectiveMismatch, match=f"Rank {sender} sent 12 bytes") as caught:
                group.recv([came], sender, 0).wait()
            assert caught.value.ranks == (sender,)

    run_hosts(HOSTS["two and two"], body)


def test_the_sender_of_a_message_from_anyone_is_told() -> None:
    def body(rank: int, group: SharedMemoryGroup) -> None:
        if rank == 3:
            group.send([torch.full((2,), 7.0)], 0, 1).wait()
        elif rank == 0:
            came = torch.empty(2)
            work = group.recv_anysource([came], 1)
            work.wait()
            assert work._source_rank() == 3
            assert came.tolist() == [7, 7]

    run_hosts(HOSTS["two and two"], body)


@pytest.mark.parametrize("sender", [1, 2])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_sender_that_is_gone_is_named(sender: int, is_late: bool) -> None:
    def body(rank: int, group: SharedMemoryGroup) -> None:
        group.barrier().wait()
        if rank == 0:
            time.sleep(0.3 * is_late)  # until Gloo knows already
            with pytest.raises(PeerLost) as caught:
                group.recv([torch.empty(3)], sender, 0).wait()
            assert caught.value.ranks == (sender,)

    run_hosts(HOSTS["two and two"], body)


class SilentStore:
    """As a store behind a cut link: no request ends."""

    def __init__(self) -> None:
        self.num_requests, self.ends = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.num_requests += 1
        self.ends.wait(60)
        raise RuntimeError("the connection has ended")


def test_rank_that_is_late_on_another_host_is_named_by_those_that_wait_for_it_there() -> None:
    """Which time out a moment later, and so does the rank that waits for them."""
    network: Any = Network.__new__(Network)
    network._store = store = dist.HashStore()
    network.ranks, network.rank, network.size = [0, 2], 0, 2
    fault = Fault.of(CollectiveTimeout("Rank 3 didn't come.", [3], "barrier"))
    telling = threading.Timer(0.5, lambda: store.set("fault", fault.encode().decode()))
    telling.start()
    with (
        pytest.raises(CollectiveTimeout, match=r"Rank 3 didn't come"),
        network._naming(Signature("barrier", torch.uint8, ()), 20.0, [0, 1]),
    ):
        raise RuntimeError("Timed out waiting 20000ms for recv operation to complete")
    telling.join()


def test_an_ended_worker_of_a_loader_is_no_lost_rank() -> None:
    """Torch tells of it in a signal's handler, which may run while a rank waits for others."""
    network: Any = Network.__new__(Network)
    handler = compile("raise RuntimeError('DataLoader worker is killed')", HANDLER, "exec")
    with (
        pytest.raises(RuntimeError, match="worker is killed") as caught,
        network._naming(Signature("barrier", torch.uint8, ()), 20.0, [0, 1]),
    ):
        exec(handler)
    assert type(caught.value) is RuntimeError


def test_store_behind_a_cut_link_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts_module, "STORE_SECONDS", 0.2)
    network: Any = Network.__new__(Network)
    network._store = store = SilentStore()
    network.ranks, network.rank, network.size = [0, 2], 0, 2
    began = time.monotonic()
    with (
        pytest.raises(CollectiveTimeout, match=r"Not all of the ranks \[2\]"),
        network._naming(Signature("barrier", torch.uint8, ()), 20.0, [0, 1]),
    ):
        raise RuntimeError("Timed out waiting 20000ms for recv operation to complete")
    network.tell(CollectiveTimeout("too late"))
    assert time.monotonic() - began < 30
    assert store.num_requests == 1
    store.ends.set()
