"""Replicas of DataParallel on devices that lag."""

from __future__ import annotations

import torch
from torch import nn

import lockstep
from tests.simulated import control


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(8, 8).to(control.KIND)


def test_replicas_work_on_the_stream_of_the_caller() -> None:
    module = linear()
    model = lockstep.DataParallel(module, [0, 0])
    x, side = torch.randn(4, 8, device=control.KIND), torch.Stream(control.KIND)
    model(x)
    torch.accelerator.synchronize()
    with control.delayed("0,lazy"), side:
        output = model(2 * x)
        side.synchronize()
    torch.accelerator.synchronize()
    torch.testing.assert_close(output, module(2 * x))


def test_a_copy_of_a_parameter_on_the_cpu_is_complete_when_its_replica_reads_it() -> None:
    module = linear()
    model = lockstep.DataParallel(module, [f"{control.KIND}:0", "cpu"])
    x = torch.randn(4, 8, device=control.KIND)
    model(x)
    torch.accelerator.synchronize()
    with control.delayed("lazy"):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        output = model(x)
        torch.accelerator.synchronize()
        torch.testing.assert_close(output, module(x))
