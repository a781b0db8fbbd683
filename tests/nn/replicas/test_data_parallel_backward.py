"""``DataParallel``: backwards of replicas, and the modes that they run in."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.nn import DataParallel
from tests.nn.replicas.nets import TWO, Net, batch, replicable
from tests.same import assert_same, assert_same_gradients, gradients_of


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
        module, expected = replicable(), replicable()
        loss, other = DataParallel(module, TWO)(batch()).sum(), expected(batch()).sum()
        for one in (loss, other):
            one.backward(retain_graph=True)
            one.backward()
        assert_same_gradients(module, expected)
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()

    def test_several_forwards_before_their_backwards(self) -> None:
        module, expected = replicable(), replicable()
        model = DataParallel(module, TWO)
        losses = [[m(batch(rows)).square().sum() for rows in (5, 6)] for m in (model, expected)]
        for pair in losses:
            pair[1].backward()
            pair[0].backward()
        assert_same_gradients(module, expected)

    def test_autograd_grad(self) -> None:
        module, expected = replicable(), replicable()
        x, y = batch().requires_grad_(), batch().requires_grad_()
        mine = torch.autograd.grad(DataParallel(module, TWO)(x).sum(), [x, module.first.weight])
        theirs = torch.autograd.grad(expected(y).sum(), [y, expected.first.weight])
        assert_same(mine, theirs)
        assert gradients_of(module) == [None] * 4

    def test_a_gradient_penalty(self) -> None:
        module, expected = replicable(), replicable()
        for model, bare in ((DataParallel(module, TWO), module), (expected, expected)):
            for _ in range(2):
                x = batch().requires_grad_()
                (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                (gradient.norm(dim=1) - 1).square().mean().backward()
            bare.of_input = x.grad
        assert_same(
            [*gradients_of(module)[:2], module.of_input],
            [*gradients_of(expected)[:2], expected.of_input],
        )
        assert module.second.bias.grad is None

    @pytest.mark.parametrize("allow_unused", [True, False])
    def test_second_and_third_derivatives(self, allow_unused: bool) -> None:
        found = []
        for model in (DataParallel(replicable(), TWO), replicable()):
            x = batch().requires_grad_()
            last = model(x).sum()
            for _ in range(3):
                (last,) = torch.autograd.grad(
                    last.square().sum(), x, create_graph=True, allow_unused=allow_unused
                )
                found.append(last)
        assert_same(found[:3], found[3:])

    def test_derivatives_of_derivatives_are_right_numerically(self) -> None:
        model, x = DataParallel(replicable(), TWO), batch().requires_grad_()
        parameters = tuple(model.parameters())
        assert torch.autograd.gradgradcheck(lambda x, *_: model(x), (x, *parameters))

    def test_a_backward_that_keeps_no_graph_may_be_differentiated(self) -> None:
        found = []
        for model in (DataParallel(replicable(), TWO), replicable()):
            x = batch().requires_grad_()
            loss = model(x).square().sum()
            (first,) = torch.autograd.grad(loss, x, retain_graph=True, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
            found.append([first, second, *torch.autograd.grad(loss, x)])
        assert_same(*found)

    @pytest.mark.parametrize("penalty_first", [True, False])
    def test_a_loss_and_its_gradient_in_one_backward(self, penalty_first: bool) -> None:
        found = []
        for module in (replicable(), replicable()):
            model = module if found else DataParallel(module, TWO)
            x = batch().requires_grad_()
            output = model(x)
            (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            terms = [gradient.square().sum(), output.exp().sum()]
            sum(terms if penalty_first else terms[::-1]).backward()
            found.append([x.grad, *gradients_of(module)])
            if not found[1:]:
                with pytest.raises(RuntimeError, match="retain_graph=True"):
                    output.sum().backward()
        assert_same(*found)

    def test_memory_is_free_again_after_second_derivatives(self) -> None:
        kept = []

        def exp(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            hidden = inputs[0].exp()
            kept.append(weakref.ref(hidden))
            return hidden

        module = replicable()
        module.second.register_forward_pre_hook(exp)
        x = batch().requires_grad_()
        output = DataParallel(module, TWO)(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (gradient.square().sum() + output.sum()).backward()
        del gradient
        gc.collect()
        assert [reference() for reference in kept] == [None, None]

    def test_second_derivatives_through_replicas_in_replicas_and_means(self) -> None:
        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = DataParallel(replicable(), TWO)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return lockstep.mean(self.net(x).square())

        found = []
        for model in (DataParallel(Loss(), TWO), lambda x: replicable()(x).square().mean()):
            x = batch().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x), x, create_graph=True)
            found.append(torch.autograd.grad(gradient.square().sum(), x))
        assert_same(*found)

    def test_a_failed_backward_does_not_spoil_the_next(self) -> None:
        module, expected = replicable(), replicable()
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
        assert_same_gradients(module, expected)

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_checkpoints_inside_and_around(self, reentrant: bool) -> None:
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}

        class Inside(Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(super().forward, x, **options)

        expected, around = replicable(), replicable()
        inside = Inside()
        inside.load_state_dict(around.state_dict())
        expected(batch().requires_grad_()).sum().backward()
        DataParallel(inside, TWO)(batch().requires_grad_()).sum().backward()
        checkpoint(DataParallel(around, TWO), batch().requires_grad_(), **options).sum().backward()
        assert_same_gradients(inside, expected)
        assert_same_gradients(around, expected)

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
        model = DataParallel(replicable(), TWO)
        with torch.no_grad():
            assert not model(batch()).requires_grad
        with torch.inference_mode():
            assert model(batch()).is_inference()
        assert model(batch()).requires_grad

    def test_a_first_call_in_inference_mode(self) -> None:
        module, expected = replicable(), replicable()
        model = DataParallel(module, TWO)
        with torch.inference_mode():
            model(batch())
        for one in (model, expected):
            one(batch()).sum().backward()
        assert_same_gradients(module, expected)

    def test_autocast(self) -> None:
        layer = nn.Linear(4, 4)
        model, x = DataParallel(layer, TWO), batch().float()
        with torch.autocast("cpu", torch.bfloat16):
            output, expected = model(x), layer(x)
        assert output.dtype is torch.bfloat16
        assert torch.equal(output, expected)
        output.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
