"""DataParallel and its primitives: arguments that make no sense, and what is said of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.nn.replicas import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)

TWO = ["cpu"] * 2
LAYER, X = nn.Linear(3, 2), torch.ones(4, 3)
NO_DEVICES: list[Any] = [
    None,
    float("nan"),
    1.5,
    True,
    torch.ones(()),
    b"cpu",
    "nowhere",
    "cuda:0:0",
    "cpu:-1",
    "xpu:99",
    -2,
    10**30,
]
NO_LISTS: list[Any] = ["cpu", 3, 1.5, torch.device("cpu"), torch.tensor(3), object()]
NO_DIMS: list[Any] = [None, 1.5, float("nan"), "0", torch.ones(2)]
NO_MODULES: list[Any] = [None, 3, float("nan"), "Linear", torch.ones(2), nn.Linear, [LAYER]]


def assert_refused(name: str, call: Any) -> None:
    """Check that what is wrong with an argument is said by its name, and by us."""
    with pytest.raises((TypeError, ValueError), match=rf"^{name}(\[\d\])? (is|are) ") as caught:
        call()
    assert "ive" in str(caught.value) or "Name another" in str(caught.value)  # what to do
    assert "/lockstep/" in str(caught.traceback[-1].path)


@pytest.mark.parametrize("device", NO_DEVICES, ids=repr)
def test_what_is_no_device(device: Any) -> None:
    assert_refused("target_gpus", lambda: scatter(X, ["cpu", device]))
    assert_refused("target_gpus", lambda: scatter_kwargs((X,), None, ["cpu", device]))
    assert_refused("target_device", lambda: gather([X, X], device))
    assert_refused("devices", lambda: replicate(LAYER, ["cpu", device]))
    assert_refused("device_ids", lambda: DataParallel(LAYER, ["cpu", device]))
    assert_refused("device_ids", lambda: data_parallel(LAYER, X, ["cpu", device]))
    if device is not None:
        assert_refused(
            "devices", lambda: parallel_apply([LAYER] * 2, [X] * 2, None, ["cpu", device])
        )
    if device is not None:
        assert_refused("output_device", lambda: DataParallel(LAYER, TWO, device))
        assert_refused("output_device", lambda: data_parallel(LAYER, X, TWO, device))


@pytest.mark.parametrize("devices", NO_LISTS, ids=repr)
def test_what_are_no_devices(devices: Any) -> None:
    assert_refused("target_gpus", lambda: scatter(X, devices))
    assert_refused("target_gpus", lambda: scatter_kwargs((X,), None, devices))
    assert_refused("devices", lambda: replicate(LAYER, devices))
    assert_refused("devices", lambda: parallel_apply([LAYER] * 2, [X] * 2, None, devices))
    assert_refused("device_ids", lambda: DataParallel(LAYER, devices))
    assert_refused("device_ids", lambda: data_parallel(LAYER, X, devices))


@pytest.mark.parametrize("dim", NO_DIMS, ids=repr)
def test_what_is_no_dim(dim: Any) -> None:
    assert_refused("dim", lambda: scatter(X, TWO, dim))
    assert_refused("dim", lambda: scatter_kwargs((X,), None, TWO, dim))
    assert_refused("dim", lambda: gather([X, X], "cpu", dim))
    assert_refused("dim", lambda: DataParallel(LAYER, TWO, dim=dim))
    assert_refused("dim", lambda: data_parallel(LAYER, X, TWO, dim=dim))


@pytest.mark.parametrize("dim", [2, -3, 10**30])
def test_a_dim_that_tensors_have_not(dim: int) -> None:
    for call in (
        lambda: scatter(X, TWO, dim),
        lambda: gather([X, X], "cpu", dim),
        lambda: DataParallel(LAYER, TWO, dim=dim)(X),
        lambda: data_parallel(LAYER, X, TWO, dim=dim),
    ):
        with pytest.raises(IndexError, match=f"no dim {dim} to be"):
            call()


@pytest.mark.parametrize("module", NO_MODULES, ids=repr)
def test_what_is_no_module(module: Any) -> None:
    assert_refused("network", lambda: replicate(module, TWO))
    assert_refused("module", lambda: DataParallel(module, TWO))
    assert_refused("module", lambda: data_parallel(module, X, TWO))


@pytest.mark.parametrize("timeout", [None, 5, 1.5, float("nan"), "1", timedelta(0), -timedelta(1)])
def test_what_is_no_timeout(timeout: Any) -> None:
    assert_refused("timeout", lambda: DataParallel(LAYER, TWO, timeout=timeout))


@pytest.mark.parametrize("value", [None, 3, float("nan"), "ab", {0: X}, torch.tensor(3)], ids=repr)
def test_what_is_no_list(value: Any) -> None:
    assert_refused("outputs", lambda: gather(value, "cpu"))
    assert_refused("modules", lambda: parallel_apply(value, [X] * 2))
    assert_refused("inputs", lambda: parallel_apply([LAYER] * 2, value))
    assert_refused("inputs", lambda: scatter_kwargs(value, None, TWO))
    if value is not None:
        assert_refused("kwargs_tup", lambda: parallel_apply([LAYER] * 2, [X] * 2, value))


@pytest.mark.parametrize("value", [3, float("nan"), "ab", [X], {1: 2}], ids=repr)
def test_what_is_no_dict(value: Any) -> None:
    assert_refused("kwargs", lambda: scatter_kwargs((X,), value, TWO))
    assert_refused("module_kwargs", lambda: data_parallel(LAYER, X, TWO, module_kwargs=value))
    assert_refused("kwargs_tup", lambda: parallel_apply([LAYER] * 2, [X] * 2, [{}, value]))


@pytest.mark.parametrize("value", [None, 3, "Linear"])
def test_what_cannot_be_called(value: Any) -> None:
    assert_refused("modules", lambda: parallel_apply([LAYER, value], [X] * 2))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="indices name accelerators")
def test_indices_are_ignored_as_by_torch_where_there_are_no_accelerators() -> None:
    for device_ids, output_device in ((None, 0), ([0], None), ([0, 1], 1)):
        for layer in (DataParallel, nn.DataParallel):
            assert torch.equal(layer(LAYER, device_ids, output_device)(X), LAYER(X))
    # But not beside devices that are named.
    assert_refused("output_device", lambda: DataParallel(LAYER, TWO, 0))
    assert_refused("device_ids", lambda: DataParallel(LAYER, ["cpu", 0]))
