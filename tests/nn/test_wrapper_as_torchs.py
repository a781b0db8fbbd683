"""What torch's ``nn.DataParallel`` does as a module around another one, on CPUs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.nn import DataParallel, data_parallel
from tests.nn.replicas.as_torchs import BOTH, THREE, TOLERANCE, TWO, Does
from tests.same import assert_same_gradients


class TestGradientModes:
    """What replicas find, and what derivatives there are."""

    @BOTH
    def test_replicas_find_the_callers_grad_mode(self, call) -> None:
        module = Does(lambda _, x: (x, torch.is_grad_enabled()))
        with torch.no_grad():
            assert call(module, (torch.ones(4),), {})[1] is False
        assert call(module, (torch.ones(4),), {})[1] is True

    @BOTH
    def test_a_module_may_take_derivatives_itself(self, call) -> None:
        class Slope(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(3, 1).double()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x.detach().requires_grad_()
                y = torch.tanh(self.layer(x)).sum()
                return torch.autograd.grad(y, x, create_graph=True)[0].square().sum(1)

        module, x = Slope(), torch.randn(5, 3, dtype=torch.float64)
        expected = copy.deepcopy(module)
        call(module, (x,), {}).sum().backward()
        expected(x).sum().backward()
        torch.testing.assert_close(
            module.layer.weight.grad, expected.layer.weight.grad, **TOLERANCE
        )

    def test_a_gradient_penalty(self) -> None:
        """torch's module can do it as well as its function; of ours, only the function can.

        What our module says is in test_a_second_derivative_says_what_can_be_used_instead.
        """
        layer, x = nn.Linear(4, 1), torch.ones(2, 4, requires_grad=True)
        output = data_parallel(layer, x, TWO)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        slope.mean().backward()
        assert layer.weight.grad.eq(0.25).all()
        assert layer.bias.grad is None or not layer.bias.grad.any()

    @BOTH
    def test_outputs_that_share_nothing_have_a_backward_each(self, call) -> None:
        module = Does(lambda self, x: (self.left(x).exp(), self.right(x).exp()))
        module.left, module.right = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
        expected, x = copy.deepcopy(module), torch.randn(5, 2, dtype=torch.float64)
        for outputs in (call(module, (x,), {}), expected(x)):
            for output in outputs:
                output.sum().backward()
        assert_same_gradients(module, expected)

    def test_zero_grad_in_forward_has_no_effect(self) -> None:
        """torch's warns of that. Ours doesn't: a module may call it without replicas, too."""

        class Clears(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.zero_grad()
                return super().forward(x)

        model = DataParallel(Clears(2, 1), TWO)
        for _ in range(2):
            model(torch.ones(4, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[8, 8]]


class TestHooks:
    """Those of the module run in each replica, those of the wrapper once."""

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
    def test_hooks_run_once_for_each_replica(self) -> None:
        seen: list[tuple[str, int]] = []
        layer = nn.Linear(2, 1)
        model = DataParallel(layer, TWO)
        for where, module in (("inside", layer), ("outside", model)):
            module.register_forward_pre_hook(lambda _, x, w=where: seen.append((w, len(x[0]))))
            module.register_forward_hook(lambda _, __, y, w=where: seen.append((w, len(y))))
            module.register_full_backward_hook(
                lambda _, __, d, w=where: seen.append((w, len(d[0]))) and None
            )
        model(torch.ones(5, 2)).sum().backward()
        assert sorted(seen) == [("inside", 2)] * 3 + [("inside", 3)] * 3 + [("outside", 5)] * 3
        assert seen[0] == ("outside", 5)

    def test_hooks_of_parameters_see_the_sum(self) -> None:
        """torch's does as well: it is the module's parameter that has the hook."""
        layer, seen = nn.Linear(2, 1), []
        layer.weight.register_hook(lambda gradient: seen.append(gradient.tolist()))
        layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
        DataParallel(layer, THREE)(torch.ones(5, 2)).sum().backward()
        assert seen == [[[5, 5]]] * 2


class TestWrapper:
    """The attributes, the parts and the life of the module ``DataParallel``."""

    def test_attributes_are_those_of_torchs(self) -> None:
        model = DataParallel(nn.Linear(2, 1), TWO, output_device=-1, dim=1)
        assert model.device_ids == [torch.device("cpu")] * 2
        assert (model.output_device, model.dim) == (-1, 1)
        assert model.src_device_obj == torch.device("cpu")
        assert isinstance(model, nn.Module)

    def test_names_have_module_before_them(self) -> None:
        """As torch's, but for the state dict, whose keys are the module's own."""
        model = DataParallel(nn.Linear(2, 1), TWO)
        assert [name for name, _ in model.named_parameters()] == ["module.weight", "module.bias"]
        assert [name for name, _ in model.named_modules()] == ["", "module"]
        assert list(model.state_dict()) == ["weight", "bias"]

    def test_modes_dtypes_and_gradients_are_set_through_it(self) -> None:
        model = DataParallel(nn.Sequential(nn.Linear(2, 1)), TWO)
        assert not model.eval().module[0].training
        model(torch.ones(4, 2)).sum().backward()
        model.zero_grad()
        model.double()
        model(torch.ones(4, 2).double()).sum().backward()
        assert model.module[0].weight.grad.tolist() == [[4, 4]]
        assert not any(p.requires_grad for p in model.requires_grad_(False).parameters())
        assert not model(torch.ones(4, 2).double()).requires_grad

    def test_one_device_calls_the_module_itself(self) -> None:
        modules = []
        module = Does(lambda self, x: modules.append(self) or x)
        DataParallel(module, ["cpu"])(torch.ones(4))
        assert modules == [module]

    def test_one_device_calls_the_module_itself_by_the_function(self) -> None:
        modules = []
        module = Does(lambda self, x: modules.append(self) or x)
        data_parallel(module, torch.ones(4), ["cpu"])
        assert modules == [module]

    def test_it_makes_no_reference_cycles(self) -> None:
        gc.collect()
        model = DataParallel(nn.Linear(1, 1), TWO)
        model(torch.ones(4, 1)).sum().backward()
        assert gc.collect() == 0
        data_parallel(model.module, torch.ones(4, 1), TWO).sum().backward()
        assert gc.collect() == 0

    def test_a_subclass_may_scatter_and_gather_in_another_way(self) -> None:
        """And replicate, and apply in parallel."""
        called = []

        class Other(DataParallel):
            def scatter(self, inputs, kwargs, device_ids):
                called.append("scatter")
                rows = [slice(0, 1), slice(1, None)]
                return [(inputs[0][part],) for part in rows], [kwargs or {} for _ in rows]

            def gather(self, outputs, output_device):
                called.append("gather")
                return outputs

            def replicate(self, module, device_ids):
                called.append("replicate")
                return super().replicate(module, device_ids)

            def parallel_apply(self, replicas, inputs, kwargs):
                called.append("parallel_apply")
                return super().parallel_apply(replicas, inputs, kwargs)

        outputs = Other(nn.Identity(), TWO)(torch.arange(4))
        assert [output.tolist() for output in outputs] == [[0], [1, 2, 3]]
        assert called == ["scatter", "replicate", "parallel_apply", "gather"]

    def test_its_own_parts_put_together_are_the_function(self) -> None:
        model, x = DataParallel(nn.Linear(2, 1), TWO), torch.randn(5, 2)
        inputs, kwargs = model.scatter((x,), None, model.device_ids)
        replicas = model.replicate(model.module, model.device_ids)
        outputs = model.parallel_apply(replicas, inputs, kwargs)
        torch.testing.assert_close(model.gather(outputs, "cpu"), model.module(x))
        with torch.no_grad():
            (replica, _) = model.replicate(model.module, model.device_ids)
        assert not any(p.requires_grad for p in replica.parameters())

    @pytest.mark.parametrize("devices", [TWO, THREE], ids=len)
    def test_training_is_that_without_it(self, devices: list[str]) -> None:
        module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        module = module.double()
        expected = copy.deepcopy(module)
        x, y = torch.randn(7, 1, 4, 4, dtype=torch.float64), torch.arange(7) % 3
        for model in (DataParallel(module, devices), expected):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        for mine, theirs in zip(module.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
