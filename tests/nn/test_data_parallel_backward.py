"""``DataParallel``: backwards of replicas, and the modes that they run in."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.nn.replicas import DataParallel, data_parallel
from tests.nn.test_data_parallel import TWO, Net, assert_same, batch, gradients, net


class TestBackward:
    """Each replica's runs in its own thread; for the caller they are one function."""

    def test_backwards_run_at_the_same_time(self) -> None:
        barrier = threading.Barrier(2)

        class Meets(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                barrier.wait(20)
                return gradient

        class Meeting(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return Meets.apply(x)

        x = torch.ones(2, requires_grad=True)
        DataParallel(Meeting(), TWO)(x).sum().backward()
        assert x.grad.tolist() == [1, 1]

    def test_a_graph_may_be_kept(self) -> None:
        module, expected = net(), net()
        loss, other = DataParallel(module, TWO)(batch()).sum(), expected(batch()).sum()
        for one in (loss, other):
            one.backward(retain_graph=True)
            one.backward()
        assert_same(gradients(module), gradients(expected))
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()

    def test_several_forwards_before_their_backwards(self) -> None:
        module, expected = net(), net()
        model = DataParallel(module, TWO)
        losses = [[m(batch(rows)).square().sum() for rows in (5, 6)] for m in (model, expected)]
        for pair in losses:
            pair[1].backward()
            pair[0].backward()
        assert_same(gradients(module), gradients(expected))

    def test_autograd_grad(self) -> None:
        module, expected = net(), net()
        x, y = batch().requires_grad_(), batch().requires_grad_()
        mine = torch.autograd.grad(DataParallel(module, TWO)(x).sum(), [x, module.first.weight])
        theirs = torch.autograd.grad(expected(y).sum(), [y, expected.first.weight])
        assert_same(mine, theirs)
        assert gradients(module) == [None] * 4

    def test_a_second_derivative_says_what_can_be_used_instead(self) -> None:
        module, x = net(), batch().requires_grad_()
        (gradient,) = torch.autograd.grad(DataParallel(module, TWO)(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="data_parallel"):
            gradient.square().sum().backward()
        (gradient,) = torch.autograd.grad(data_parallel(module, x, TWO).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        expected, y = net(), batch().requires_grad_()
        (other,) = torch.autograd.grad(expected(y).sum(), y, create_graph=True)
        other.square().sum().backward()
        assert_same(gradients(module)[:2], gradients(expected)[:2])

    def test_a_failed_backward_does_not_spoil_the_next(self) -> None:
        module, expected = net(), net()
        model, fails = DataParallel(module, TWO), [True]

        def hook(gradient: torch.Tensor) -> None:
            if fails and len(gradient) == 3:  # the second replica's
                raise ArithmeticError("no gradient")

        module.first.register_forward_hook(
            lambda _, __, output: output.register_hook(hook) and None
        )
        with pytest.raises(ArithmeticError, match="no gradient") as caught:
            model(batch()).sum().backward()
        assert "replica 1 on cpu" in caught.value.__notes__[0]
        fails.clear()
        model(batch()).sum().backward()
        expected(batch()).sum().backward()
        assert_same(gradients(module), gradients(expected))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoints_inside_and_around(self, reentrant: bool) -> None:
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}

        class Inside(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, x, **options)

        expected, around = net(), net()
        inside = Inside()
        inside.load_state_dict(around.state_dict())
        expected(batch().requires_grad_()).sum().backward()
        DataParallel(inside, TWO)(batch().requires_grad_()).sum().backward()
        checkpoint(DataParallel(around, TWO), batch().requires_grad_(), **options).sum().backward()
        assert_same(gradients(inside), gradients(expected))
        assert_same(gradients(around), gradients(expected))

    def test_memory_is_free_again_after_it(self) -> None:
        kept = []

        class Keeps(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4).double()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = self.layer(x).exp()
                kept.append(weakref.ref(hidden))
                return hidden * 2

        model = DataParallel(Keeps(), TWO)
        loss = model(batch()).sum()
        loss.backward()
        gc.collect()
        assert [reference() for reference in kept] == [None, None]


class TestModes:
    """What the caller is in, the replicas are in."""

    def test_no_grad_and_inference(self) -> None:
        model = DataParallel(net(), TWO)
        with torch.no_grad():
            assert not model(batch()).requires_grad
        with torch.inference_mode():
            assert model(batch()).is_inference()
        assert model(batch()).requires_grad

    def test_autocast(self) -> None:
        layer = nn.Linear(4, 4)
        model, x = DataParallel(layer, TWO), batch().float()
        with torch.autocast("cpu", torch.bfloat16):
            output, expected = model(x), layer(x)
        assert output.dtype is torch.bfloat16
        assert torch.equal(output, expected)
        output.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
