"""What scatter does, one by one."""

from __future__ import annotations

import itertools
import re
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lockstep.nn import scatter, scatter_kwargs
from tests.nn.nestings import Batch, Frozen, same

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("rows", range(8))
def test_a_tensor_comes_in_the_chunks_of_torch(rows: int, count: int, dim: int) -> None:
    x = torch.randn(rows, 2).transpose(0, dim)
    parts = scatter(x, ["cpu"] * count, dim)
    assert same(parts, x.chunk(count, dim))


def test_a_part_may_be_changed_in_place() -> None:
    x = torch.ones(4, requires_grad=True)
    whole = x * 1
    first, second = scatter(whole, TWO)  # those of chunk() refuse it
    assert first.data_ptr() == whole.data_ptr(), "nothing is copied on the same device"
    first.mul_(3)
    (first.sum() + second.sum()).backward()
    assert x.grad.tolist() == [3, 3, 1, 1]


def test_a_tensor_of_no_dimension_goes_to_all() -> None:
    scale = torch.tensor(2.0, requires_grad=True)
    parts = scatter((torch.ones(4), scale), TWO)
    sum((x * s).sum() for x, s in parts).backward()
    assert scale.grad == 4
    assert same(scatter(scale, THREE), (scale,) * 3)


def test_what_torch_takes_for_an_object_stays_one_without_tensors() -> None:
    objects = [object(), nn.Linear(1, 1), {1, 2}, "text", UserDict(a=[1]), Frozen(1, [2]), Batch]
    objects.append(torch.Size([4, 2]))
    for part in scatter((torch.ones(4), *objects), TWO):
        assert all(mine is given for mine, given in zip(part[1:], objects, strict=True))


@pytest.mark.parametrize("value", [[], {}, [1], {"a": 1}, ([],)])
def test_no_device_can_change_the_list_of_another(value: Any) -> None:
    for whole in (value, (torch.ones(2), value)):
        one, other = scatter(whole, TWO)
        if whole is not value:
            one, other = one[1], other[1]
        assert same(one, other)
        assert same(one, value)
        if isinstance(value, tuple):
            one, other = one[0], other[0]
        assert one is not other


def test_modules_that_are_dataclasses_stay_whole() -> None:
    @dataclass(eq=False)
    class Scale(nn.Module):
        by: torch.Tensor

        def __new__(cls, *args: Any) -> Scale:
            made = super().__new__(cls)
            nn.Module.__init__(made)
            return made

    module = Scale(torch.ones(3))
    assert [part[1] is module for part in scatter((torch.ones(4), module), TWO)] == [True, True]


def test_an_object_may_know_the_one_that_holds_it() -> None:
    owner = Frozen({}, None)
    owner.data["owner"] = owner
    assert all(part[1] is owner for part in scatter((torch.ones(4), owner), TWO))


def test_what_a_dataclass_has_computed_is_computed_again() -> None:
    batch = Batch(torch.ones(4))
    assert batch.total == 4
    assert [part.total.item() for part in scatter(batch, TWO)] == [2, 2]
    assert batch.total == 4


def test_different_numbers_of_parts_are_refused() -> None:
    given = {"x": torch.ones(4, 3), "y": [torch.ones(1, 2)]}
    message = "inputs['x'] of shape (4, 3) in 2, inputs['y'][0] of shape (1, 2) in 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter(given, TWO)
    with pytest.raises(ValueError, match="3 packed sequences in 2"):
        scatter((torch.ones(1), pack_sequence([torch.ones(1)] * 3)), TWO)
    assert len(scatter((torch.ones(4), torch.ones(8)), TWO)) == 2


def test_a_dim_that_a_tensor_lacks_is_refused() -> None:
    for dim in (1, -2):
        with pytest.raises(IndexError, match=rf"inputs\[1\] of shape \(4,\) has no dim {dim}"):
            scatter((torch.ones(4, 4), torch.ones(4)), TWO, dim)


def test_no_devices_are_refused() -> None:
    for inputs in (torch.ones(2), 1):
        with pytest.raises(ValueError, match="no devices"):
            scatter(inputs, [])
    with pytest.raises(ValueError, match="no devices"):
        scatter_kwargs((), {}, [])


@pytest.mark.parametrize("device", [99, -2])
def test_an_accelerator_that_is_not_there_is_refused(device: int) -> None:
    with pytest.raises(ValueError, match=f"is {device}, which is to be an accelerator's"):
        scatter(torch.ones(2), ["cpu", device])


@pytest.mark.parametrize("dim", [0, 1, 5])
def test_packed_sequences_are_divided_in_the_order_of_the_batch(dim: int) -> None:
    lengths = [2, 5, 1, 5, 3]
    data = [torch.randn(length, 2, requires_grad=True) for length in lengths]
    parts = scatter([pack_sequence(data, enforce_sorted=False)], TWO, dim)
    sequences = [unpack_sequence(part) for (part,) in parts]
    assert [len(part) for part in sequences] == [3, 2]
    assert all(map(torch.equal, itertools.chain(*sequences), data))
    sum((i + 1) * part[0].data.sum() for i, part in enumerate(parts)).backward()
    assert [sequence.grad.unique().tolist() for sequence in data] == [[1], [1], [1], [2], [2]]


def test_packed_sequences_are_as_pack_sequence_makes_them() -> None:
    lengths = [3, 5, 1, 4]
    data = [torch.randn(length) for length in lengths]
    parts = scatter(pack_sequence(data, enforce_sorted=False), TWO)
    for part, sequences in zip(parts, (data[:2], data[2:]), strict=True):
        expected = pack_sequence(sequences, enforce_sorted=False)
        assert type(part) is PackedSequence
        assert all(map(torch.equal, part, expected))
    out, _ = nn.RNN(1, 2)(parts[0]._replace(data=parts[0].data[:, None]))
    assert len(unpack_sequence(out)) == 2


def test_sparse_tensors_are_divided() -> None:
    parts = scatter(torch.eye(3).to_sparse(), TWO)
    assert all(part.is_sparse for part in parts)
    assert same(torch.cat(parts).to_dense(), torch.eye(3))


def test_arguments_come_in_equally_many_parts() -> None:
    x, y = torch.ones(4), torch.ones(1)
    assert same(scatter_kwargs((x,), None, TWO), (((x[:2],),) * 2, ({}, {})))
    assert same(scatter_kwargs((), {"x": x}, TWO), (((), ()), ({"x": x[:2]},) * 2))
    # For torch, the second device's call lacks y.
    assert same(scatter_kwargs((y,), {"flag": 1}, TWO), (((y,),), ({"flag": 1},)))
    assert same(scatter_kwargs((1,), {"y": y}, TWO), (((1,),), ({"y": y},)))
    assert scatter_kwargs((), None, TWO) == scatter_kwargs((), {}, TWO) == ((), ())
    message = "inputs[0] of shape (4,) in 2, kwargs['y'] of shape (1,) in 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        scatter_kwargs((x,), {"y": y}, TWO)


def test_no_rows_are_an_empty_part_for_each_device() -> None:
    args, kwargs = scatter_kwargs((torch.ones(0, 2),), {"y": torch.ones(0)}, THREE)
    assert [x.shape for (x,) in args] == [(0, 2)] * 3
    assert [named["y"].shape for named in kwargs] == [(0,)] * 3
