"""``DataParallel``: what the module returns and its gradients, from several replicas."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.nn.replicas import DataParallel, data_parallel

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Several ways in, shared weights, and things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)
        self.again = self.first
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(torch.tanh(self.again(torch.tanh(self.first(x))))) * self.scale

    def middle(self, x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.first(x)) * factor

    def where(self) -> str:
        return type(self).__name__

    @property
    def width(self) -> int:
        return self.second.out_features


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


def batch(rows: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator)


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in module.parameters()]


def assert_same(mine, theirs) -> None:
    torch.testing.assert_close(list(mine), list(theirs), **TOLERANCE)


@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE, ["cpu"] * 9], ids=len)
def test_outputs_and_gradients_are_the_modules(devices: list[str]) -> None:
    module, expected = net(), net()
    model = DataParallel(module, devices)
    for _ in range(2):  # they add up
        x, y = batch().requires_grad_(), batch().requires_grad_()
        output, other = model(x * 2), expected(y * 2)
        torch.testing.assert_close(output, other, **TOLERANCE)
        output.square().sum().backward()
        other.square().sum().backward()
        assert_same(gradients(module), gradients(expected))
        assert_same([x.grad], [y.grad])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_there_may_be_fewer_rows_than_devices(rows: int) -> None:
    module, expected = net(), net()
    DataParallel(module, THREE)(batch(rows)).sum().backward()
    expected(batch(rows)).sum().backward()
    assert_same(gradients(module), gradients(expected))


def test_another_dim_may_be_cut() -> None:
    class Columns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = batch(3)
    assert torch.equal(DataParallel(Columns(), TWO, dim=1)(x), x * 2)


def test_the_same_input_gives_the_same_bits() -> None:
    def run() -> list[torch.Tensor]:
        module = net()
        DataParallel(module, THREE)(batch(31)).square().sum().backward()
        return gradients(module)

    first = run()
    assert all(map(torch.equal, first, run()))


class TestMethodsAndAttributes:
    """Whatever the module has can be used through the wrapper."""

    def test_any_method_is_split(self) -> None:
        module, expected, parts = net(), net(), []
        module.first.register_forward_hook(lambda _, inputs, __: parts.append(len(inputs[0])))
        output = DataParallel(module, TWO).middle(batch(), factor=3.0)
        assert sorted(parts) == [3, 4]
        output.sum().backward()
        expected.middle(batch(), factor=3.0).sum().backward()
        assert_same([module.first.weight.grad], [expected.first.weight.grad])

    def test_a_method_without_tensors_is_called_once(self) -> None:
        assert DataParallel(net(), TWO).where() == "Net"

    def test_attributes_pass_through(self) -> None:
        model = DataParallel(net(), TWO)
        assert model.width == 3
        model.scale = 2.0
        assert model.module.scale == 2.0
        torch.testing.assert_close(model(batch()), 2 * net()(batch()), **TOLERANCE)
        with pytest.raises(AttributeError, match="nothing"):
            _ = model.nothing

    def test_modes_and_hooks_are_known_at_the_next_call(self) -> None:
        module = nn.Sequential(nn.Dropout(0.9999), nn.Identity())
        model = DataParallel(module, TWO)
        assert model(torch.ones(100)).count_nonzero() < 50
        model.eval()
        assert model(torch.ones(100)).count_nonzero() == 100
        module[1].register_forward_hook(lambda _, __, output: output + 1)
        assert model(torch.ones(100)).eq(2).all()


class TestParameters:
    """Replicas are kept, and know what changes."""

    def test_changes_are_noticed(self) -> None:
        def assign_data(m: Net) -> None:
            m.first.weight.data = m.first.weight.data * 2

        def replace(m: Net) -> None:
            m.second.weight = nn.Parameter(m.second.weight.detach() + 1)

        def write(m: Net) -> None:
            with torch.no_grad():
                m.first.weight.add_(1)

        def put_in(m: Net) -> None:
            m.second = nn.Linear(4, 3).double()
            with torch.no_grad():
                m.second.weight.fill_(0.5)
                m.second.bias.zero_()

        def step(m: Net) -> None:
            m.zero_grad()
            m(batch()).sum().backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()

        def load(m: Net) -> None:
            m.load_state_dict({name: t + 1 for name, t in m.state_dict().items()})

        def freeze(m: Net) -> None:
            m.first.requires_grad_(False)

        module, expected = net(), net()
        model = DataParallel(module, TWO)
        model(batch())
        for change in (assign_data, replace, write, put_in, step, load, freeze):
            for one in (module, expected):
                one.zero_grad()
                change(one)
            model(batch()).square().sum().backward()
            expected(batch()).square().sum().backward()
            assert_same(gradients(module), gradients(expected))
        assert module.first.weight.grad is None

    def test_a_change_before_the_backward_is_an_error(self) -> None:
        """As it is without replicas: its gradients would be others."""
        module = net()
        loss = DataParallel(module, TWO)(batch()).sum()
        with torch.no_grad():
            module.second.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_what_is_reached_without_being_registered_gets_its_gradients(self) -> None:
        class Hidden(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 2).double()
                self.calls = [self.inner]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.calls[0](x)

        module = Hidden()
        expected = copy.deepcopy(module)
        DataParallel(module, TWO)(batch()).square().sum().backward()
        expected(batch()).square().sum().backward()
        assert_same(gradients(module), gradients(expected))

    def test_only_those_that_are_used_get_gradients(self) -> None:
        module = net()
        DataParallel(module, TWO).middle(batch()).sum().backward()
        assert module.second.weight.grad is None
        assert module.first.weight.grad is not None

    def test_functional_calls_train_what_they_are_given(self) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        model = DataParallel(module, TWO)
        given = {f"module.{k}": v.detach() * 2 for k, v in module.named_parameters()}
        given = {k: v.requires_grad_() for k, v in given.items()}
        torch.func.functional_call(model, given, batch()).sum().backward()
        assert all(v.grad is not None for v in given.values())
        assert gradients(module) == [None] * 4


class TestBuffers:
    """Replicas have their own, and the module's are those of the first, or the mean."""

    def run(self, buffers: str) -> nn.BatchNorm1d:
        norm = nn.BatchNorm1d(4, momentum=1.0).double()
        DataParallel(norm, TWO, buffers=buffers)(batch(6))
        return norm

    def test_the_first_replicas_stay(self) -> None:
        norm = self.run("first")
        assert_same([norm.running_mean], [batch(6)[:3].mean(0)])
        assert norm.num_batches_tracked == 1

    def test_they_may_be_averaged(self) -> None:
        assert_same([self.run("mean").running_mean], [batch(6).mean(0)])

    def test_the_mean_is_that_of_those_that_ran(self) -> None:
        norm = nn.BatchNorm1d(4, momentum=1.0).double()
        model = DataParallel(norm, THREE, buffers="mean")
        for rows in (4, 9, 4):  # of 4 there are two parts
            model(batch(rows))
            means = [part.mean(0) for part in batch(rows).chunk(3)]
            assert_same([norm.running_mean], [torch.stack(means).mean(0)])

    def test_two_forwards_before_their_backwards(self) -> None:
        norm = nn.BatchNorm1d(4).double()
        model = DataParallel(norm, TWO)
        (model(batch(6)).square().sum() + model(batch(8)).square().sum()).backward()
        assert norm.num_batches_tracked == 2

    def test_statistics_are_those_of_the_last_call(self) -> None:
        """torch writes to them without counting their version."""
        norm = nn.BatchNorm1d(4).double()
        model = DataParallel(norm, TWO)
        for _ in range(3):
            model.train()(batch(6))
            torch.testing.assert_close(model.eval()(batch(8)), norm(batch(8)), **TOLERANCE)

    def test_other_policies_are_refused(self) -> None:
        with pytest.raises(ValueError, match="'first' and 'mean'"):
            DataParallel(net(), TWO, buffers="last")


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


class TestNestings:
    """Inputs and outputs of all kinds."""

    @dataclass
    class Pair:
        left: torch.Tensor
        right: list[torch.Tensor]

    def test_nested_inputs_and_outputs(self) -> None:
        pair = TestNestings.Pair

        class Nested(nn.Module):
            def forward(self, both, *, more):
                return {
                    "pair": pair(both.left * 2, [both.right[0] + more["x"]]),
                    "loss": both.left.sum(),
                    "name": "nested",
                    "rows": len(both.left),
                    "none": None,
                }

        x = batch().requires_grad_()
        output = DataParallel(Nested(), TWO)(pair(x, [x]), more={"x": x})
        assert isinstance(output["pair"], pair)
        assert torch.equal(output["pair"].left, x * 2)
        assert torch.equal(output["pair"].right[0], x + x)
        assert output["loss"].shape == (2,)  # a vector, of one for each replica
        assert (output["name"], output["rows"], output["none"]) == ("nested", [4, 3], None)
        output["loss"].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    def test_gradients_come_through_attributes_of_objects(self) -> None:
        class Gaussian(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 1).double()

            def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
                return torch.distributions.Normal(self.layer(x), 1.0)

        module, expected = Gaussian(), Gaussian()
        expected.load_state_dict(module.state_dict())
        sum(normal.loc.sum() for normal in DataParallel(module, TWO)(batch())).backward()
        expected(batch()).loc.sum().backward()
        assert_same(gradients(module), gradients(expected))

    def test_outputs_may_be_inputs_and_parameters(self) -> None:
        class Returns(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1, 4))

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                return x, self.weight, (x > 0).sum(1)

        module, x = Returns(), torch.ones(4, 4, requires_grad=True)
        same, weight, counts = DataParallel(module, TWO)(x)
        assert not counts.requires_grad
        (same.sum() + weight.sum()).backward()
        assert x.grad.eq(1).all()
        assert module.weight.grad.eq(2).all()

    def test_inputs_may_be_modified_in_place(self) -> None:
        module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2).double())
        expected = copy.deepcopy(module)
        x, y = batch().requires_grad_(), batch().requires_grad_()
        DataParallel(module, THREE)(x * 1).sum().backward()
        expected(y * 1).sum().backward()
        assert_same([x.grad, *gradients(module)], [y.grad, *gradients(expected)])
        data_parallel(module, x * 1, THREE).sum().backward()
        expected(y * 1).sum().backward()
        assert_same([x.grad, *gradients(module)], [y.grad, *gradients(expected)])
        DataParallel(module, THREE)(batch()).sum().backward()  # and where they need no gradient

    def test_without_tensors_all_replicas_run(self) -> None:
        class Counts(nn.Module):
            def forward(self, count: int) -> torch.Tensor:
                return torch.full((count,), 1.0)

        assert len(DataParallel(Counts(), TWO)(3)) == 6

    def test_without_arguments_one_replica_runs(self) -> None:
        class Nothing(nn.Module):
            def forward(self) -> str:
                return "here"

        assert DataParallel(Nothing(), TWO)() == "here"


class TestPlaces:
    """It may be a part of a model, or have one inside."""

    def test_a_middle_block(self) -> None:
        expected = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        expected = expected.append(nn.Linear(4, 1)).double()
        model = copy.deepcopy(expected)
        model[1] = DataParallel(model[1], TWO)
        model(batch()).sum().backward()
        expected(batch()).sum().backward()
        assert_same(gradients(model), gradients(expected))
        assert list(model.state_dict()) == list(expected.state_dict())
        model.load_state_dict(expected.state_dict())

    def test_one_inside_of_another(self) -> None:
        module, expected = nn.Sequential(net(), nn.Tanh()), nn.Sequential(net(), nn.Tanh())
        module[0] = DataParallel(module[0], TWO)
        model = DataParallel(module, TWO)
        for _ in range(2):
            model(batch()).sum().backward()
            expected(batch()).sum().backward()
            assert_same(gradients(module), gradients(expected))

    def test_calls_from_several_threads(self) -> None:
        module, expected = net(), net()
        model, errors = DataParallel(module, TWO), []

        def run(rows: int) -> None:
            try:
                for _ in range(5):
                    found = torch.autograd.grad(model(batch(rows)).sum(), list(module.parameters()))
                    wanted = torch.autograd.grad(
                        expected(batch(rows)).sum(), list(expected.parameters())
                    )
                    assert_same(found, wanted)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rows,)) for rows in (3, 8, 13)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


class TestState:
    """State dicts, copies and pickles are those of the module."""

    def test_state_dicts_of_either_kind_are_loaded(self) -> None:
        model, other = DataParallel(net(), TWO), net()
        assert list(model.state_dict()) == list(other.state_dict())
        for prefix in ("", "module."):
            state = {prefix + name: value + 1 for name, value in other.state_dict().items()}
            model.load_state_dict(state)
            assert torch.equal(model.module.first.bias, other.first.bias + 1)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["copy", "pickle"],
    )
    def test_copies_are_other_models(self, copied) -> None:
        model = DataParallel(net(), TWO)
        model(batch())
        other = copied(model)
        other(batch()).sum().backward()
        assert gradients(model.module) == [None] * 4
        assert all(g is not None for g in gradients(other.module))

    def test_its_threads_end_with_it(self) -> None:
        before = set(threading.enumerate())
        model = DataParallel(net(), TWO)
        model(batch())
        more = set(threading.enumerate()) - before
        assert len(more) == 1  # the first runs in the caller's
        del model
        gc.collect()
        for thread in more:
            thread.join(20)
            assert not thread.is_alive()


class TestFailures:
    """Who failed is named, in the error that it raised."""

    def test_a_failed_replica_is_named(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError(f"{len(x)} rows")

        with pytest.raises(ArithmeticError, match="4 rows") as caught:
            DataParallel(Fails(), TWO)(batch())
        first, second = caught.value.__notes__
        assert first == "(raised in replica 0 on cpu)"
        assert "3 rows" in second

    def test_a_module_elsewhere_is_refused(self) -> None:
        model = DataParallel(nn.Linear(2, 2, device="meta"), TWO)
        with pytest.raises(
            RuntimeError, match=r"is on meta. Move the module there: module.to\('cpu'\)"
        ):
            model(torch.ones(2, 2))

    def test_a_lazy_module_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match="no shape yet"):
            DataParallel(nn.LazyLinear(2), TWO)(torch.ones(2, 2))

    def test_bad_options_are_refused(self) -> None:
        with pytest.raises(ValueError, match="only 'threads'"):
            DataParallel(net(), TWO, workers="greenlets")
        with pytest.raises(ValueError, match="device_ids is empty"):
            DataParallel(net(), [])


class TestDevices:
    """By default all there are."""

    def test_by_default_one_for_each_intra_op_thread(self) -> None:
        before = torch.get_num_threads()
        try:
            for mine, count in ((1, 1), (2, 2), (16, 4)):
                torch.set_num_threads(mine)
                assert DataParallel(net()).device_ids == [torch.device("cpu")] * count
        finally:
            torch.set_num_threads(before)

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="where there is none")
    def test_indices_are_ignored_without_accelerators(self) -> None:
        model = DataParallel(net(), [0, 1, 2, 3], output_device=0)
        assert torch.equal(model(batch()), DataParallel(net())(batch()))

    def test_a_single_device_has_no_threads(self) -> None:
        before = threading.active_count()
        assert torch.equal(DataParallel(net(), ["cpu"])(batch()), net()(batch()))
        assert threading.active_count() == before
