"""What torch's ``nn.DataParallel`` and its primitives document or test, on CPUs.

What the other tests here show already isn't shown again. Where we differ by intent, it says so.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lockstep.nn import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter_kwargs,
)
from tests.nn.replicas.as_torchs import BOTH, THREE, TOLERANCE, TWO, Does
from tests.same import assert_same_gradients


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
        assert_same_gradients(layer, expected)


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
        assert_same_gradients(module, expected)

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


class Noted(DataParallel):
    """Overrides all that torch's lets a subclass override, and notes what is called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []  # before the constructor, as some do
        super().__init__(*args, **kwargs)
        self.more = "its own"

    def scatter(self, inputs, kwargs, device_ids):
        self.calls.append(f"scatter {len(inputs)} to {len(device_ids)}")
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module, device_ids):
        self.calls.append(f"replicate on {len(device_ids)}")
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def parallel_apply(self, replicas, inputs, kwargs):
        self.calls.append(f"apply {len(replicas)}")
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs, output_device):
        self.calls.append(f"gather {len(outputs)} on {output_device}")
        return gather(outputs, output_device, self.dim)


ALL_FOUR = ["scatter 1 to 2", "replicate on 2", "apply 2", "gather 2 on cpu"]


class TestSubclasses:
    """A DataParallel is one of torch's, and may be subclassed as that is."""

    def test_it_is_an_instance_of_torchs(self) -> None:
        model = DataParallel(nn.Linear(3, 2), TWO)
        assert isinstance(model, nn.DataParallel)
        assert isinstance(copy.deepcopy(model), nn.DataParallel)

    def test_it_has_the_attributes_of_torchs(self) -> None:
        layer, cpu = nn.Linear(3, 2), torch.device("cpu")
        model = DataParallel(layer, TWO, dim=1)
        assert (model.module, model.dim, model.src_device_obj) == (layer, 1, cpu)
        assert (model.device_ids, model.output_device) == ([cpu, cpu], cpu)
        assert DataParallel(layer, TWO, output_device=-1).output_device == -1

    def test_attributes_are_heeded_when_they_are_set_later(self) -> None:
        threads = set()
        model = DataParallel(Does(lambda _, x: (threads.add(len(x)), x)[1]), TWO)
        model(torch.ones(6, 3))
        model.device_ids = THREE
        model(torch.ones(6, 3))
        model.dim = 1
        model(torch.ones(9, 3))
        assert threads == {3, 2, 9}
        assert len(model.device_ids) == 3

    @pytest.mark.parametrize("training", [True, False])
    def test_what_a_subclass_overrides_is_called(self, training: bool) -> None:
        layer, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
        expected = copy.deepcopy(layer)
        model = Noted(layer, TWO)
        with torch.set_grad_enabled(training):
            output = model(x)
        assert model.calls == ALL_FOUR
        torch.testing.assert_close(output, expected(x), **TOLERANCE)
        if training:
            output.square().sum().backward()
            expected(x).square().sum().backward()
            assert_same_gradients(layer, expected)
        assert model.more == "its own"

    def test_other_methods_go_the_same_way(self) -> None:
        model = Noted(Does(lambda _, x: x + 1), TWO)
        assert model.twice(torch.zeros(4)).tolist() == [2] * 4
        assert model.calls == ALL_FOUR

    def test_one_part_still_goes_through_all(self) -> None:
        model = Noted(nn.Identity(), TWO)
        model(torch.ones(1, 3))
        assert model.calls == ["scatter 1 to 2", "replicate on 1", "apply 1", "gather 1 on cpu"]
        model = Noted(nn.Identity(), ["cpu"])
        model(torch.ones(1, 3))
        assert model.calls == ["scatter 1 to 1"]

    def test_methods_may_be_set_on_an_object(self) -> None:
        model, made = DataParallel(nn.Linear(3, 2), TWO), []

        def replicate_and_note(module, device_ids):
            made.extend(replicate(module, device_ids))
            return made

        model.replicate = replicate_and_note
        model(torch.ones(4, 3)).sum().backward()
        assert len(made) == 2
        assert model.module.bias.grad.tolist() == [4, 4]

    def test_a_forward_of_its_own_may_use_the_four(self) -> None:
        class Criterion(DataParallel):
            def forward(self, outputs, *targets):
                inputs, kwargs = self.scatter((outputs, *targets), {}, self.device_ids)
                replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
                return sum(self.parallel_apply(replicas, inputs, kwargs)) / len(inputs)

        x, y = torch.randn(2, 4, 3).unbind()
        torch.testing.assert_close(Criterion(nn.MSELoss(), TWO)(x, y), nn.MSELoss()(x, y))

    def test_what_does_not_go_through_them_is_refused(self) -> None:
        model = Noted(nn.Linear(3, 2), TWO, buffers="mean")
        with pytest.raises(ValueError, match="Noted has a replicate"):
            model(torch.ones(4, 3))

    @BOTH
    def test_a_module_elsewhere_is_refused(self, call) -> None:
        expected = r"is on meta. Move the module there: module.to\('cpu'\)"
        with pytest.raises(RuntimeError, match=expected):
            call(nn.Linear(3, 2, device="meta"), (torch.ones(4, 3),), {})
