"""What torch and a user know a group by: its devices, and its ranks' numbers in the whole run."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import timeout_of
from lockstep.errors import CollectiveFailed, PeerLost
from tests.comm.groups import OURS, run_on


@pytest.mark.parametrize("backend", OURS)
def test_a_group_has_devices_from_when_torch_has_registered_it(backend: str) -> None:
    """Torch asks before, and attaches a recorder that needs C++ to a group that has some."""

    def body(group: dist.ProcessGroup) -> None:
        assert group._device_types == []

    run_on(backend, 2, body)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD._device_types == [torch.device("cpu")]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [*OURS, "gloo"])
def test_a_group_tells_how_long_it_waits(backend: str) -> None:
    seconds = timedelta(seconds=7)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=seconds)
    try:
        assert timeout_of(dist.group.WORLD) == seconds
    finally:
        dist.destroy_process_group()


def leaves(group: dist.ProcessGroup) -> None:
    group.shutdown()


def calls_another(group: dist.ProcessGroup) -> None:
    group.barrier().wait()


def sends_another_dtype(group: dist.ProcessGroup) -> None:
    group.send([torch.ones(1, dtype=torch.int64)], 0, 3).wait()


def sends_nothing(group: dist.ProcessGroup) -> None:
    group.set_timeout(timedelta(seconds=20))
    with pytest.raises(PeerLost):  # it stays until the other one has left
        group.recv([torch.empty(1)], 0, 4).wait()


def sums_up(group: dist.ProcessGroup) -> None:
    group.allreduce([torch.ones(5)]).wait()


def receives(group: dist.ProcessGroup) -> None:
    group.recv([torch.empty(1)], 1, 3).wait()


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize(
    ("does", "other_does", "says"),
    [
        (sums_up, leaves, "Rank 7 .*rank 4 waited for it"),
        (sums_up, calls_another, "Rank 4 called all_reduce.*rank 7 called barrier"),
        (receives, leaves, "Rank 7 .*rank 4 waited for it in recv"),
        (receives, sends_another_dtype, "Rank 7 sent 8 bytes of torch.int64 with tag 3"),
        (receives, sends_nothing, "Nothing came to rank 4 .* recv from rank 7 with tag 3"),
    ],
)
def test_errors_name_ranks_of_a_sub_group_by_their_numbers_in_the_run(
    backend: str, does, other_does, says: str
) -> None:
    def body(group: dist.ProcessGroup) -> CollectiveFailed | None:
        try:
            (other_does if group.rank() else does)(group)
        except CollectiveFailed as error:
            return error
        return None

    seconds = 0.5 if other_does is sends_nothing else 20
    error, _ = run_on(backend, 2, body, seconds, members=[4, 7])
    assert isinstance(error, CollectiveFailed)
    assert error.ranks == (7,)
    with pytest.raises(CollectiveFailed, match=f"(?s){says}"):
        raise error
