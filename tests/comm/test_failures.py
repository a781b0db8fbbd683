"""What is said of ranks that are gone, or don't come, over a group that doesn't say it itself."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.comm import TensorBroadcast, all_gather, any_rank, have_same, start_all_reduce
from lockstep.comm import backends as backends_module
from lockstep.comm.failures import _blame, _exchange_notes, _Note
from lockstep.comm.shm import connect as connect_module
from lockstep.comm.shm.transport import ShmTransport
from lockstep.errors import CollectiveFailed, CollectiveTimeout, PeerLost, RendezvousFailed
from tests.ranks import run_ranks
from tests.waiting import until

CPU = torch.device("cpu")


def _backward(group: dist.ProcessGroup) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
    lockstep.average_gradients(model, process_group=group)


CALLS: dict[str, tuple[str, Callable[[dist.ProcessGroup], object]]] = {
    "any_rank": ("all_reduce", lambda group: any_rank(group, [True])),
    "have_same": ("all_reduce", lambda group: have_same(group, b"the same", CPU)),
    "all_gather": ("all_gather", lambda group: all_gather(group, torch.ones(3))),
    "broadcast": ("broadcast", lambda group: TensorBroadcast(group, [torch.ones(3)]).finish()),
    "all_reduce": ("all_reduce", lambda group: start_all_reduce(group, torch.ones(3)).wait()),
    "mean": ("all_reduce", lambda g: lockstep.mean(torch.ones(3), process_group=g)),
    "average_gradients": ("all_reduce", _backward),
    "parallelize": ("all_reduce", lambda g: lockstep.parallelize(nn.Linear(2, 1), process_group=g)),
    "SyncBatchNorm": (
        "all_gather",
        lambda group: lockstep.SyncBatchNorm(2, process_group=group)(torch.ones(4, 2)),
    ),
}


def again_and_again(call: Callable[[dist.ProcessGroup], object], group: dist.ProcessGroup) -> None:
    """Until it raises: a broadcast may be over before for the one that sends."""
    while True:
        call(group)


@pytest.mark.parametrize("call", CALLS)
def test_a_lost_rank_is_named_over_gloo(call: str) -> None:
    operation, make = CALLS[call]

    def fail(group: dist.ProcessGroup) -> None:
        with pytest.raises(PeerLost, match="Rank 1 is gone; rank") as raised:
            again_and_again(make, group)
        # Also on the one that goes on waiting until another one has gone because of this.
        assert (raised.value.ranks, raised.value.operation) == ((1,), operation)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        make(group)
        if rank == 1:
            return  # with the group its connections end, as with a process
        fail(group)
        gc.collect()  # the error's traceback has the group, whose connections are to end

    run_ranks(3, body, backend="gloo")


def test_a_gradient_that_cannot_be_reduced_names_the_lost_rank_and_the_parameters() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(2, 1), process_group=group)
        for _ in range(2):  # after the first it asks for an order of the gradients
            model(torch.ones(1, 2)).sum().backward()
        if rank == 1:
            return
        with pytest.raises(PeerLost) as raised:
            model(torch.ones(1, 2)).sum().backward()
        assert raised.value.ranks == (1,)
        assert "gradients of 'bias' to 'weight'" in raised.value.__notes__[0]

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize("backend", ["gloo", "threads"])
def test_a_lost_rank_is_named_where_a_hook_reduces(backend: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        model(torch.ones(1, 2)).sum().backward()
        if rank == 1:
            return
        with pytest.raises(PeerLost) as raised:
            model(torch.ones(1, 2)).sum().backward()
        assert raised.value.ranks == (1,)

    run_ranks(2, body, backend=backend)  # type: ignore[arg-type]


def test_a_rank_that_does_not_come_is_named_over_gloo() -> None:
    over = threading.Barrier(3)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        if rank != 1:
            with pytest.raises(CollectiveTimeout, match="Rank 1 did not come") as raised:
                any_rank(group, [True])
            assert (raised.value.ranks, raised.value.operation) == ((1,), "all_reduce")
        over.wait(20)

    run_ranks(3, body, backend="gloo", group_timeout_seconds=3)


def test_what_nobody_is_to_blame_for_is_said_to_have_failed() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(CollectiveFailed, match="could not carry out all_reduce"):
            start_all_reduce(group, torch.ones(3, dtype=torch.int16)).wait()

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize(
    ("mine", "others", "gone", "late"),
    [
        # One was killed; a second went because of that, and said so.
        (_Note(False, [1, 2]), {2: _Note(False, [1])}, [1], None),
        # Nothing is known but what another one says.
        (_Note(True, []), {2: _Note(False, [1])}, [1], None),
        # All were waiting for one.
        (_Note(True, []), {2: _Note(True, []), 3: _Note(True, [])}, [], [1]),
        # The connection to 2 has ended because 2 waited no more for 1.
        (_Note(False, [2]), {2: _Note(True, []), 3: _Note(True, [])}, [], [1]),
        # Connections to several have ended, and of one it is not known why.
        (_Note(False, [1, 2, 3]), {2: _Note(False, [1]), 3: _Note(False, [])}, [1], None),
        # Rank 2 waited no more for 1 either, and is slow to say so.
        (_Note(True, [2]), {3: _Note(True, [2])}, [], [1]),
        # Nobody is left who might not have come.
        (_Note(True, [2]), {1: _Note(True, []), 3: _Note(True, [])}, [2], None),
        # All failed alike.
        (_Note(False, []), {r: _Note(False, []) for r in (1, 2, 3)}, [], None),
        # The store is gone.
        (_Note(False, [1]), {}, [1], None),
    ],
)
def test_who_is_to_blame(
    mine: _Note, others: dict[int, _Note], gone: list[int], late: list[int] | None
) -> None:
    assert _blame(range(4), 0, mine, others) == (gone, late)


class StoppedStore:
    """As one whose keeper is stopped before this request is made for the first time."""

    def __init__(self, request: str) -> None:
        self._store, self._request = dist.HashStore(), request
        self.goes_on = threading.Event()
        self.patience = 60.0  # after which this process ends the connection

    def __getattr__(self, name: str) -> Any:
        if name != self._request:
            return getattr(self._store, name)

        def request(*_: object) -> None:
            self.goes_on.wait(self.patience)
            raise dist.DistNetworkError("the connection has ended")

        return request


@pytest.mark.parametrize(
    ("patience", "timeout"), [(60.0, 0.2), (0.2, 1800.0)], ids=["timeout", "silence"]
)
@pytest.mark.parametrize("request_", ["set", "check", "get"])
def test_no_request_of_ranks_that_connect_waits_for_a_stopped_store(
    request_: str, patience: float, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether their time is up first, or the connection ends as nothing is heard."""
    monkeypatch.setattr(connect_module, "STORE_SECONDS", 0.1)
    store: Any = StoppedStore(request_)
    store.patience = patience
    with pytest.raises(RendezvousFailed, match=r"Rank 0 of 2 can't join the group: of the store"):
        ShmTransport(store, 0, 2, timeout)
    store.goes_on.set()


def test_a_group_that_is_made_does_not_wait_for_a_stopped_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.comm.failures.STORE_SECONDS", 0.1)
    store: Any = StoppedStore("add")
    options: Any = SimpleNamespace(store=store, group_rank=1, group_size=2)
    with pytest.raises(RendezvousFailed, match=r"Rank 1 of 2 can't join: of the store"):
        backends_module._unused_store(options)
    store.goes_on.set()


def test_rank_whose_time_is_up_as_well_is_not_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection has ended, and it leaves its note late: the machine has much to do."""
    monkeypatch.setattr("lockstep.comm.failures._GRACE_SECONDS", 0.01)
    monkeypatch.setattr("lockstep.comm.failures._NOTE_SECONDS", 5.0)
    monkeypatch.setattr("lockstep.comm.failures._has_ended", lambda group, rank: rank == 1)
    store = dist.HashStore()
    group: Any = SimpleNamespace(size=lambda: 3, rank=lambda: 0, get_group_store=lambda: store)
    notes = dist.PrefixStore("lockstep/failed", store)
    late = threading.Timer(0.2, lambda: notes.set("1", json.dumps(_Note(True, []))))
    late.start()
    mine, found = _Note(True, []), dict[int, _Note]()
    monkeypatch.setattr("lockstep.comm.failures._POLL_SECONDS", 0.01)
    thread = threading.Thread(target=_exchange_notes, args=(group, mine, found))
    thread.start()
    late.join()
    assert until(lambda: 1 in found, 4)
    notes.set("2", json.dumps(_Note(True, [])))  # it needn't be waited for
    thread.join()
    assert _blame(range(3), 0, mine, found) == ([], [])
