"""Accelerate, with torch's wrapper, with ours in its place, and with a model parallel in place."""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import lockstep
from lockstep.errors import AlreadyParallel
from tests.clients.forks import Forks
from tests.clients.toy import Kind, Net, assert_ranks_as_alone, dataset, loader, parameters_of


def run_accelerate(kind: Kind, *, is_sharded: bool = False, **options: Any) -> Any:
    """Two micro-batches a step, clipped."""
    import accelerate
    from accelerate.utils import extract_model_from_parallel

    from lockstep.integrations import replace_torch_ddp

    if kind in ("wrapper", "in place"):
        lockstep.init()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **options)
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    # It would divide them anew: those of one process are twice as large.
    batches = loader(dataset())
    if kind == "wrapper":
        with replace_torch_ddp():
            model, optimizer = accelerator.prepare(net, optimizer)
        wrapper = getattr(model, "_orig_mod", model)
        assert isinstance(wrapper, lockstep.DistributedDataParallel)
    elif kind == "in place":
        model, optimizer = lockstep.parallelize(net), accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(net, optimizer)
    if is_sharded:
        optimizer = lockstep.shard_optimizer(optimizer)
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    assert len(state["state"]) == len([*net.parameters()])
    optimizer.load_state_dict(state)
    # Several forwards before their backwards, of which the last is reduced.
    (x, y), (more_x, more_y) = list(batches)[:2]
    with accelerator.no_sync(model):
        first, second = F.cross_entropy(model(x), y), F.cross_entropy(model(more_x), more_y)
        accelerator.backward(first)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(second)
    optimizer.step()
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    assert extract_model_from_parallel(model, keep_torch_compile=False) is net
    saved = [key.removeprefix("_orig_mod.") for key in accelerator.get_state_dict(model)]
    assert saved == list(net.state_dict())
    if kind in ("wrapper", "in place"):
        assert dist.get_backend() == "shm"
    return parameters_of(net)


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Any:
    return forks.run(run_accelerate, 1, "alone")[0]


@pytest.mark.parametrize("kind", ["torch", "wrapper", "in place"])
def test_accelerate_gives_what_one_process_gives(forks: Forks, alone: Any, kind: Kind) -> None:
    assert_ranks_as_alone(forks.run(run_accelerate, 2, kind), alone)


@pytest.mark.parametrize("kind", ["wrapper", "in place"])
def test_a_sharded_optimizer_gives_the_same(forks: Forks, alone: Any, kind: Kind) -> None:
    assert_ranks_as_alone(forks.run(run_accelerate, 2, kind, is_sharded=True), alone)


def test_a_compiled_model_gives_what_one_process_gives(forks: Forks, alone: Any) -> None:
    assert_ranks_as_alone(
        forks.run(run_accelerate, 2, "wrapper", dynamo_backend="aot_eager"), alone
    )


def prepare_twice() -> list[str]:
    import accelerate

    lockstep.init()
    accelerator = accelerate.Accelerator(cpu=True)
    texts = []
    for parallel in (lockstep.parallelize(Net()), lockstep.DistributedDataParallel(Net())):
        with pytest.raises(AlreadyParallel, match="replace_torch_ddp") as caught:
            accelerator.prepare(parallel)
        texts.append(str(caught.value))
    ignored = Net()
    lockstep.parallelize(ignored.inner)
    names = [name for name, _ in ignored.named_parameters() if name.startswith("inner.")]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        ignored, names
    )
    accelerator.prepare(ignored)
    return texts


def test_a_model_that_is_parallel_is_not_wrapped_in_torchs_as_well(forks: Forks) -> None:
    for texts in forks.run(prepare_twice, 2):
        assert [text.split()[1] for text in texts] == ["Net", "DistributedDataParallel"]


def launch_by_accelerate() -> None:
    import accelerate

    accelerate.debug_launcher(launched_by_accelerate, num_processes=2)


def launched_by_accelerate() -> None:
    import accelerate

    accelerator = accelerate.Accelerator()
    world = lockstep.init(timeout=timedelta(seconds=30))
    assert (world.rank, world.world_size) == (accelerator.process_index, 2)
    net = lockstep.parallelize(Net())
    net(torch.full((2, 6), float(world.rank))).sum().backward()
    assert float(net.outer.bias.grad.sum()) == 6.0


def test_init_finds_the_group_of_debug_launcher(forks: Forks) -> None:
    forks.run(launch_by_accelerate, 1)


def global_batches() -> list[int]:
    import accelerate

    lockstep.init()
    accelerator = accelerate.Accelerator(cpu=True)
    ours = accelerator.prepare(lockstep.DataLoader(dataset(), 5, shuffle=True, seed=0))
    return [len(lockstep.reduce(x, "cat")) for x, _ in ours]


def resume(folder: str) -> None:
    """Two batches of the second epoch, and the rest of it by another loader."""
    import accelerate

    lockstep.init()

    def prepare() -> tuple[Any, Any]:
        accelerator = accelerate.Accelerator(cpu=True)
        ours = lockstep.DataLoader(dataset(), 5, shuffle=True, seed=0)
        return accelerator, accelerator.prepare(ours)

    def batches(loader: Any, number: int | None = None) -> list[Any]:
        return [x.tolist() for x, _ in itertools.islice(loader, number)]

    _, whole = prepare()
    epochs = [batches(whole) for _ in range(3)]
    accelerator, stopped = prepare()
    batches(stopped)
    first = batches(stopped, 2)
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    accelerator, resumed = prepare()
    accelerator.load_state(folder)
    assert first + batches(resumed) == epochs[1]
    assert batches(resumed) == epochs[2]


def test_saved_state_has_our_loaders(forks: Forks, tmp_path: Path) -> None:
    forks.run(resume, 2, str(tmp_path))


def test_our_loader_has_the_same_global_batches(forks: Forks) -> None:
    alone = forks.run(global_batches, 1)[0]
    assert alone[0] == 5
    assert forks.run(global_batches, 2) == [alone, alone]
