"""``DataParallel`` and its primitives on GPUs. Skipped where there is none; one is enough.

One that is given twice is two devices to them, and the CPU may be one of the devices.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.nn import DataParallel
from tests.gpu.accelerator import KIND, NUM_DEVICES, ONLY_CUDA
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
    by_function,
    device_has_begun,  # noqa: F401
    gradients_of,
    home_of,
    replicable,
    samples,
)

pytestmark = MARKS

DEVICES = pytest.mark.parametrize(
    "devices",
    [[FIRST], TWICE, THREE_TIMES, [0, 0], MIXED, [FIRST, "cpu"], [-1, 0, 0, -1]],
    ids=str,
)
EXAMPLES = Path(__file__).parents[2] / "examples"


class TestResults:
    """They are those of the module alone, on the CPU."""

    @WAYS
    @DEVICES
    @pytest.mark.parametrize("rows", [11, 1, 0])
    def test_outputs_and_gradients(self, way, devices: list, rows: int) -> None:
        home = home_of(devices)
        model, expected = replicable().to(home), replicable()
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
        call, expected = way(replicable().to(home), devices), replicable()(samples())
        for place in ("cpu", FIRST):
            x = samples().to(place).requires_grad_()
            call(x).sum().backward()
            assert x.grad.device == x.device
            torch.testing.assert_close(call(x).cpu(), expected, rtol=1e-10, atol=1e-10)
        pinned = call(samples().pin_memory())
        torch.testing.assert_close(pinned.cpu(), expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("output_device", ["cpu", -1, 0, FIRST])
    def test_outputs_are_joined_where_they_are_wanted(self, output_device) -> None:
        model, expected = replicable().to(GPU), replicable()
        output = DataParallel(model, TWICE, output_device)(samples())
        assert (output.device == GPU) == (output_device not in ("cpu", -1))
        output.sum().backward()
        expected(samples()).sum().backward()
        assert_close(gradients_of(model), gradients_of(expected))

    def test_the_same_bits_every_time(self) -> None:
        def run() -> list[torch.Tensor | None]:
            model = replicable().to(GPU)
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
            model, expected = replicable().to(home_of(devices)), replicable()
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


class TestAsTorchs:
    """Beside torch's ``nn.DataParallel`` on one GPU, given once."""

    @ONLY_CUDA
    def test_by_default_on_all_gpus(self) -> None:
        assert DataParallel(replicable()).device_ids == nn.DataParallel(replicable()).device_ids

    @ONLY_CUDA
    @pytest.mark.parametrize("devices", [[0], [FIRST]])
    def test_one_gpu(self, devices: list) -> None:
        mine, theirs = replicable(), replicable()
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

    @ONLY_CUDA
    def test_one_gpu_given_twice_is_torchs_given_once(self) -> None:
        mine, theirs = replicable().to(GPU), replicable().to(GPU)
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
            DataParallel(replicable(), TWICE)(samples())
        with pytest.raises(RuntimeError, match=rf"is on {FIRST}\. Move the module there"):
            DataParallel(replicable().to(GPU), MIXED)(samples())

    def test_an_accelerator_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(ValueError, match="is to be an accelerator's index"):
            DataParallel(replicable(), [0, NUM_DEVICES])

    def test_by_default_all_gpus(self) -> None:
        model = DataParallel(replicable().to(GPU))
        assert model.device_ids == list(range(NUM_DEVICES))

    @ONLY_CUDA
    @pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs")
    @pytest.mark.parametrize("devices", [[0, 1], [1, 0], [0, 1, 0]])
    def test_two_gpus(self, devices: list[int]) -> None:
        home = torch.device(KIND, devices[0])
        mine, theirs = replicable().to(home), replicable().to(home)
        model, other = DataParallel(mine, devices), nn.DataParallel(theirs, devices[:2])
        for x in (samples(), samples().to(GPU), samples().to(f"{KIND}:1")):
            output, expected = model(x), other(x)
            assert output.device == expected.device == home
            torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
            output.square().sum().backward()
            expected.square().sum().backward()
            assert_close(gradients_of(mine), gradients_of(theirs))


@pytest.mark.parametrize("devices", [(FIRST, FIRST), (FIRST, "cpu"), (FIRST,)])
@pytest.mark.parametrize("program", ["data_parallel_parts.py", "data_parallel_by_hand.py"])
def test_the_examples_run_on_a_gpu(program: str, devices: tuple[str, ...]) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / program), *devices],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
