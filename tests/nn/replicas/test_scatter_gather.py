"""What is scattered and gathered is what it was; and where torch is right, so are we."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.parallel import scatter_gather as torchs
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.nn import gather, scatter, scatter_kwargs
from tests.nn.nestings import CONTAINERS, nestings, nestings_for_torch, same, tensors

sizes = st.integers(0, 7)
dims = st.integers(-3, 2)
counts = st.integers(1, 4)


@settings(deadline=None)
@given(st.data(), sizes, dims, counts)
def test_what_is_gathered_is_what_was_scattered(
    data: st.DataObject, rows: int, dim: int, count: int
) -> None:
    whole = data.draw(nestings(rows, dim))
    parts = scatter(whole, ["cpu"] * count, dim)
    assert isinstance(parts, tuple if isinstance(whole, torch.Tensor) else list)
    assert len(parts) == len(torch.empty(rows if tensors(whole) else count).chunk(count))
    assert same(gather(parts, "cpu", dim), whole)


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), dims, counts)
def test_gradients_are_those_without(data: st.DataObject, rows: int, dim: int, count: int) -> None:
    def gradients(value: Any) -> list[torch.Tensor]:
        """Through what depends on where each element is."""
        total = sum(
            (t.reshape(-1) ** 3 * torch.arange(1, t.numel() + 1)).sum() for t in tensors(value)
        )
        return list(torch.autograd.grad(total, inputs))

    def in_one_order(value: Any) -> Any:
        """As a single part, so that sequences of one length come in the same order."""
        return gather(scatter(value, ["cpu"], dim), "cpu", dim)

    whole = data.draw(nestings(rows, dim))
    assume(tensors(whole))
    inputs = tensors(whole)
    ours = gradients(in_one_order(gather(scatter(whole, ["cpu"] * count, dim), "cpu", dim)))
    assert all(map(torch.equal, ours, gradients(in_one_order(whole))))


@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_of_gradients_flow(rows: int) -> None:
    lengths = [2, 1, 3, 1, 2][:rows]

    def through(x: torch.Tensor, y: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
        packed = pack_sequence([y[i, :length] for i, length in enumerate(lengths)], False)
        parts = scatter({"x": x, "y": packed, "s": scalar}, ["cpu"] * 3)
        outputs = [
            (p["x"] ** 2 * p["s"], p["y"]._replace(data=p["y"].data ** 3), p["s"] ** 2)
            for p in parts
        ]
        joined = gather(outputs, "cpu")
        return joined[0].sum() * joined[1].data.prod() * joined[2].sum()

    inputs = [
        torch.rand(shape, dtype=torch.float64, requires_grad=True)
        for shape in [(rows, 2), (rows, 3), ()]
    ]
    assert torch.autograd.gradcheck(through, inputs)
    assert torch.autograd.gradgradcheck(through, inputs)


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_keep_their_type(kind: str) -> None:
    whole = CONTAINERS[kind](torch.arange(4.0), CONTAINERS[kind](torch.arange(3.0)[:, None] + 1, 5))
    parts = scatter(whole, ["cpu", "cpu"])
    assert [type(part) for part in parts] == [type(whole)] * 2
    first = CONTAINERS[kind](torch.arange(2.0), CONTAINERS[kind](torch.tensor([[1.0], [2.0]]), 5))
    assert same(parts[0], first)
    assert same(gather(parts, "cpu"), whole)


class OnCpu:
    """torch's two functions that need GPUs, without."""

    class Scatter:
        @staticmethod
        def apply(devices: list[Any], _: None, dim: int, tensor: torch.Tensor) -> Any:
            return tensor.chunk(len(devices), dim)

    class Gather:
        @staticmethod
        def apply(_: Any, dim: int, *parts: torch.Tensor) -> torch.Tensor:
            return torch.cat(parts, dim)


@settings(deadline=None)
@given(st.data(), sizes, dims, counts)
def test_structure_is_as_torch_has_it(data: st.DataObject, rows: int, dim: int, count: int) -> None:
    whole = data.draw(nestings_for_torch(rows, dim))
    devices = ["cpu"] * count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "Scatter", OnCpu.Scatter)
        patch.setattr(torchs, "Gather", OnCpu.Gather)
        parts = torchs.scatter(whole, devices, dim)
        # torch drops parts where something without tensors comes in more of them.
        assume(len(parts) == len(scatter(whole, devices, dim)))
        assert same(scatter(whole, devices, dim), parts)
        assert same(gather(parts, "cpu", dim), torchs.gather(parts, "cpu", dim))


@pytest.mark.parametrize("kwargs", [None, {}, {"flag": True, "other": [1, ()]}])
@pytest.mark.parametrize("inputs", [(), (1,), ([1, "two"], None)])
def test_arguments_without_tensors_are_as_torchs(inputs: Any, kwargs: Any) -> None:
    devices = ["cpu"] * 3
    if not inputs or kwargs:  # else torch forgets the {} of all devices but the first
        ours = scatter_kwargs(inputs, kwargs, devices)
        assert same(ours, torchs.scatter_kwargs(inputs, kwargs, devices))
    assert same(scatter(inputs, devices), torchs.scatter(inputs, devices))


def test_nothing_is_recorded_without_gradients() -> None:
    whole = {"x": torch.ones(4, requires_grad=True), "y": pack_sequence([torch.ones(2)] * 4)}
    with torch.no_grad():
        parts = scatter(whole, ["cpu"] * 2)
        assert not any(t.grad_fn for part in parts for t in tensors(part))
        assert not gather(parts, "cpu")["x"].requires_grad
    with torch.inference_mode():
        assert same(gather(scatter(whole, ["cpu"] * 2), "cpu")["x"].clone(), torch.ones(4))


def test_devices_may_be_mixed_and_named_in_any_way() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)] * 2, enforce_sorted=False)
    parts = scatter((torch.ones(4), packed), ["meta", torch.device("cpu"), -1, "meta"])
    assert [x.device.type for x, _ in parts] == ["meta", "cpu", "cpu", "meta"]
    assert [y.data.device.type for _, y in parts] == ["meta", "cpu", "cpu", "meta"]
    assert all(isinstance(y, PackedSequence) for _, y in parts)
    for device in ("cpu", -1, torch.device("cpu")):
        assert same(gather(parts[1:3], device)[0], torch.ones(2))
    assert gather([x for x, _ in parts], "meta").device.type == "meta"
