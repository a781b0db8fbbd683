"""shard_optimizer(overlap=True): what reads a parameter whose update is on its way."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.comm import has_compiled
from lockstep.errors import PeerLost
from lockstep.optim.arriving import ArrivingParameter
from tests.nn.models import Digits
from tests.optim.late import Late
from tests.optim.programs import adamw, losses, overlapped
from tests.ranks import run_ranks


class Several(list):
    """A list of a class of the program's."""


def pickled(model: nn.Module) -> list[torch.Tensor]:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return [*torch.load(buffer).values()]


READS: dict[str, Callable[[nn.Module], list[torch.Tensor]]] = {
    "arithmetic": lambda model: [p + 0 for p in model.parameters()],
    "arithmetic from the right": lambda model: [0 + p for p in model.parameters()],
    "data": lambda model: [p.data for p in model.parameters()],
    "detach": lambda model: [p.detach() for p in model.parameters()],
    "copies": lambda model: [*copy.deepcopy(model).parameters()],
    "pickles": lambda model: [*pickle.loads(pickle.dumps([*model.parameters()]))],
    "state_dict": lambda model: [*copy.deepcopy(model.state_dict()).values()],
    "torch.save": pickled,
    "numbers": lambda model: [torch.tensor(p.tolist()) for p in model.parameters()],
    "arrays": lambda model: [torch.tensor(p.detach().numpy()) for p in model.parameters()],
    "lists": lambda model: torch._foreach_add([*model.parameters()], 0.0),
    "lists of a class": lambda model: torch._foreach_add(Several(model.parameters()), 0.0),
    "keywords": lambda model: [torch.add(input=p, other=0) for p in model.parameters()],
    "addresses": lambda model: [
        torch.frombuffer(
            (ctypes.c_float * p.numel()).from_address(p.data_ptr()),
            dtype=torch.float32,
        ).view(p.shape)
        for p in model.parameters()
    ],
}


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_a_parameter_waits_for_it(name: str, late: list[Late]) -> None:
    torch.manual_seed(0)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        plain = lockstep.parallelize(copy.deepcopy(first), process_group=group)
        other = adamw(plain.parameters())
        for mine, its in zip(losses(model, rank, 2), losses(plain, rank, 2), strict=True):
            mine.backward()
            its.backward()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
            other.zero_grad()
            assert {*map(type, model.parameters())} == {ArrivingParameter}
            for found, expected in zip(READS[name](model), plain.parameters(), strict=True):
                assert torch.equal(found, expected)

    run_ranks(2, body, backend="gloo")


def test_what_needs_no_values_does_not_wait(late: list[Late]) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        arriving = [each for each in late if each.group is group][-1]
        optimizer.zero_grad()
        model.zero_grad()
        for parameter in model.parameters():
            assert parameter.grad is None
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert parameter.shape.numel() == parameter.numel()
            assert isinstance(parameter, nn.Parameter)
            parameter.requires_grad_(True)
        assert not arriving.was_waited_for
        model.train().requires_grad_(True)
        assert not arriving.was_waited_for
        next(losses(model, rank, 1)).backward()
        assert arriving.was_waited_for
        assert not any(isinstance(p, ArrivingParameter) for p in model.parameters())

    run_ranks(2, body, backend="gloo")


def test_a_rank_that_is_lost_before_an_update_arrives_is_told_where_it_is_read(
    late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        next(losses(model, rank, 1)).backward()
        optimizer.step()

        def lose(self: Late) -> None:
            raise PeerLost("rank 1 is lost", [1], "all_gather")

        monkeypatch.setattr(Late, "wait", lose)
        with pytest.raises(PeerLost) as caught:
            model.fc1.weight.sum()
        assert "in a step of AdamW" in "".join(caught.value.__notes__)
        model.fc1.weight.sum()  # it is said once

    run_ranks(2, body, backend="gloo")


def test_compiled_code_finds_the_updates_there(
    late: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.optim.arriving.has_compiled", lambda: True)
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        assert all(each.was_waited_for for each in late if each.group is group)
        assert not any(isinstance(p, ArrivingParameter) for p in model.parameters())

    run_ranks(2, body, backend="gloo")


def test_a_parameter_of_a_class_of_the_program_is_there_at_once(late: list[Late]) -> None:
    class Own(nn.Parameter):
        pass

    first = Digits()
    first.fc1.weight = Own(first.fc1.weight.detach())

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        assert all(each.was_waited_for for each in late if each.group is group)
        assert type(model.fc1.weight) is Own
        assert model.fc1.weight.grad is not None

    run_ranks(2, body, backend="gloo")


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_it_changes_nothing_on_our_own_groups(backend: str, late: list[Late]) -> None:
    first = Digits()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, optimizer = overlapped(group, first)
        next(losses(model, rank, 1)).backward()
        optimizer.step()
        assert not any(isinstance(p, ArrivingParameter) for p in model.parameters())

    run_ranks(2, body, backend=backend)
    assert not late


def test_compiling_is_noticed() -> None:
    before = has_compiled()
    adamw(nn.Linear(1, 1).parameters())  # imports dynamo, and compiles nothing
    assert has_compiled() == before
    torch.compile(nn.Linear(1, 1), backend="eager")
    assert has_compiled()
    torch.compiler.reset()
    assert not has_compiled()
