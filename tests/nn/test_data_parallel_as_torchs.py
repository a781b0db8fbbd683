"""What torch's ``nn.DataParallel`` and its primitives document or test, on CPUs.

What the other tests here show already isn't shown again. Where we differ by intent, it says so.
"""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lockstep.nn.replicas import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Does(nn.Module):
    """Calls a function, with itself as the first argument."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def by_module(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return DataParallel(module, TWO)(*inputs, **kwargs)


def by_function(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return data_parallel(module, inputs, TWO, module_kwargs=kwargs)


BOTH = pytest.mark.parametrize("call", [by_module, by_function])


def assert_same_training(mine: nn.Module, theirs: nn.Module) -> None:
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **TOLERANCE)


class TestArguments:
    """How replicas get what the caller gives."""

    @BOTH
    def test_several_inputs_a_number_and_a_keyword(self, call) -> None:
        def combine(_, x, y, factor, *, plus=None):
            return factor * (x * y if plus is None else x * y + plus)

        x, y, plus = torch.randn(3, 5, 2, dtype=torch.float64).unbind()
        for kwargs in ({}, {"plus": plus}):
            mine = [t.clone().requires_grad_() for t in (x, y)]
            theirs = [t.clone().requires_grad_() for t in (x, y)]
            output = call(Does(combine), (*mine, 2.5), kwargs)
            expected = combine(None, *theirs, 2.5, **kwargs)
            assert torch.equal(output, expected)
            output.sum().backward()
            expected.sum().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))

    @BOTH
    @pytest.mark.parametrize("unused", [[], {}, (), None])
    def test_keywords_alone_and_what_is_empty_in_them(self, call, unused) -> None:
        seen = []

        def double(_, *, given):
            seen.append(given["unused"])
            return given["x"] * 2

        x = torch.randn(5, 3)
        output = call(Does(double), (), {"given": {"x": x, "unused": unused}})
        assert torch.equal(output, x * 2)
        assert seen == [unused, unused]

    def test_the_functions_only_argument_needs_no_tuple(self) -> None:
        seen = []
        module = Does(lambda _, *args: seen.append(args))
        data_parallel(module, [3, 4], ["cpu"])
        data_parallel(module, None, ["cpu"])
        assert seen == [([3, 4],), ()]

    @BOTH
    def test_lists_and_dicts_are_each_replicas_own_and_objects_are_shared(self, call) -> None:
        class Log:
            lines = 0

        def write(_, x, names, log):
            names.append(len(x))
            log.lines += 1
            return names

        names, log = ["rows"], Log()
        assert call(Does(write), (torch.ones(3), names, log), {}) == ["rows", [2, 1]]
        assert names == ["rows"]
        assert log.lines == 2

    def test_devices_come_in_any_collection_and_order(self) -> None:
        layer, x = nn.Linear(3, 2), torch.randn(5, 3)
        cpu = torch.device("cpu")
        for devices in (("cpu", "cpu"), [cpu, "cpu"], ("cpu",), [-1, cpu]):
            for output_device in (None, "cpu", cpu, -1):
                output = data_parallel(layer, x, devices, output_device)
                torch.testing.assert_close(output, layer(x))
                output = DataParallel(layer, devices, output_device)(x)
                torch.testing.assert_close(output, layer(x))

    def test_another_dim_is_cut_and_joined(self) -> None:
        x = torch.randn(2, 5)
        module, sizes = Does(lambda _, x: sizes.append(x.size(1)) or x + 1), []
        assert torch.equal(data_parallel(module, x, THREE, dim=1), x + 1)
        assert sorted(sizes) == [1, 2, 2]


class TestOutputs:
    """What becomes of what replicas return."""

    @BOTH
    def test_nested_as_the_module_nests_it(self, call) -> None:
        def nest(_, x):
            return [x, (x.sin(), {"cos": x.cos(), "more": [x + 1]}), x]

        x = torch.randn(5, 2)
        output, expected = call(Does(nest), (x,), {}), nest(None, x)
        assert isinstance(output, list)
        assert isinstance(output[1], tuple)
        found = [output[0], output[1][0], output[1][1]["cos"], output[1][1]["more"][0], output[2]]
        wanted = [x, expected[1][0], expected[1][1]["cos"], expected[1][1]["more"][0], x]
        assert all(map(torch.equal, found, wanted))

    @BOTH
    def test_what_no_loss_uses_leaves_no_gradient(self, call) -> None:
        module = Does(lambda self, x: (self.used(x), self.other(x)))
        module.used, module.other = nn.Linear(2, 1), nn.Linear(2, 1)
        used, _ = call(module, (torch.ones(4, 2),), {})
        used.sum().backward()
        assert module.used.weight.grad.tolist() == [[4, 4]]
        assert module.other.weight.grad is None

    @BOTH
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_dtypes_stay(self, call, dtype) -> None:
        layer, x = nn.Linear(3, 2, dtype=dtype), torch.randn(4, 3, dtype=dtype)
        output = call(layer, (x,), {})
        assert output.dtype is dtype
        torch.testing.assert_close(output, layer(x))
        output.sum().backward()
        assert layer.weight.grad.dtype is dtype

    @BOTH
    def test_complex_parameters_and_inputs(self, call) -> None:
        layer = nn.Linear(3, 2, dtype=torch.complex128)
        expected, x = copy.deepcopy(layer), torch.randn(5, 3, dtype=torch.complex128)
        call(layer, (x,), {}).abs().square().sum().backward()
        expected(x).abs().square().sum().backward()
        assert_same_training(layer, expected)


class TestModules:
    """Kinds of modules that torch says something about."""

    @BOTH
    def test_recurrent_networks_may_flatten_their_parameters(self, call) -> None:
        class Tagger(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.lstm.flatten_parameters()
                return self.lstm(x)[0]

        module, x = Tagger().double(), torch.randn(5, 4, 3, dtype=torch.float64)
        expected = copy.deepcopy(module)
        with torch.no_grad():
            torch.testing.assert_close(call(module, (x,), {}), expected(x), **TOLERANCE)
        call(module, (x,), {}).square().sum().backward()
        expected(x).square().sum().backward()
        assert_same_training(module, expected)

    @BOTH
    def test_padded_sequences_keep_their_length_by_total_length(self, call) -> None:
        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.GRU(2, 3, batch_first=True)

            def forward(self, padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
                packed = pack_padded_sequence(padded, lengths, True, enforce_sorted=False)
                output, _ = self.rnn(packed)
                return pad_packed_sequence(output, True, total_length=padded.size(1))[0]

        module, padded = Encoder(), torch.randn(4, 6, 2)
        lengths = torch.tensor([2, 3, 6, 1])  # those of the first replica are all shorter
        output = call(module, (padded, lengths), {})
        torch.testing.assert_close(output, module(padded, lengths))

    @BOTH
    def test_parameters_in_dicts_and_lists(self, call) -> None:
        """torch's warns that there they are not replicated."""

        class Table(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(2))})
                self.listed = nn.ParameterList([nn.Parameter(torch.zeros(2))])
                self.layers = nn.ModuleDict({"a b": nn.Identity()})

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layers["a b"](x) * self.named["scale"] + self.listed[0]

        module = Table()
        call(module, (torch.full((5, 2), 3.0),), {}).sum().backward()
        assert module.named["scale"].grad.tolist() == [15, 15]
        assert module.listed[0].grad.tolist() == [5, 5]

    @BOTH
    def test_gradients_have_the_layout_of_their_parameters(self, call) -> None:
        module = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Conv2d(4, 4, 2))
        module[0].to(memory_format=torch.channels_last)
        expected, x = copy.deepcopy(module), torch.randn(4, 3, 5, 5)
        for _ in range(2):
            call(module, (x,), {}).sum().backward()
            expected(x).sum().backward()
            for mine, other in zip(module.parameters(), expected.parameters(), strict=True):
                assert mine.grad.stride() == mine.stride()
                torch.testing.assert_close(mine.grad, other.grad)

    @BOTH
    def test_autocast_that_the_module_switches_on_itself(self, call) -> None:
        class Casts(nn.Linear):
            @torch.autocast("cpu", torch.bfloat16)
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

        assert call(Casts(3, 2), (torch.ones(4, 3),), {}).dtype is torch.bfloat16

    def test_buffers_that_require_a_gradient_get_it(self) -> None:
        module = Does(lambda self, x: x * self.scale)
        module.register_buffer("scale", torch.ones(1, requires_grad=True))
        DataParallel(module, TWO)(torch.ones(4)).sum().backward()
        assert module.scale.grad.tolist() == [4]

    def test_buffers_that_require_a_gradient_get_it_by_the_function(self) -> None:
        module = Does(lambda self, x: x * self.scale)
        module.register_buffer("scale", torch.ones(1, requires_grad=True))
        data_parallel(module, torch.ones(4), TWO).sum().backward()
        assert module.scale.grad.tolist() == [4]


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

    @pytest.mark.parametrize(
        "call",
        [
            pytest.param(
                by_module,
            ),
            by_function,
        ],
    )
    def test_outputs_that_share_nothing_have_a_backward_each(self, call) -> None:
        module = Does(lambda self, x: (self.left(x).exp(), self.right(x).exp()))
        module.left, module.right = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
        expected, x = copy.deepcopy(module), torch.randn(5, 2, dtype=torch.float64)
        for outputs in (call(module, (x,), {}), expected(x)):
            for output in outputs:
                output.sum().backward()
        assert_same_training(module, expected)

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
        """In torch's, replicate() and parallel_apply(), too, which ours doesn't call itself."""
        called = []

        class Other(DataParallel):
            def scatter(self, inputs, kwargs, device_ids):
                called.append("scatter")
                rows = [slice(0, 1), slice(1, None)]
                return [(inputs[0][own],) for own in rows], [kwargs or {} for _ in rows]

            def gather(self, outputs, output_device):
                called.append("gather")
                return outputs

            def replicate(self, module, device_ids):
                called.append("replicate")

            def parallel_apply(self, replicas, inputs, kwargs):
                called.append("parallel_apply")

        outputs = Other(nn.Identity(), TWO)(torch.arange(4))
        assert [output.tolist() for output in outputs] == [[0], [1, 2, 3]]
        assert called == ["scatter", "gather"]

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


class TestPrimitives:
    """``replicate``, ``parallel_apply``, ``scatter`` and ``gather``, by themselves."""

    @pytest.mark.parametrize("devices", [("cpu", "cpu"), ["cpu", torch.device("cpu")]])
    def test_replicas_give_the_networks_outputs(self, devices) -> None:
        network, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(2, 3)
        for replica in replicate(network, devices):
            assert torch.equal(replica(x), network(x))

    def test_replicas_are_on_their_devices_with_their_buffers(self) -> None:
        devices = [*TWO, "meta"]
        replicas = replicate(nn.BatchNorm2d(3), devices)
        for device, replica in zip(devices, replicas, strict=True):
            tensors = [*replica.parameters(), *replica.buffers()]
            assert len(tensors) == 5
            assert {t.device.type for t in tensors} == {device}

    @pytest.mark.parametrize("detach", [True, False])
    def test_replicas_can_be_saved(self, detach: bool) -> None:
        network, file = nn.Linear(3, 2), io.BytesIO()
        torch.save(replicate(network, TWO, detach), file)
        file.seek(0)
        for loaded in torch.load(file, weights_only=False):
            assert torch.equal(loaded.weight, network.weight)

    def test_replicas_of_a_frozen_part_are_frozen(self) -> None:
        network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        network[0].requires_grad_(False)
        (replica,) = replicate(network, ["cpu"])
        assert [p.requires_grad for p in replica.parameters()] == [False, False, True, True]

    def test_replicas_have_the_mode_of_the_network(self) -> None:
        network = nn.Sequential(nn.Dropout())
        assert all(replica[0].training for replica in replicate(network, TWO))
        assert not any(replica[0].training for replica in replicate(network.eval(), TWO))

    @pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x]])
    def test_different_modules_are_applied_to_different_inputs(self, wrap) -> None:
        layers = nn.Linear(3, 2), nn.Linear(5, 4)
        inputs = torch.randn(2, 3), torch.randn(6, 5)
        outputs = parallel_apply(layers, [wrap(x) for x in inputs], None)
        for layer, x, output in zip(layers, inputs, outputs, strict=True):
            torch.testing.assert_close(output, layer(x))

    def test_an_error_keeps_its_type_and_words(self) -> None:
        """torch's makes a new one, "Caught KeyError in replica 0 on device 0", traceback and all.

        Ours is the error itself, with all its attributes, and a note that says where it was.
        """

        class Rare(KeyError):
            def __init__(self, one: str, other: int) -> None:
                super().__init__(one)
                self.other = other

        def fail(_, x):
            raise Rare("wonderful", 7)

        with pytest.raises(Rare, match="wonderful") as caught:
            parallel_apply([Does(fail), Does(fail)], [None, None])
        assert (caught.value.args, caught.value.other) == (("wonderful",), 7)
        assert caught.value.__notes__[0] == "(raised in replica 0 on cpu)"

    def test_first_and_second_derivatives_of_parts(self) -> None:
        x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        first, _ = scatter(x, TWO)
        first.backward(torch.full((2, 4), 2.0, dtype=torch.float64))
        assert x.grad.tolist() == [[2.0] * 4] * 2 + [[0.0] * 4] * 2
        assert torch.autograd.gradcheck(lambda y: scatter(y, TWO), x)
        assert torch.autograd.gradgradcheck(lambda y: scatter(y, TWO), x)

    @pytest.mark.parametrize("shape", [(2, 4), ()])
    def test_first_and_second_derivatives_of_what_is_joined(self, shape: tuple[int, ...]) -> None:
        parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        joined = gather(parts, -1)
        gradient = torch.randn_like(joined)
        joined.backward(gradient)
        torch.testing.assert_close(torch.stack([p.grad for p in parts]).view_as(joined), gradient)
        assert torch.autograd.gradcheck(lambda *own: gather(own, "cpu"), parts)
        assert torch.autograd.gradgradcheck(lambda *own: gather(own, "cpu"), parts)

    def test_named_arguments_may_be_more_or_fewer(self) -> None:
        """torch's calls with () or {} what has fewer parts; ours refuses it, see test_scatter."""
        x = torch.arange(4)
        inputs, kwargs = scatter_kwargs((x, 3), {"y": x, "z": "z"}, TWO)
        assert [(own[0].tolist(), own[1]) for own in inputs] == [([0, 1], 3), ([2, 3], 3)]
        assert [(own["y"].tolist(), own["z"]) for own in kwargs] == [([0, 1], "z"), ([2, 3], "z")]
