"""The simulated device itself: what it finds, and what it has to be for that."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from tests.simulated import control

KIND = control.KIND
GPU = torch.device(KIND, 0)


def test_what_is_read_too_early_is_wrong_and_what_is_waited_for_is_right() -> None:
    side = torch.Stream(KIND)
    x = torch.ones(4, device=GPU)
    torch.accelerator.synchronize()
    with control.delayed("0,lazy"):
        with side:
            y = x * 2
        early = y.clone()
        torch.accelerator.current_stream().synchronize()
        assert early.ne(2).all()
        torch.accelerator.current_stream().wait_stream(side)
        assert y.eq(2).all()


def test_a_copy_for_which_nobody_waits_comes_late() -> None:
    with control.delayed("lazy"):
        there = torch.ones(4, device=GPU).to("cpu", non_blocking=True)
        before = there.sum().item()
        torch.accelerator.synchronize()
        assert before != 4 == there.sum().item()


def freed_while_a_stream_reads_it(*, is_recorded: bool) -> torch.Tensor:
    side = torch.Stream(KIND)
    with control.delayed("0,lazy"):
        x = torch.ones(100, device=GPU)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x + 1
        if is_recorded:
            x.record_stream(side)
        del x
        torch.full((100,), 5.0, device=GPU)  # takes the memory, unless it is still in use
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        return y.cpu()


def test_memory_is_used_again_in_the_order_of_its_own_stream_alone() -> None:
    assert freed_while_a_stream_reads_it(is_recorded=True).eq(2).all()
    assert freed_while_a_stream_reads_it(is_recorded=False).ne(2).all()


def test_waits_of_the_host_are_counted_by_line() -> None:
    x = torch.ones(3, device=GPU)
    with control.counted_host_waits() as waits:
        x.add_(1).mul_(2)
        assert not waits
        x.sum().item()
        torch.nonzero(x)
    assert [name.partition(":")[0] for name in waits] == ["test_device.py"] * 2
    assert [name.partition("(")[2] for name in waits] == ["item)", "aten::nonzero)"]


def test_each_device_draws_its_own_numbers() -> None:
    torch.manual_seed(3)
    first = torch.rand(5, device=f"{KIND}:0")
    second = torch.rand(5, device=f"{KIND}:1")
    assert torch.equal(first.cpu(), second.cpu())  # as GPUs do after the same seed
    state = torch.get_device_module().get_rng_state(f"{KIND}:1")
    third = torch.rand(5, device=f"{KIND}:1")
    torch.get_device_module().set_rng_state(state, f"{KIND}:1")
    assert torch.equal(third, torch.rand(5, device=f"{KIND}:1"))


def test_a_generator_of_a_device_is_saved_and_loaded(tmp_path: Path) -> None:
    generators = [torch.Generator(device=f"{KIND}:1") for _ in range(2)]
    torch.rand(3, device=f"{KIND}:1", generator=generators[0])
    lockstep.save(tmp_path, generator=generators[0])
    lockstep.load(tmp_path, generator=generators[1])
    first, second = (torch.rand(3, device=f"{KIND}:1", generator=each) for each in generators)
    assert torch.equal(first, second)


def test_a_copy_of_a_parameter_is_on_its_device() -> None:
    tensor = torch.arange(3.0, device=f"{KIND}:1")
    copied = copy.deepcopy(nn.Parameter(tensor))
    assert copied.device == tensor.device
    assert torch.equal(copied, tensor)


def test_it_is_torchs_accelerator_and_has_pinned_memory_and_autocast() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(KIND)
    assert torch.accelerator.device_count() == control.NUM_DEVICES
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned()
    with torch.accelerator.device_index(1):
        used, x = torch.accelerator.memory_allocated(), torch.empty(1000, device=KIND)
        assert torch.accelerator.memory_allocated() == used + 4096
        assert torch.accelerator.max_memory_allocated() >= used + 4096
        free, total = torch.accelerator.get_memory_info()
        assert (x.device.index, total - free) == (1, used + 4096)
    with torch.autocast(KIND, torch.bfloat16):
        assert (torch.ones(2, 2, device=GPU) @ torch.ones(2, 2, device=GPU)).dtype == torch.bfloat16


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=f"{KIND}:0") + torch.ones(2, device=f"{KIND}:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device=f"{KIND}:{control.NUM_DEVICES}")


def sums(world: lockstep.World) -> tuple[float, float, int]:
    """What is read before the end of an all-reduce, and after it; and how often the host waited."""
    x = torch.full((8,), world.rank + 1.0, device=world.device)
    torch.accelerator.synchronize()
    with control.delayed("0,lazy"), control.counted_host_waits() as waits:
        work = dist.all_reduce(x, async_op=True)
        early = x.clone()
        work.wait()
        late = x.clone()
        num_waits = waits.total()
        return early.sum().item(), late.sum().item(), num_waits


@pytest.mark.forks
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_block_streams_and_never_the_host(world_size: int) -> None:
    if torch.accelerator.device_count() < world_size:
        pytest.skip("needs a device for each rank")
    total = sum(8.0 * (rank + 1) for rank in range(world_size))
    for rank, found in enumerate(lockstep.launch(sums, world_size)):
        assert found == (8.0 * (rank + 1), total, 0)
