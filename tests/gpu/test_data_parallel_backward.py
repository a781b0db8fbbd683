"""``DataParallel`` on GPUs: backwards, modes and streams. Skipped where there is none."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.nn import DataParallel
from tests.gpu.accelerator import KIND, current_stream, sleep
from tests.gpu.replicas import (
    FIRST,
    GPU,
    MARKS,
    MIXED,
    SECONDS,
    THREE_TIMES,
    TWICE,
    WAYS,
    Net,
    assert_close,
    device_has_begun,  # noqa: F401
    gradients_of,
    home_of,
    replicable,
    samples,
)

pytestmark = MARKS


class TestBackwards:
    """They end, whoever begins them and whatever is in them: autograd has one thread for a GPU."""

    def check(self, model: nn.Module, call: Callable, loss_of: Callable | None = None) -> None:
        expected = copy.deepcopy(model).cpu()
        for _ in range(5):
            loss = call(samples().to(GPU).requires_grad_()).square().sum()
            (loss if loss_of is None else loss_of(loss)).backward()
            expected(samples().requires_grad_()).square().sum().backward()
        assert_close(gradients_of(model), gradients_of(expected))

    @pytest.mark.parametrize("devices", [TWICE, MIXED, [FIRST, "cpu"]], ids=str)
    @pytest.mark.parametrize("place", ["cpu", FIRST])
    def test_from_a_loss_on_either_device(self, devices: list, place: str) -> None:
        model = replicable().to(home_of(devices))
        self.check(model, DataParallel(model, devices), lambda loss: loss.to(place))

    def test_two_in_one_graph(self) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double().to(GPU)
        first, second = DataParallel(model[0], TWICE), DataParallel(model[2], THREE_TIMES)
        self.check(model, lambda x: second(model[1](first(x))))

    def test_one_inside_of_another(self) -> None:
        model = nn.Sequential(replicable(), nn.Tanh()).to(GPU)
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
        model = replicable().to(home_of(devices))
        parallel = DataParallel(model, devices)
        self.check(model, lambda x: checkpoint(parallel, x, **options))

    @pytest.mark.parametrize("devices", [TWICE, MIXED], ids=str)
    def test_a_loss_and_its_gradient_in_one_backward(self, devices: list) -> None:
        model = replicable().to(home_of(devices))
        expected = copy.deepcopy(model).cpu()
        for call, place in ((DataParallel(model, devices), GPU), (expected, "cpu")):
            x = samples().to(place).requires_grad_()
            output = call(x)
            (slope,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
            (slope.square().sum().to(output.device) + output.square().sum()).backward()
        assert_close(gradients_of(model), gradients_of(expected))

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
                    (derivative,) = torch.autograd.grad(x.sin(), x, gradient)
                return derivative

        class Twice(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Again.apply(super().forward(Again.apply(x)))

        torch.manual_seed(3)
        model = Twice().to(GPU)
        self.check(model, DataParallel(model, TWICE))

    def test_from_several_threads_at_the_same_time(self) -> None:
        model, expected, errors = replicable().to(GPU), replicable(), []
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
        model, expected, fails = replicable().to(GPU), replicable(), [True]

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
        model, expected = replicable().to(GPU), replicable()
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
            with torch.autocast(KIND, dtype):
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

        with torch.autocast(KIND, torch.float16), torch.autocast("cpu", torch.bfloat16):
            DataParallel(Notes(8, 4), MIXED)(torch.randn(6, 8))
        assert seen == {"cpu": torch.bfloat16, KIND: torch.float16}

    def test_a_gradient_scaler(self) -> None:
        model = replicable().float().to(GPU)
        parallel, before = DataParallel(model, TWICE), copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(KIND)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(KIND, torch.float16):
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
                index = torch.accelerator.current_device_index()
                seen.append((index, torch.accelerator.current_stream()))
                return x + 1

        call, side = way(Notes(), THREE_TIMES), torch.Stream(GPU)
        before = current_stream()
        with side:
            call(torch.ones(6, device=GPU))
        assert seen == [(0, side)] * 3
        seen.clear()
        call(torch.ones(6, device=GPU))
        assert seen == [(0, before)] * 3

    @pytest.mark.parametrize("devices", [TWICE, MIXED, [FIRST, "cpu"]], ids=str)
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

        class SlowNet(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Slow.apply(super().forward(Slow.apply(x)))

        torch.manual_seed(3)
        model, expected = SlowNet().to(home_of(devices)), replicable()
        parallel = DataParallel(model, devices)
        stream = torch.Stream(GPU) if is_on_side else current_stream()
        stream.wait_stream(current_stream())
        with stream:
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
