"""torch's communication hooks, unmodified, give over our wrapper what they give over torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
    register_ddp_comm_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.counts import pairs
from tests.nn.hooked import FEATURES, SEVERAL_BUCKETS_MB, OurDDP, hooked_net
from tests.processes import Processes, processes
from tests.same import assert_same

# What makes a model's reduction another one; given the wrapper and the group.
Register = Callable[[nn.Module, dist.ProcessGroup], object]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    with processes(2) as started:
        yield started


def hook(function: Callable[..., Any]) -> Register:
    """Register ``function`` with the group as its state."""
    return lambda model, group: model.register_comm_hook(group, function)


def stateful(
    state_of: Callable[[dist.ProcessGroup], Any], function: Callable[..., Any]
) -> Register:
    return lambda model, group: model.register_comm_hook(state_of(group), function)


def _power(**options: Any) -> Callable[[dist.ProcessGroup], powerSGD_hook.PowerSGDState]:
    # From the third step on: by then buckets are what they stay.
    return lambda group: powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, **options)


def _local_sgd(**options: Any) -> Callable[[dist.ProcessGroup], Any]:
    def state_of(group: dist.ProcessGroup) -> Any:
        alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
        return post_localSGD_hook.PostLocalSGDState(group, alone, 2, **options)

    return state_of


def _then_the_optimizer(model: nn.Module, group: dist.ProcessGroup) -> None:
    from torch.distributed.optim import as_functional_optim

    state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.1))
    both = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(group, both)


def _fused(optimizer: type, **options: Any) -> Register:
    return lambda model, _: model._register_fused_optim(optimizer, 0.1, **options)


def _built_in(kind: dist.BuiltinCommHookType) -> Register:
    return lambda model, _: model._register_builtin_comm_hook(kind)


EXACT: dict[str, Register] = {
    "all-reduce": hook(default_hooks.allreduce_hook),
    "all-reduce, default group": stateful(lambda _: None, default_hooks.allreduce_hook),
    "built-in all-reduce": _built_in(dist.BuiltinCommHookType.ALLREDUCE),
}
LOSSY: dict[str, Register] = {
    "fp16": hook(default_hooks.fp16_compress_hook),
    "bf16": hook(default_hooks.bf16_compress_hook),
    "fp16 around": hook(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 around": hook(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
    "nothing": hook(debugging_hooks.noop_hook),
    "local SGD": stateful(_local_sgd(), post_localSGD_hook.post_localSGD_hook),
    "local SGD without": stateful(
        _local_sgd(post_local_gradient_allreduce=False), post_localSGD_hook.post_localSGD_hook
    ),
}
STEPPING: dict[str, Register] = {
    "then the optimizer": _then_the_optimizer,
    "fused sgd": _fused(torch.optim.SGD, momentum=0.9),
    "fused adam": _fused(torch.optim.Adam),
}
# PowerSGD draws from torch's one generator, which ranks that are threads would share. (Batched
# PowerSGD fails in torch 2.13 when it starts, whatever it runs over.)
POWER_SGD: dict[str, Register] = {
    "PowerSGD": stateful(_power(), powerSGD_hook.powerSGD_hook),
    "PowerSGD, rank 2, cold": stateful(
        _power(matrix_approximation_rank=2, warm_start=False), powerSGD_hook.powerSGD_hook
    ),
    "PowerSGD, same shapes together": stateful(
        _power(batch_tensors_with_same_shape=True), powerSGD_hook.powerSGD_hook
    ),
    # This is how fp16_compress_wrapper is shown in torch's documentation.
    "PowerSGD in fp16": stateful(
        _power(orthogonalization_epsilon=1e-3),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
}
# torch's wrapper runs it in C++, where it doesn't take what our groups' futures hold.
GLOO_ONLY: dict[str, Register] = {
    "built-in fp16": _built_in(dist.BuiltinCommHookType.FP16_COMPRESS),
}


def disguised(register: Register) -> Register:
    """As ``register``, for torch's wrapper, which refuses hooks named bf16 without NCCL."""

    def registers(model: nn.Module, group: dist.ProcessGroup) -> None:
        plain = model.register_comm_hook

        def under_another_name(state: Any, function: Callable[..., Any]) -> None:
            plain(state, lambda state, bucket: function(state, bucket))

        model.register_comm_hook = under_another_name
        register(model, group)
        del model.register_comm_hook

    return registers


def gradients_by_step(
    wrap: type[nn.Module],
    register: Register | None,
    dtype: torch.dtype,
    bucket_cap_mb: float | None,
    steps: int = 5,
) -> list[list[torch.Tensor]]:
    """Some steps on this rank's data: the gradients of each and, last, the parameters."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = wrap(hooked_net().to(dtype), bucket_cap_mb=bucket_cap_mb)
    if register is not None:
        (disguised(register) if wrap is TorchDDP else register)(model, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(2)
    seen = []
    for step in range(steps):
        batch = torch.randn(2, 4, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        model(batch[rank]).square().mean().backward()
        seen.append([p.grad.clone() for p in model.parameters()])
        if step:  # in the first one, buckets are not yet arranged as torch arranges them
            optimizer.step()
    return [*seen[1:], [p.detach().clone() for p in model.parameters()]]


def same(ours: list[list[torch.Tensor]], theirs: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, *pair)) for pair in zip(ours, theirs, strict=True))


def check_same_as_torchs(register: Register, dtype: torch.dtype, cap: float | None) -> bool:
    """Compare bits with torch's; return whether they are those that there are without a hook."""
    ours = gradients_by_step(OurDDP, register, dtype, cap)
    assert same(ours, gradients_by_step(TorchDDP, register, dtype, cap))
    return same(ours, gradients_by_step(OurDDP, None, dtype, cap))


CAPS = pytest.mark.parametrize(
    "cap", [None, SEVERAL_BUCKETS_MB], ids=["one bucket", "several buckets"]
)


@CAPS
@pytest.mark.parametrize("name", EXACT | LOSSY)
def test_torchs_hooks_do_what_they_do_with_torchs_wrapper(name: str, cap: float | None) -> None:
    def body(world: lockstep.World) -> None:
        dtype = torch.float64 if name in EXACT else torch.float32
        assert check_same_as_torchs((EXACT | LOSSY)[name], dtype, cap) == (name in EXACT)

    lockstep.launch(body, 2, ranks="threads")


def check_in_processes(
    path: str, rank: int, size: int, backend: str, name: str, cap: float | None
) -> None:
    # Not for the half hour that is usual: collectives in another order on each rank hang.
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=15),
    )
    everything = EXACT | LOSSY | STEPPING | POWER_SGD | GLOO_ONLY
    assert check_same_as_torchs(everything[name], torch.float32, cap) == (name in EXACT)


@pairs(
    "name, cap, backend",
    ["all-reduce", "fp16", *STEPPING],
    [None, SEVERAL_BUCKETS_MB],
    ["gloo", "shm"],
)
def test_torchs_hooks_between_processes(
    ranks: Processes, name: str, cap: float | None, backend: str
) -> None:
    ranks.run(check_in_processes, "", 2, backend, name, cap)


@CAPS
@pytest.mark.parametrize("name", GLOO_ONLY)
def test_torchs_hooks_over_gloo_alone(ranks: Processes, name: str, cap: float | None) -> None:
    ranks.run(check_in_processes, "", 2, "gloo", name, cap)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("name", POWER_SGD)
def test_power_sgd_of_one_bucket_does_what_it_does_with_torchs_wrapper(
    ranks: Processes, name: str, backend: str
) -> None:
    ranks.run(check_in_processes, "", 2, backend, name, None)


def check_power_sgd_of_several_buckets() -> None:
    # With as many vectors as a matrix has rows nothing is lost.
    state = _power(matrix_approximation_rank=32, min_compression_rate=0.01)
    register = stateful(state, powerSGD_hook.powerSGD_hook)
    ours = gradients_by_step(OurDDP, register, torch.float64, SEVERAL_BUCKETS_MB)
    exact = gradients_by_step(OurDDP, None, torch.float64, SEVERAL_BUCKETS_MB)
    torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)
    assert not same(ours, exact)


def test_power_sgd_of_several_buckets(ranks: Processes) -> None:
    """Its collectives follow each other in callbacks, in an order that ranks must agree on.

    With torch's wrapper they do over NCCL alone: over Gloo it hangs.
    """
    ranks.run(check_power_sgd_of_several_buckets, "shm", 2)


def in_the_form_of_nccl(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An ``all_gather`` whose future has what that of NCCL has: one tensor of all ranks' parts.

    That of Gloo has a list of them, with which torch's quantization hooks fail.
    """

    class Work:
        def __init__(self, work: dist.Work) -> None:
            self._work = work

        def get_future(self) -> torch.futures.Future:
            return self._work.get_future().then(lambda future: [torch.stack(future.value())])

    return lambda *args, **options: Work(plain(*args, **options))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max")
@pytest.mark.parametrize(
    "function",
    [
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
    ],
)
def test_torchs_quantization_hooks(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_gather", in_the_form_of_nccl(dist.all_gather))

    def body(world: lockstep.World) -> None:
        assert not check_same_as_torchs(hook(function), torch.float32, None)

    lockstep.launch(body, 2, ranks="threads")


@pytest.mark.parametrize(
    "kind", [kind for kind in DDPCommHookType if "QUANTIZE" not in kind.name], ids=lambda k: k.name
)
def test_hooks_are_registered_by_their_type(kind: DDPCommHookType) -> None:
    def register(model: nn.Module, group: dist.ProcessGroup) -> None:
        register_ddp_comm_hook(kind, model, group)

    def body(world: lockstep.World) -> None:
        # PowerSGD averages in its first thousand steps.
        exact = kind.name == "ALLREDUCE" or "POWER_SGD" in kind.name
        assert check_same_as_torchs(register, torch.float32, None) == exact

    lockstep.launch(body, 2, ranks="threads")


def train_with_zero(wrap: type[nn.Module], around: Callable[..., Any]) -> list[torch.Tensor]:
    """Train with an optimizer that steps, for its share of the parameters, during backward."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = wrap(hooked_net(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    model.register_comm_hook(None, around(default_hooks.allreduce_hook, model, optimizer))
    generator = torch.Generator().manual_seed(2)
    for _ in range(6):
        batch = torch.randn(2, 4, FEATURES, generator=generator, dtype=torch.float64)
        model.zero_grad()
        model(batch[dist.get_rank()]).square().mean().backward()
    return [p.detach().clone() for p in model.parameters()]


def check_zero(shard_buckets: bool) -> None:
    # Its import compiles with torch.jit, which warns.
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step

    around = functools.partial(hook_with_zero_step, shard_buckets=shard_buckets)
    ours = train_with_zero(OurDDP, around)
    assert all(map(torch.equal, ours, train_with_zero(TorchDDP, around)))
    assert not all(map(torch.equal, ours, hooked_net().parameters()))


@pytest.mark.parametrize("shard_buckets", [pytest.param(False, marks=pytest.mark.long), True])
def test_torchs_hook_of_a_sharded_optimizer(ranks: Processes, shard_buckets: bool) -> None:
    ranks.run(check_zero, "shm", 2, shard_buckets)


def after_some_steps(register: Register) -> list[torch.Tensor]:
    """Train with a hook on one rank; return the parameters."""
    model = OurDDP(hooked_net(), bucket_cap_mb=SEVERAL_BUCKETS_MB)
    register(model, lockstep.init().process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        batch = torch.randn(4, FEATURES, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


ALONE = EXACT | LOSSY | STEPPING | POWER_SGD | GLOO_ONLY


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", [name for name in ALONE if "local SGD" not in name])
def test_hooks_are_called_without_a_process_group_as_in_one_of_one_rank(name: str) -> None:
    alone = after_some_steps(ALONE[name])
    assert not dist.is_initialized()
    (in_a_group,) = lockstep.launch(
        lambda world: after_some_steps(ALONE[name]), nprocs=1, ranks="threads"
    )
    assert_same(alone, in_a_group, 1e-6)  # Adam divides by gradients that are rounding errors


def test_a_hook_without_a_process_group_may_call_init_and_collectives() -> None:
    def sum_by_hand(state, bucket):
        world = lockstep.init()
        assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
        gathered = [torch.empty_like(bucket.buffer())]
        dist.all_gather(gathered, bucket.buffer())
        dist.broadcast(gathered[0], 0)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(gathered[0])
        return future

    def no_hook(model: nn.Module, group: dist.ProcessGroup) -> None: ...

    world = lockstep.init()
    assert_same(after_some_steps(hook(sum_by_hand)), after_some_steps(no_hook))
    assert lockstep.init() is world
