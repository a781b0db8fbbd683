"""DataParallel and its primitives: arguments that make no sense, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import lockstep
from lockstep.errors import ModelError
from lockstep.nn import (
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


@pytest.mark.parametrize("devices", NO_LISTS, ids=lambda devices: type(devices).__name__)
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


TRANSFORMS = {
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: torch.func.vmap(f)(X[:, None].expand(4, 2, 3)),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(X),
}


# torch's own derivatives of forward mode are scripts.
of_torchs_scripts = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@of_torchs_scripts
@pytest.mark.parametrize(
    "name",
    # The first use of forward mode takes torch two seconds.
    [n if n in ("grad", "vmap") else pytest.param(n, marks=pytest.mark.long) for n in TRANSFORMS],
)
def test_transforms_of_torch_func_around_replicas(name: str) -> None:
    """They hold in one thread, and the parts of other replicas would have zeros for derivatives."""
    transform = TRANSFORMS[name]
    for call in (DataParallel(LAYER, TWO), lambda x: data_parallel(LAYER, x, TWO)):
        with pytest.raises(ModelError, match=r"inside of grad\(\), vmap\(\), jvp\(\)"):
            transform(call)
    transform(DataParallel(LAYER, ["cpu"]))  # without replicas


@of_torchs_scripts
@pytest.mark.long
def test_tangents_of_forward_mode_are_kept_or_refused() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, 2 * X)
        expected = forward_ad.unpack_dual(LAYER(dual)).tangent
        assert torch.equal(
            forward_ad.unpack_dual(data_parallel(LAYER, dual, TWO)).tangent, expected
        )
        with pytest.raises(ModelError, match="tangents don't pass through"):
            DataParallel(LAYER, TWO)(dual)
        DataParallel(LAYER, TWO)(X)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("reduce", lambda module: lockstep.reduce(1, "sum")),
        ("average_gradients", lockstep.average_gradients),
        ("save", lambda module: lockstep.save("folder", module=module)),
        ("load", lambda module: lockstep.load("folder", module=module)),
    ],
)
def test_what_all_ranks_call_together_is_refused_in_replicas(name: str, call: Any) -> None:
    """Several replicas of one rank would call it, and one rank alone have a part of the result."""

    class Calls(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call(self)
            return super().forward(x)

    with pytest.raises(ModelError, match=rf"{name}.*was called in a replica of a DataParallel"):
        DataParallel(Calls(3, 2), TWO)(X)


def test_ranks_go_on_after_a_reduce_in_replicas() -> None:
    class Reduces(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * lockstep.reduce(1.0, "sum")

    def body(world: Any) -> int:
        with pytest.raises(ModelError):
            DataParallel(Reduces(3, 2), TWO)(X)
        return lockstep.reduce(1, "sum")

    assert lockstep.launch(body, nprocs=2, ranks="threads") == [2, 2]
