"""Values that all ranks have alike: any and broadcast, over every kind of group."""

from __future__ import annotations

import argparse
import collections
import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.errors import CollectiveFailed, CollectiveMismatch, CollectiveTimeout, PeerLost
from tests.ranks import BACKENDS, run_ranks

every_group = pytest.mark.parametrize("backend", [*BACKENDS, "shm"])


@every_group
def test_any_is_true_on_all_ranks_if_it_is_on_one(backend: str) -> None:
    flags = [[False, False, False], [False, True, False], [True, True, True]]

    def body(rank: int, group: dist.ProcessGroup) -> list[bool]:
        local = [lockstep.any(each[rank], process_group=group) for each in flags]
        return [*local, lockstep.any(torch.tensor([rank == 2]), process_group=group)]

    assert run_ranks(3, body, backend=backend) == [[False, True, True, True]] * 3


VALUE = {
    "name": "run-1",
    "indices": [3, 1, 2],
    "tensor": torch.arange(6.0).reshape(2, 3).t(),
    "nothing": torch.empty(0, 3, dtype=torch.int8),
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
    "array": numpy.arange(3),
    "pair": (None, b"\0\1"),
    "counts": collections.Counter("aab"),
    3: {"bool": True, "large": 2**70, "inf": float("inf")},
}


@every_group
def test_broadcast_gives_all_ranks_what_one_has(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        got = lockstep.broadcast(VALUE if rank == 1 else rank, 1, process_group=group)
        assert rank != 1 or got is VALUE
        return got

    for got in run_ranks(3, body, backend=backend):
        assert [*got] == [*VALUE]
        for key, value in VALUE.items():
            assert type(got[key]) is type(value)
            if isinstance(value, torch.Tensor | numpy.ndarray):
                assert got[key].dtype == value.dtype
                assert (got[key] == value).all()
            else:
                assert got[key] == value


def test_broadcast_gives_copies_and_keeps_what_is_tied() -> None:
    weight = torch.ones(2, requires_grad=True)

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        return lockstep.broadcast([weight, weight], process_group=group)

    first, other = run_ranks(2, body)
    assert other[0] is other[1]
    assert other[0].data_ptr() != first[0].data_ptr()
    assert not other[0].requires_grad


def test_state_dicts_are_broadcast_without_pickle() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        state = nn.Linear(2, 1).state_dict() if rank == 0 else None
        return lockstep.broadcast(state, process_group=group)

    states = run_ranks(2, body)
    nn.Linear(2, 1).load_state_dict(states[1])
    assert torch.equal(states[0]["weight"], states[1]["weight"])


@every_group
def test_other_objects_are_pickled_only_if_all_ranks_say_so(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"options": argparse.Namespace(lr=0.1), "x": torch.ones(2)}

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        local = options if rank == 0 else None
        kind = (TypeError, CollectiveMismatch)[rank]
        with pytest.raises(kind, match=r"'value\.options' is a Namespace.*allow_pickle=True"):
            lockstep.broadcast(local, process_group=group)
        with pytest.raises(CollectiveMismatch, match="allow_pickle is False on rank 1 and True on"):
            lockstep.broadcast(local, allow_pickle=rank == 0, process_group=group)
        return lockstep.broadcast(local, allow_pickle=True, process_group=group)

    with caplog.at_level(logging.INFO, "lockstep"):
        _, got = run_ranks(2, body, backend=backend)
    assert got["options"] == options["options"]
    (told,) = [each for each in caplog.messages if "unpickles" in each]
    assert "Rank 1 unpickles value.options, a argparse.Namespace of " in told
    assert told.endswith("bytes, from rank 0.")


class Broken:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return int, ("no number",)


def test_what_cannot_be_unpickled_is_named_with_its_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        if rank == 0:
            lockstep.broadcast([Broken()], allow_pickle=True, process_group=group)
            return
        with pytest.raises(ValueError, match="no number") as caught:
            lockstep.broadcast(None, allow_pickle=True, process_group=group)
        (note,) = caught.value.__notes__
        assert "rank 1 unpickles value.0, a tests.test_values.Broken of" in note
        assert "from rank 0" in note

    run_ranks(2, body)


@every_group
def test_ranks_that_ask_for_something_else_are_named(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> bool:
        with pytest.raises(CollectiveMismatch, match="src is 1 on rank 1 and 0 on rank 0") as one:
            lockstep.broadcast(1, min(rank, 1), process_group=group)
        assert one.value.ranks == (1,)
        with pytest.raises((ValueError, CollectiveMismatch), match="a rank from 0 to 2"):
            lockstep.broadcast(1, (0, 3, 0)[rank], process_group=group)
        kind = TypeError if rank == 2 else CollectiveMismatch
        with pytest.raises(kind, match=r"flag is 'no'|rank 2 gave something else"):
            lockstep.any("no" if rank == 2 else True, process_group=group)
        calls = [lockstep.reduce, lockstep.broadcast, lockstep.broadcast]
        with pytest.raises(CollectiveMismatch):
            calls[rank](1, process_group=group)
        return lockstep.any(False, process_group=group)  # the group works on

    assert run_ranks(3, body, backend=backend) == [False] * 3


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_another_call_than_any_is_named(backend: str) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatch, match="any"):
            (lockstep.broadcast, lockstep.any)[rank](True, process_group=group)

    run_ranks(2, body, backend=backend)


@every_group
@pytest.mark.parametrize("call", [lockstep.any, lockstep.broadcast])
def test_a_rank_that_does_not_come_is_named(backend: str, call: Callable[..., object]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        if not rank:
            with pytest.raises((CollectiveTimeout, PeerLost)) as caught:
                call(True, process_group=group)
            assert backend == "gloo" or caught.value.ranks == (1,)

    run_ranks(2, body, group_timeout_seconds=1, backend=backend)


@pytest.mark.parametrize("call", [lockstep.any, lockstep.broadcast])
def test_they_are_refused_in_join(call: Callable[..., object]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(nn.Linear(1, 1), process_group=group)
        with pytest.raises(CollectiveFailed, match="inside of join"), lockstep.join(model):
            call(True, process_group=group)

    run_ranks(2, body)


def test_one_rank_has_its_own_values() -> None:
    value = [object()]
    assert lockstep.broadcast(value, allow_pickle=True) is value
    with pytest.raises(TypeError, match="is a object, which is neither saved nor sent"):
        lockstep.broadcast(value)
    with pytest.raises(ValueError, match="src is 1 "):
        lockstep.broadcast(0, 1)
    assert lockstep.any(True) is True
    assert lockstep.any(torch.tensor(False)) is False
    with pytest.raises(TypeError, match="flag is None"):
        lockstep.any(None)  # type: ignore[arg-type]
