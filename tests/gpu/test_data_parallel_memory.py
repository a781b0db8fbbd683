"""``DataParallel`` on GPUs: what is copied and what is kept. Skipped where there is none."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.nn import DataParallel
from tests.gpu.replicas import (
    FIRST,
    GPU,
    MARKS,
    MIXED,
    THREE_TIMES,
    by_function,
    by_module,
    device_has_begun,  # noqa: F401
    home_of,
)

pytestmark = MARKS

# So wide that a cuBLAS work space more or less, of 32 MiB, is little beside it.
WIDTH = 8192
WEIGHT_BYTES = 4 * WIDTH * WIDTH


def wide(device: torch.device) -> nn.Linear:
    """Its weight is far larger than all else: 256 MiB."""
    return nn.Linear(WIDTH, WIDTH, bias=False, device=device)


def allocated_by(run: Callable[[], object]) -> int:
    """How many bytes ``run`` has allocated on the GPU, those that are free again included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats(GPU)["allocated_bytes.all.allocated"]
    run()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats(GPU)["allocated_bytes.all.allocated"] - before


class CountsCopies(TorchDispatchMode):
    """Counts in this thread, where replicas are renewed, the copies of something so large."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.count = 0
        self._numel = numel

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        copies = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        if func in copies and result.numel() == self._numel:
            self.count += 1
        return result


@contextmanager
def copies_of(parameter: torch.Tensor) -> Iterator[CountsCopies]:
    with CountsCopies(parameter.numel()) as counts:
        yield counts


class TestMemory:
    """Nothing is copied for nothing."""

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("way", [by_module, by_function])
    def test_a_forward_allocates_no_parameters(self, way, grad: bool) -> None:
        model = wide(GPU)
        call, x = way(model, THREE_TIMES), torch.randn(6, WIDTH, device=GPU)

        def forward() -> None:
            with torch.set_grad_enabled(grad):
                call(x)

        for _ in range(2):  # the work space of each thread's cuBLAS comes with its first call
            forward()
        assert allocated_by(forward) < WEIGHT_BYTES / 2

    def test_a_backward_allocates_gradients_of_each_replica_and_no_more(self) -> None:
        model = wide(GPU)
        parallel, x = DataParallel(model, THREE_TIMES), torch.randn(6, WIDTH, device=GPU)

        def step() -> None:
            model.zero_grad()
            parallel(x).sum().backward()

        for _ in range(2):
            step()
        assert allocated_by(step) < 4.5 * WEIGHT_BYTES  # perhaps the sum as well

    def test_after_a_backward_there_is_one_gradient(self) -> None:
        model = wide(GPU)
        parallel, x = DataParallel(model, THREE_TIMES), torch.randn(6, WIDTH, device=GPU)
        for _ in range(2):
            model.zero_grad()
            parallel(x).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(GPU)
        parallel(x).sum().backward()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated(GPU) - before < 1.5 * WEIGHT_BYTES

    def test_nothing_stays_when_it_is_gone(self) -> None:
        def use() -> None:
            model = wide(torch.device("cpu"))
            DataParallel(model, MIXED)(torch.randn(2, WIDTH)).sum().backward()

        use()  # what stays of it is the threads'
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(GPU)
        use()
        gc.collect()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated(GPU) - before < WEIGHT_BYTES / 2

    @pytest.mark.parametrize("devices", [MIXED, [FIRST, "cpu"]], ids=str)
    def test_a_copy_on_another_device_is_renewed_after_changes_alone(self, devices: list) -> None:
        home = home_of(devices)
        model, x = wide(home), torch.randn(4, WIDTH)
        expected = copy.deepcopy(model).cpu()
        parallel = DataParallel(model, devices)

        def copies() -> int:
            with copies_of(model.weight) as counts:
                output = parallel(x)
            torch.testing.assert_close(output.cpu(), expected(x), rtol=1e-3, atol=1e-3)
            return counts.count

        def double() -> None:
            for one in (model, expected):
                with torch.no_grad():
                    one.weight.mul_(2)

        def step() -> None:
            for one, call in ((model, parallel), (expected, expected)):
                one.zero_grad()
                call(x).sum().backward()
                torch.optim.SGD(one.parameters(), lr=1e-4).step()

        def load() -> None:
            state = {"weight": torch.full((WIDTH, WIDTH), 0.01)}
            model.load_state_dict(state)
            expected.load_state_dict(state)

        assert copies() == 1
        assert copies() == copies() == 0
        for change in (double, step, load):
            change()
            assert copies() == 1
            assert copies() == 0

    def test_a_copy_keeps_its_memory(self) -> None:
        model = wide(torch.device("cpu"))
        parallel, x = DataParallel(model, MIXED), torch.randn(2, WIDTH)

        def change_and_call() -> None:
            with torch.no_grad():
                model.weight.mul_(2)
                parallel(x)

        for _ in range(2):
            change_and_call()
        assert allocated_by(change_and_call) < WEIGHT_BYTES / 2
