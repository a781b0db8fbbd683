"""Gradients of which only some rows were computed, as tensors."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from lockstep.grad import RowGradient
from tests.nn.tables import bits_of


@pytest.mark.parametrize("rows", [[], [0], [2, 5]])
def test_a_gradient_of_rows_is_a_dense_tensor_to_everybody(rows: list[int]) -> None:
    values = torch.randn(len(rows), 2)
    whole = torch.zeros(6, 2).index_copy_(0, torch.tensor(rows, dtype=torch.int64), values)

    def made() -> RowGradient:
        return RowGradient(torch.tensor(rows, dtype=torch.int64), values.clone(), (6, 2))

    assert torch.equal(made() * 2, whole * 2)
    assert torch.equal(torch.ones(6, 2) + made(), torch.ones(6, 2) + whole)
    assert torch.equal(torch.ones(6, 2).add_(made(), alpha=3), torch.ones(6, 2) + 3 * whole)
    assert torch.equal((made() + made()).as_dense(), whole + whole)
    assert type(made() * 2) is torch.Tensor
    written = made()
    alias = written.detach()
    assert written.add_(1) is written
    assert torch.equal(alias.as_dense(), whole + 1)
    assert alias.computed_rows() is None
    assert made().tolist() == whole.tolist()
    assert made().numpy().tolist() == whole.tolist()
    assert repr(made()) == repr(whole)
    assert torch.equal(copy.deepcopy(made()), whole)
    assert torch.equal(torch.load(io.BytesIO(saved(made()))), whole)
    assert made().norm() == whole.norm()


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def test_sums_of_rows_have_the_signs_of_zeros_of_dense_ones() -> None:
    shape, zero = (3, 1), torch.tensor([[-0.0]])
    first = RowGradient(torch.tensor([0]), zero, shape)
    for at in (0, 1):
        second = RowGradient(torch.tensor([at]), zero, shape)
        total = first + second
        assert total.computed_rows() is not None
        assert bits_of(total.as_dense()) == bits_of(first.as_dense() + second.as_dense())
        first = RowGradient(torch.tensor([0]), zero, shape)


def test_calls_on_lists_of_row_gradients_write_to_them() -> None:
    gradient = RowGradient(torch.tensor([1, 2]), torch.ones(2, 3), (5, 3))
    torch._foreach_mul_([gradient], 2)
    assert gradient.sum() == 12
