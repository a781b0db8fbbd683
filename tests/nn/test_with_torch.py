"""What torch offers around a model in training does with our wrapper what it does without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.nn.parallel import net, parts
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of, values_of
from tests.training import train

OurDDP = lockstep.DistributedDataParallel
WHOLE = parts(2).flatten(0, 1)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Those that there are: not all layers are used."""
    return [gradient for gradient in gradients_of(model) if gradient is not None]


def launch(body: Callable[[lockstep.World], Any], world_size: int = 2) -> list[Any]:
    return lockstep.launch(body, world_size, ranks="threads")


def of_the_whole_batch(model: nn.Module | None = None) -> list[torch.Tensor]:
    alone = model or net()
    alone(WHOLE).square().mean().backward()
    return gradients(alone)


def compare_with_torchs(
    body: Callable[[type[nn.Module], lockstep.World], Sequence[torch.Tensor]],
) -> None:
    """Compare what ``body`` gives with our wrapper and with torch's, bit for bit."""

    def both(world: lockstep.World) -> None:
        ours, theirs = body(OurDDP, world), body(TorchDDP, world)
        assert len(ours) == len(theirs) > 0
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.dtype is other.dtype
            assert torch.equal(mine, other)

    launch(both)


@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast(where: str) -> None:
    def body(wrap: type[nn.Module], world: lockstep.World) -> list[torch.Tensor]:
        inner = net().float()
        if where == "inside":
            inner.forward = torch.autocast("cpu", torch.bfloat16)(inner.forward)
        model = wrap(inner, find_unused_parameters=True)
        x = parts(2)[world.rank].float()
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
                out = model(x)
                assert out.dtype is torch.bfloat16
                loss = out.float().square().mean()
            loss.backward()
        return gradients(model)

    compare_with_torchs(body)


def test_a_gradient_scaler_skips_the_step_of_every_rank() -> None:
    def body(wrap: type[nn.Module], world: lockstep.World) -> list[torch.Tensor]:
        model = wrap(net().float(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for step in range(5):
            before = model.module.first.weight.detach().clone()
            # One rank's overflow is everyone's.
            factor = float("inf") if step == 3 and world.rank == 1 else 1.0
            optimizer.zero_grad()
            loss = factor * model(parts(2)[world.rank].float()).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model.module.first.weight) == (step == 3)
            scales.append(scaler.get_scale())
        assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**10, 2.0**10]
        return [p.detach() for p in model.parameters()]

    compare_with_torchs(body)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_clipped_by_their_norm(set_to_none: bool, foreach: bool) -> None:
    def train_clipped(model: nn.Module, data: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            (10 * model(data).square().mean()).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach))
            optimizer.step()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return [*norms, *[p.detach() for p in model.parameters()], *gradients(model)]

    alone = train_clipped(net(), WHOLE)

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        return train_clipped(OurDDP(net(), process_group=group), parts(2)[rank])

    for mine in run_ranks(2, body):
        assert_same(mine, alone)


@pytest.mark.parametrize("keepers", [(0, 1), (0,)], ids=["every rank", "rank 0 alone"])
@pytest.mark.parametrize("of", ["the wrapper", "the model inside"])
def test_a_moving_average_of_the_model(of: str, keepers: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"net": net(), "norm": nn.BatchNorm1d(3).double()})

    def train_averaged(
        model: nn.Module, inner: nn.Module, average: nn.Module | None, data: torch.Tensor
    ) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            inner["net"](data).square().mean().backward()
            optimizer.step()
            if average is not None:
                average.update_parameters(model)

    def averaged(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=True)

    alone = build()
    expected = averaged(alone)
    train_averaged(alone, alone, expected, WHOLE)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = build()
        model = OurDDP(inner, process_group=group)
        source = model if of == "the wrapper" else inner
        average = averaged(source) if rank in keepers else None
        train_averaged(source, inner, average, parts(2)[rank])
        if average is not None:
            assert_same(list(average.parameters()), list(expected.parameters()))
            kept = average.module
            kept = kept.module if of == "the wrapper" else kept
            with torch.no_grad():  # alone
                kept["net"](parts(2)[rank])
            assert int(average.n_averaged) == 3

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_an_optimizer_whose_state_is_shared_out() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    alone = net()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), [WHOLE] * 4)
    expected = values_of(alone)

    def body(world: lockstep.World) -> None:
        model = OurDDP(net())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        train(model, optimizer, [parts(2)[world.rank]] * 4)
        assert_same(values_of(model), expected)
        num_local = sum(len(group["params"]) for group in optimizer.optim.param_groups)
        assert num_local < len(expected)
        optimizer.consolidate_state_dict(to=0)
        if world.rank == 0:
            assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(expected)

    launch(body)


class Checkpointed(nn.Module):
    """Forgets what is between its layers, and uses one of them twice."""

    def __init__(self, inner: nn.Module, options: dict[str, Any] | None) -> None:
        super().__init__()
        self.inner = inner
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.inner.middle, self.inner.second, nn.functional.pad, self.inner.middle):
            arguments = ((0, 1),) if part is nn.functional.pad else ()
            if self.options is None:
                x = part(x, *arguments)
            else:
                x = checkpoint(part, x, *arguments, **self.options)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("where", ["inside", "around", "both"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_activation_checkpoints(use_reentrant: bool, where: str, options: dict[str, Any]) -> None:
    expected = of_the_whole_batch(Checkpointed(net(), None))
    # To keep the random state takes a mutex that a rank's thread would hold while it waits.
    chosen = {"use_reentrant": use_reentrant, "preserve_rng_state": False}

    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = Checkpointed(net(), chosen if where != "around" else None)
        model = OurDDP(inner, process_group=group, bucket_cap_mb=0.0002, **options)
        x = parts(2)[rank].requires_grad_()
        for _ in range(3):
            model.zero_grad()
            out = model(x) if where == "inside" else checkpoint(model, x, **chosen)
            out.square().mean().backward()
            assert_same(gradients(model), expected)

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_that_makes_a_graph_gives_reduced_gradients() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        for _ in range(2):
            model.zero_grad()
            model(parts(2)[rank]).square().mean().backward(create_graph=True)
            assert_same([g.detach() for g in gradients(model)], of_the_whole_batch())

    run_ranks(2, body)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that has gradients in it: of the output by the input, and by a parameter."""
    x = x.clone().requires_grad_()
    out = model(x)
    (by_input,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + by_input.square().sum(1).mean()


def test_a_loss_made_of_gradients() -> None:
    alone = net()
    penalty(alone, WHOLE).backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        for _ in range(2):
            model.zero_grad()
            penalty(model, parts(2)[rank]).backward()
            assert_same(gradients(model), gradients(alone))

    run_ranks(2, body)


def test_autograd_grad_gives_each_ranks_own_and_waits_for_none() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        if rank == 0:  # alone
            local = torch.autograd.grad(model(parts(2)[0]).square().mean(), model.second.weight)
            alone = net()
            theirs = torch.autograd.grad(alone(parts(2)[0]).square().mean(), alone.second.weight)
            assert_same(local, theirs)
            assert model.second.weight.grad is None
        model(parts(2)[rank]).square().mean().backward()
        assert_same(gradients(model), of_the_whole_batch())

    run_ranks(2, body)


def test_a_backward_for_some_parameters_leaves_the_others() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group)
        for _ in range(2):
            model.zero_grad()
            loss = model(parts(2)[rank]).square().mean()
            loss.backward(inputs=[model.second.weight, model.first.bias])
            used = {name for name, p in model.module.named_parameters() if p.grad is not None}
            assert used == {"second.weight", "first.bias"}
            assert_same([model.second.weight.grad], [alone.second.weight.grad])
            assert_same([model.first.bias.grad], [alone.first.bias.grad])

    alone = net()
    of_the_whole_batch(alone)
    run_ranks(2, body)


@pytest.mark.parametrize("when", ["before", "after"])
def test_weights_that_are_computed_from_others(when: str) -> None:
    def change(model: nn.Module) -> None:
        parametrizations.weight_norm(model.first)
        parametrizations.weight_norm(model.second)

    expected = net()
    change(expected)
    of_the_whole_batch(expected)

    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = net()
        if when == "before":
            change(inner)
        model = OurDDP(inner, process_group=group)
        if when == "after":
            change(inner)
        for _ in range(2):
            model.zero_grad()
            model(parts(2)[rank]).square().mean().backward()
            assert_same(gradients(model), gradients(expected))

    run_ranks(2, body)
