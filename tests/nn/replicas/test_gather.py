"""What gather does, one by one."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lockstep.nn import gather
from tests.nn.nestings import Batch, Frozen, Output, Point, same


class Odd:
    """Doesn't say whether it is equal to another."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __eq__(self, other: object) -> Any:
        if self.answer is None:
            raise RuntimeError("not comparable")
        return self.answer

    __hash__ = None


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_are_concatenated(dim: int) -> None:
    parts = [torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)]
    whole = gather(parts, "cpu", dim)
    assert torch.equal(whole, torch.cat(parts, dim))
    (whole * torch.arange(12).reshape(whole.shape)).sum().backward()
    expected = torch.arange(12.0).reshape(whole.shape).chunk(2, dim)
    assert same([part.grad for part in parts], list(expected))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_of_no_dimension_become_a_vector(dim: int) -> None:
    losses = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    whole = gather(losses, "cpu", dim)
    assert whole.tolist() == [0, 1, 2]
    whole.square().sum().backward()
    assert [loss.grad.item() for loss in losses] == [0, 2, 4]


def test_uneven_and_empty_parts_are_joined() -> None:
    parts = [torch.ones(0, 2), torch.ones(3, 2), torch.ones(0, 2), torch.ones(1, 2)]
    assert gather(parts, "cpu").shape == (4, 2)
    assert gather([torch.ones(0, 2)] * 2, "cpu").shape == (0, 2)


def test_sparse_tensors_are_joined() -> None:
    whole = gather([torch.eye(2).to_sparse(), torch.zeros(1, 2).to_sparse()], "cpu")
    assert whole.is_sparse
    assert whole.to_dense().tolist() == [[1, 0], [0, 1], [0, 0]]


def test_containers_are_joined_by_elements() -> None:
    def output(i: int) -> Any:
        x = torch.full((i,), float(i))
        return {"b": [x, None], "a": Point(x.sum(), Frozen(x, "same")), "o": Output(x, x), "e": []}

    x = torch.tensor([1.0, 2, 2])
    expected = {
        "b": [x, None],
        "a": Point(torch.tensor([1.0, 4]), Frozen(x, "same")),
        "o": Output(x, x),
        "e": [],
    }
    assert same(gather([output(1), output(2)], "cpu"), expected)


def test_keys_come_in_the_order_of_the_first() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    whole = gather([OrderedDict(b=y, a=x), {"a": x, "b": y}], "cpu")
    assert same(whole, OrderedDict(b=torch.ones(2), a=torch.zeros(2)))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "no outputs"),
        (
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
            "output of 2, 2 elements, and not all have 'b', 'c'",
        ),
        ([{"l": (1, 2)}, {"l": (1,)}], "output['l'] of 2, 1 elements, and not all have 1."),
        ([Output(1, 2), Output(1)], "output of 2, 1 elements, and not all have 'logits'"),
        ([[torch.ones(1)], [None]], "output[0] of the types Tensor, NoneType"),
        ([None, torch.ones(1)], "output of the types NoneType, Tensor"),
        ([1, [1]], "output of the types int, list"),
        ([torch.ones(1), pack_sequence([torch.ones(1)])], "of the types Tensor, PackedSequence"),
        ([torch.ones(2, 3), torch.ones(2, 4)], "shapes (2, 3), (2, 4), but"),
        ([torch.ones(2, 3), torch.ones(3)], "shapes (2, 3), (3,), but"),
        ([torch.ones(()), torch.ones(1)], "shapes (), (1,), but"),
        (
            [pack_sequence([torch.ones(1, 2)]), pack_sequence([torch.ones(1, 3)])],
            "output.data of the shapes (1, 2), (1, 3), but",
        ),
    ],
)
def test_outputs_that_are_not_alike_are_refused(outputs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        gather(outputs, "cpu")


def test_a_dim_that_tensors_lack_is_refused() -> None:
    for dim in (1, -2):
        with pytest.raises(
            IndexError, match=rf"output of the shapes \(2,\), \(3,\).* no dim {dim}"
        ):
            gather([torch.ones(2), torch.ones(3)], "cpu", dim)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 3, 3], 3),
        ([3, 3, 4], [3, 3, 4]),
        (["a", "a"], "a"),
        (["a", "b"], ["a", "b"]),
        ([True, True], True),
        ([None, None], None),
        ([None, 1.5], [None, 1.5]),
        ([(1, 2), (1, 3)], (1, [2, 3])),
        ([torch.Size([2, 3]), torch.Size([1, 3])], [torch.Size([2, 3]), torch.Size([1, 3])]),
        ([np.float64(1), np.float64(1)], np.float64(1)),
    ],
)
def test_other_objects_are_one_if_equal_else_a_list(values: list[Any], expected: Any) -> None:
    assert same(gather(values, "cpu"), expected)


@pytest.mark.parametrize("answer", [None, "yes", np.array([True]), np.array([True, True])])
def test_objects_that_do_not_say_whether_they_are_equal_are_listed(answer: Any) -> None:
    one, other = Odd(answer), Odd(answer)
    joined = gather([one, other], "cpu")
    assert isinstance(joined, list)
    assert [id(value) for value in joined] == [id(one), id(other)]
    assert gather([one, one], "cpu") is one


def test_packed_sequences_follow_one_another() -> None:
    data = [torch.randn(length, 2, requires_grad=True) for length in [1, 4, 2, 2, 3]]
    parts = [pack_sequence(data[:3], enforce_sorted=False), pack_sequence(data[3:], False)]
    parts.append(pack_sequence(data[1:3]))
    whole = gather([{"y": part} for part in parts], "cpu")["y"]
    assert all(map(torch.equal, unpack_sequence(whole), [*data, *data[1:3]]))
    assert all(map(torch.equal, whole, pack_sequence([*data, *data[1:3]], enforce_sorted=False)))
    whole.data.sum().backward()
    assert [sequence.grad.unique().tolist() for sequence in data] == [[1], [2], [2], [1], [1]]


def test_the_output_of_a_single_replica_is_only_moved() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    output = Batch([torch.tensor(1.0), torch.ones(2, 2), packed], 3)
    moved = gather([output], "cpu", 5)
    assert same(moved, output)
    assert moved.data[0][2].sorted_indices is None
    away = gather([output], "meta")
    assert [x.device.type for x in away.data[0][:2]] == ["meta", "meta"]
    assert away.data[0][2].data.device.type == "meta"
    assert away.data[0][0].shape == ()
