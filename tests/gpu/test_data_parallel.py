"""``DataParallel`` and its primitives on GPUs. Skipped where there is none; one is enough.

One that is given twice is two devices to them, and the CPU may be one of the devices.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.nn.replicas import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
)

# A backward that waits for itself is to be found out soon.
SECONDS = 100

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.keeps_descriptors("CUDA opens some when it is first used, and keeps them"),
    pytest.mark.timeout(SECONDS),
]

GPU = torch.device("cuda", 0)
TWICE, THREE_TIMES = ["cuda:0"] * 2, ["cuda:0"] * 3
MIXED = ["cpu", "cuda:0"]
DEVICES = pytest.mark.parametrize(
    "devices",
    [["cuda:0"], TWICE, THREE_TIMES, [0, 0], MIXED, ["cuda:0", "cpu"], [-1, 0, 0, -1]],
    ids=str,
)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def cuda_has_begun() -> None:
    """Before what a test must leave behind is looked at: it sets a variable, for one thing."""
    DataParallel(nn.Linear(2, 2, device=GPU), TWICE)(torch.ones(2, 2)).sum().backward()
    torch.cuda.synchronize()


class Net(nn.Module):
    """Shared weights, a buffer, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
        self.register_buffer("scale", torch.rand(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.last(self.norm(hidden) + x * self.scale)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def samples(rows: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, dtype=torch.float64, generator=generator)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    torch.cuda.synchronize()
    return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]


def assert_close(mine: list, theirs: list, tolerance: float = 1e-10) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def home_of(devices: list) -> torch.device:
    return torch.device("cpu") if devices[0] in ("cpu", -1) else GPU


def by_module(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    return DataParallel(model, devices)


def by_function(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: data_parallel(model, x, devices)


def by_primitives(model: nn.Module, devices: list) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        parts = scatter(x, devices)
        used = devices[: len(parts)]
        outputs = parallel_apply(replicate(model, used), parts, devices=used)
        return gather(outputs, used[0])

    return call


WAYS = pytest.mark.parametrize("way", [by_module, by_function, by_primitives])


class TestResults:
    """They are those of the module alone, on the CPU."""

    @WAYS
    @DEVICES
    @pytest.mark.parametrize("rows", [11, 1, 0])
    def test_outputs_and_gradients(self, way, devices: list, rows: int) -> None:
        home = home_of(devices)
        model, expected = net().to(home), net()
        call = way(model, devices)
        for _ in range(3):  # gradients add up
            x, y = samples(rows).to(home).requires_grad_(), samples(rows).requires_grad_()
            output, other = call(x), expected(y)
            assert output.device == home
            torch.testing.assert_close(output.cpu(), other, rtol=1e-10, atol=1e-10)
            output.square().sum().backward()
            other.square().sum().backward()
            assert_close(gradients_of(model), gradients_of(expected))
            assert_close([x.grad.cpu()], [y.grad])
            assert [p.grad.device for p in model.parameters()] == [home] * 6
        assert model.calls == 3

    @WAYS
    @DEVICES
    def test_inputs_come_from_the_cpu_or_a_gpu(self, way, devices: list) -> None:
        home = home_of(devices)
        call, expected = way(net().to(home), devices), net()(samples())
        for place in ("cpu", "cuda:0"):
            x = samples().to(place).requires_grad_()
            call(x).sum().backward()
            assert x.grad.device == x.device
            torch.testing.assert_close(call(x).cpu(), expected, rtol=1e-10, atol=1e-10)
        pinned = call(samples().pin_memory())
        torch.testing.assert_close(pinned.cpu(), expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("output_device", ["cpu", -1, 0, "cuda:0"])
    def test_outputs_are_joined_where_they_are_wanted(self, output_device) -> None:
        model, expected = net().to(GPU), net()
        output = DataParallel(model, TWICE, output_device)(samples())
        assert output.is_cuda == (output_device not in ("cpu", -1))
        output.sum().backward()
        expected(samples()).sum().backward()
        assert_close(gradients_of(model), gradients_of(expected))

    def test_the_same_bits_every_time(self) -> None:
        def run() -> list[torch.Tensor | None]:
            model = net().to(GPU)
            DataParallel(model, THREE_TIMES)(samples(64).to(GPU)).square().sum().backward()
            return gradients_of(model)

        first = run()
        for _ in range(5):
            assert all(map(torch.equal, first, run()))

    def test_second_derivatives_by_the_function(self) -> None:
        def penalty(call: Callable, model: Net, x: torch.Tensor) -> list[torch.Tensor | None]:
            x.requires_grad_()
            (slope,) = torch.autograd.grad(call(x).sin().sum(), x, create_graph=True)
            slope.square().sum().backward()
            return gradients_of(model)

        for devices in (TWICE, MIXED):
            model, expected = net().to(home_of(devices)), net()
            found = penalty(by_function(model, devices), model, samples().to(home_of(devices)))
            assert_close(found, penalty(expected, expected, samples()))

    def test_a_mean_over_the_replicas(self) -> None:
        class WithLoss(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return lockstep.mean(super().forward(x).square().sum(1))

        for devices in (THREE_TIMES, MIXED):
            torch.manual_seed(3)
            model = WithLoss().to(home_of(devices))
            expected = copy.deepcopy(model).cpu()
            loss, other = DataParallel(model, devices)(samples()), expected(samples())
            torch.testing.assert_close(loss.cpu(), other, rtol=1e-10, atol=1e-10)
            loss.backward()
            other.backward()
            assert_close(gradients_of(model), gradients_of(expected))

    def test_sparse_gradients(self) -> None:
        words = torch.tensor([[1, 2], [2, 2], [0, 4], [1, 1], [3, 0]])
        for devices in (TWICE, MIXED):
            table = nn.Embedding(5, 3, sparse=True).double()
            model, expected = copy.deepcopy(table).to(home_of(devices)), table
            DataParallel(model, devices)(words).square().sum().backward()
            expected(words).square().sum().backward()
            assert model.weight.grad.is_sparse
            found, wanted = model.weight.grad.cpu().to_dense(), expected.weight.grad.to_dense()
            assert_close([found], [wanted])

    # Its rows are normalised in place, in the copy on the GPU.
    @pytest.mark.xfail(reason="rows that the copy looks up aren't normalised in the module")
    def test_a_table_on_another_device_is_normalised_in_the_module(self) -> None:
        table = nn.Embedding(6, 3, max_norm=0.5).double()
        expected = copy.deepcopy(table)
        DataParallel(table, MIXED)(torch.arange(6))
        expected(torch.arange(6))
        assert_close([table.weight.detach()], [expected.weight.detach()])


class TestAsTorchs:
    """Beside torch's ``nn.DataParallel`` on one GPU, given once."""

    @pytest.mark.parametrize("devices", [[0], ["cuda:0"], None])
    def test_one_gpu(self, devices: list | None) -> None:
        if devices is None and torch.cuda.device_count() > 1:
            pytest.skip("by default it takes all of them")
        mine, theirs = net(), net()
        # Both move the module there.
        model, other = DataParallel(mine, devices), nn.DataParallel(theirs, [0])
        assert model.device_ids == other.device_ids == [0]
        assert model.output_device == other.output_device == 0
        assert model.src_device_obj == other.src_device_obj
        for x in (samples(), samples().to(GPU)):
            output, expected = model(x), other(x)
            assert output.device == expected.device == GPU
            assert torch.equal(output, expected)
            output.sum().backward()
            expected.sum().backward()
            assert all(map(torch.equal, gradients_of(mine), gradients_of(theirs)))

    def test_one_gpu_given_twice_is_torchs_given_once(self) -> None:
        mine, theirs = net().to(GPU), net().to(GPU)
        model, other = DataParallel(mine, [0, 0]), nn.DataParallel(theirs, [0])
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (mine, theirs)]
        for step in range(5):
            for one, optimizer in zip((model, other), optimizers, strict=True):
                optimizer.zero_grad()
                one(samples(5 + step)).square().sum().backward()
                optimizer.step()
        assert_close([p.cpu() for p in mine.parameters()], [p.cpu() for p in theirs.parameters()])

    def test_a_module_that_is_elsewhere_is_named(self) -> None:
        with pytest.raises(RuntimeError, match=r"is on cpu\. Move the module there"):
            DataParallel(net(), TWICE)(samples())
        with pytest.raises(RuntimeError, match=r"is on cuda:0\. Move the module there"):
            DataParallel(net().to(GPU), MIXED)(samples())

    def test_an_accelerator_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ValueError, match="is to be an accelerator's index"):
            DataParallel(net(), [0, torch.cuda.device_count()])

    def test_by_default_all_gpus(self) -> None:
        model = DataParallel(net().to(GPU))
        assert model.device_ids == list(range(torch.cuda.device_count()))

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    @pytest.mark.parametrize("devices", [[0, 1], [1, 0], [0, 1, 0]])
    def test_two_gpus(self, devices: list[int]) -> None:
        home = torch.device("cuda", devices[0])
        mine, theirs = net().to(home), net().to(home)
        model, other = DataParallel(mine, devices), nn.DataParallel(theirs, devices[:2])
        for x in (samples(), samples().to(GPU), samples().to("cuda:1")):
            output, expected = model(x), other(x)
            assert output.device == expected.device == home
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
            output.square().sum().backward()
            expected.square().sum().backward()
            assert_close(gradients_of(mine), gradients_of(theirs))


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

    @pytest.mark.parametrize("devices", [MIXED, ["cuda:0", "cpu"]], ids=str)
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


class TestBackwards:
    """They end, whoever begins them and whatever is in them: autograd has one thread for a GPU."""

    def check(self, model: nn.Module, call: Callable, loss_of: Callable | None = None) -> None:
        expected = copy.deepcopy(model).cpu()
        for _ in range(5):
            loss = call(samples().to(GPU).requires_grad_()).square().sum()
            (loss if loss_of is None else loss_of(loss)).backward()
            expected(samples().requires_grad_()).square().sum().backward()
        assert_close(gradients_of(model), gradients_of(expected))

    @pytest.mark.parametrize("devices", [TWICE, MIXED, ["cuda:0", "cpu"]], ids=str)
    @pytest.mark.parametrize("place", ["cpu", "cuda:0"])
    def test_from_a_loss_on_either_device(self, devices: list, place: str) -> None:
        model = net().to(home_of(devices))
        self.check(model, DataParallel(model, devices), lambda loss: loss.to(place))

    def test_two_in_one_graph(self) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double().to(GPU)
        first, second = DataParallel(model[0], TWICE), DataParallel(model[2], THREE_TIMES)
        self.check(model, lambda x: second(model[1](first(x))))

    def test_one_inside_of_another(self) -> None:
        model = nn.Sequential(net(), nn.Tanh()).to(GPU)
        nested = nn.Sequential(DataParallel(model[0], TWICE), model[1])
        self.check(model, DataParallel(nested, TWICE))

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("devices", [TWICE, MIXED], ids=str)
    def test_checkpoints_inside_and_around(self, devices: list, reentrant: bool) -> None:
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}

        class Inside(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, x, **options)

        torch.manual_seed(3)
        model = Inside().to(home_of(devices))
        self.check(model, DataParallel(model, devices))
        model = net().to(home_of(devices))
        parallel = DataParallel(model, devices)
        self.check(model, lambda x: checkpoint(parallel, x, **options))

    def test_a_backward_inside_of_a_backward(self) -> None:
        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.sin()

            @staticmethod
            def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    (own,) = torch.autograd.grad(x.sin(), x, gradient)
                return own

        class Twice(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Again.apply(super().forward(Again.apply(x)))

        torch.manual_seed(3)
        model = Twice().to(GPU)
        self.check(model, DataParallel(model, TWICE))

    def test_from_several_threads_at_the_same_time(self) -> None:
        model, expected, errors = net().to(GPU), net(), []
        parallel = DataParallel(model, TWICE)

        def run(rows: int) -> None:
            try:
                for _ in range(10):
                    loss = parallel(samples(rows).to(GPU)).square().sum()
                    found = torch.autograd.grad(loss, list(model.parameters()))
                    loss = expected(samples(rows)).square().sum()
                    wanted = torch.autograd.grad(loss, list(expected.parameters()))
                    assert_close([g.cpu() for g in found], list(wanted))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rows,), daemon=True) for rows in (3, 8, 13)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS / 2)
        assert errors == []
        assert not any(thread.is_alive() for thread in threads)

    def test_a_failed_one_does_not_spoil_the_next(self) -> None:
        model, expected, fails = net().to(GPU), net(), [True]

        def hook(gradient: torch.Tensor) -> None:
            if fails:
                raise ArithmeticError("no gradient")

        model.last.register_forward_hook(lambda _, __, output: output.register_hook(hook) and None)
        parallel = DataParallel(model, TWICE)
        with pytest.raises(ArithmeticError, match="no gradient"):
            parallel(samples()).sum().backward()
        fails.clear()
        parallel(samples()).sum().backward()
        expected(samples()).sum().backward()
        assert_close(gradients_of(model), gradients_of(expected))

    def test_a_kept_graph_and_forwards_before_their_backwards(self) -> None:
        model, expected = net().to(GPU), net()
        parallel = DataParallel(model, TWICE)
        for call in (parallel, expected):
            first, second = call(samples(5)).square().sum(), call(samples(8)).square().sum()
            second.backward(retain_graph=True)
            first.backward()
            second.backward()
        assert_close(gradients_of(model), gradients_of(expected))


class TestModes:
    """Replicas are in what the caller is in: autocast, and each GPU's stream."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @WAYS
    def test_autocast(self, way, dtype: torch.dtype) -> None:
        layer, x = nn.Linear(8, 4, device=GPU), torch.randn(6, 8, device=GPU)
        expected = copy.deepcopy(layer)
        call = way(layer, TWICE)
        for _ in range(2):
            with torch.autocast("cuda", dtype):
                output, other = call(x), expected(x)
            assert output.dtype is dtype
            torch.testing.assert_close(output, other, rtol=0.02, atol=0.02)
            output.float().sum().backward()
            other.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
        assert_close(gradients_of(layer), gradients_of(expected), 0.1)

    def test_autocast_of_both_kinds_of_devices(self) -> None:
        seen: dict[str, torch.dtype] = {}

        class Notes(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output = super().forward(x)
                seen[x.device.type] = output.dtype
                return output.float()

        with torch.autocast("cuda", torch.float16), torch.autocast("cpu", torch.bfloat16):
            DataParallel(Notes(8, 4), MIXED)(torch.randn(6, 8))
        assert seen == {"cpu": torch.bfloat16, "cuda": torch.float16}

    def test_a_gradient_scaler(self) -> None:
        model = net().float().to(GPU)
        parallel, before = DataParallel(model, TWICE), copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = F.mse_loss(parallel(samples().float()), torch.ones(11, 3, device=GPU))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert all(p.isfinite().all() for p in model.parameters())
        assert not torch.equal(model.last.weight, before["last.weight"])

    @WAYS
    def test_replicas_use_the_callers_stream(self, way) -> None:
        seen = []

        class Notes(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append((torch.cuda.current_device(), torch.cuda.current_stream()))
                return x + 1

        call, side = way(Notes(), THREE_TIMES), torch.cuda.Stream(GPU)
        with torch.cuda.stream(side):
            call(torch.ones(6, device=GPU))
        assert seen == [(0, side)] * 3
        seen.clear()
        call(torch.ones(6, device=GPU))
        assert seen == [(0, torch.cuda.default_stream(GPU))] * 3

    @pytest.mark.parametrize("devices", [TWICE, MIXED, ["cuda:0", "cpu"]], ids=str)
    @pytest.mark.parametrize("is_on_side", [True, False])
    def test_slow_work_is_waited_for(self, devices: list, is_on_side: bool) -> None:
        """What comes late on a stream is not read too early: inputs, outputs and gradients."""

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: torch.Tensor) -> torch.Tensor:
                sleep(x)
                return x * 1

            @staticmethod
            def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
                sleep(gradient)
                return gradient * 1

        def sleep(x: torch.Tensor) -> None:
            if x.is_cuda:
                torch.cuda._sleep(20_000_000)

        class SlowNet(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Slow.apply(super().forward(Slow.apply(x)))

        torch.manual_seed(3)
        model, expected = SlowNet().to(home_of(devices)), net()
        parallel = DataParallel(model, devices)
        stream = torch.cuda.Stream(GPU) if is_on_side else torch.cuda.current_stream(GPU)
        stream.wait_stream(torch.cuda.current_stream(GPU))
        with torch.cuda.stream(stream):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            others = torch.optim.SGD(expected.parameters(), lr=0.01)
            for step in range(4):
                x = samples(6 + step).to(GPU, non_blocking=True)
                sleep(x)
                optimizer.zero_grad()
                parallel(x * 1).square().sum().backward()
                optimizer.step()  # changes what the next forward reads
                others.zero_grad()
                expected(samples(6 + step)).square().sum().backward()
                others.step()
        assert_close(gradients_of(model), gradients_of(expected), 1e-8)
        assert_close(
            [p.detach().cpu() for p in model.parameters()],
            [p.detach() for p in expected.parameters()],
            1e-8,
        )


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cuda:0",)])
@pytest.mark.parametrize("program", ["data_parallel_parts.py", "data_parallel_by_hand.py"])
def test_the_examples_run_on_a_gpu(program: str, devices: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / program), *devices],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
