"""``DataParallel``: what the module returns and its gradients, from several replicas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lockstep.nn import DataParallel
from tests.nn.replicas.nets import THREE, TWO, Net, batch, replicable
from tests.same import assert_same, assert_same_gradients, gradients_of

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Scaled(nn.Module):
    """Saves a buffer for its backward that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Averages(nn.Module):
    """Keeps a moving average of its inputs, past autograd and past versions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.data.div_(2).add_(x.mean(0))
        return x


class HasCodes(nn.Linear):
    """Has parameters that can't have a gradient."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.codes = nn.Parameter(torch.tensor([3, -4], dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.mask + self.codes


class Moves(nn.Linear):
    """Gives its parameter other memory, as RNNs do on GPUs to have theirs in one piece."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


@pytest.mark.parametrize("devices", [["cpu"], TWO, THREE, ["cpu"] * 9], ids=len)
def test_outputs_and_gradients_are_the_modules(devices: list[str]) -> None:
    module, expected = replicable(), replicable()
    model = DataParallel(module, devices)
    for _ in range(2):  # they add up
        x, y = batch().requires_grad_(), batch().requires_grad_()
        output, other = model(x * 2), expected(y * 2)
        torch.testing.assert_close(output, other, **TOLERANCE)
        output.square().sum().backward()
        other.square().sum().backward()
        assert_same_gradients(module, expected)
        assert_same([x.grad], [y.grad])


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_there_may_be_fewer_rows_than_devices(rows: int) -> None:
    module, expected = replicable(), replicable()
    DataParallel(module, THREE)(batch(rows)).sum().backward()
    expected(batch(rows)).sum().backward()
    assert_same_gradients(module, expected)


def test_another_dim_may_be_cut() -> None:
    class Columns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = batch(3)
    assert torch.equal(DataParallel(Columns(), TWO, dim=1)(x), x * 2)


def test_the_same_input_gives_the_same_bits() -> None:
    def run() -> list[torch.Tensor]:
        module = replicable()
        DataParallel(module, THREE)(batch(31)).square().sum().backward()
        return gradients_of(module)

    first = run()
    assert all(map(torch.equal, first, run()))


class TestMethodsAndAttributes:
    """Whatever the module has can be used through the wrapper."""

    def test_any_method_is_split(self) -> None:
        module, expected, parts = replicable(), replicable(), []
        module.first.register_forward_hook(lambda _, inputs, __: parts.append(len(inputs[0])))
        output = DataParallel(module, TWO).middle(batch(), factor=3.0)
        assert sorted(parts) == [3, 4]
        output.sum().backward()
        expected.middle(batch(), factor=3.0).sum().backward()
        assert_same([module.first.weight.grad], [expected.first.weight.grad])

    def test_a_method_without_tensors_is_called_once(self) -> None:
        assert DataParallel(replicable(), TWO).where() == "Net"

    def test_attributes_pass_through(self) -> None:
        model = DataParallel(replicable(), TWO)
        assert model.width == 3
        model.scale = 2.0
        assert model.module.scale == 2.0
        torch.testing.assert_close(model(batch()), 2 * replicable()(batch()), **TOLERANCE)
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

        module, expected = replicable(), replicable()
        model = DataParallel(module, TWO)
        model(batch())
        for change in (assign_data, replace, write, put_in, step, load, freeze):
            for one in (module, expected):
                one.zero_grad()
                change(one)
            model(batch()).square().sum().backward()
            expected(batch()).square().sum().backward()
            assert_same_gradients(module, expected)
        assert module.first.weight.grad is None

    def test_memory_that_a_replica_gives_a_parameter_is_not_kept(self) -> None:
        module = Moves(2, 2, bias=False)
        model = DataParallel(module, TWO)
        for value in (1.0, 5.0):
            nn.init.constant_(module.weight, value)
            assert model(torch.ones(4, 2)).eq(2 * value).all()

    def test_a_change_before_the_backward_is_an_error(self) -> None:
        """As it is without replicas: its gradients would be others."""
        module = replicable()
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
        assert_same_gradients(module, expected)

    def test_only_those_that_are_used_get_gradients(self) -> None:
        module = replicable()
        DataParallel(module, TWO).middle(batch()).sum().backward()
        assert module.second.weight.grad is None
        assert module.first.weight.grad is not None

    def test_parameters_that_are_not_of_floating_point(self) -> None:
        module = HasCodes().double()
        expected = copy.deepcopy(module)
        for one in (DataParallel(module, TWO), expected):
            one(batch()).sum().backward()
        assert_same_gradients(module, expected)

    def test_functional_calls_train_what_they_are_given(self) -> None:
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        model = DataParallel(module, TWO)
        given = {f"0.module.{k}": v.detach() * 2 for k, v in module.named_parameters()}
        given = {k: v.requires_grad_() for k, v in given.items()}
        # torch refuses it for a DataParallel itself, and not for what is around one.
        around = nn.Sequential(model)
        torch.func.functional_call(around, given, batch()).sum().backward()
        assert all(v.grad is not None for v in given.values())
        assert gradients_of(module) == [None] * 4


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

    def test_a_backward_after_they_were_averaged(self) -> None:
        """It computes with what its forward has saved; what nobody changes keeps its bits."""
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled()).double()
        model = DataParallel(module, TWO, buffers="mean")
        expected = [copy.deepcopy(module) for _ in range(2)]
        scale = module[2].scale.clone()
        for _ in range(2):
            module.zero_grad()
            model(batch(6)).square().sum().backward()
        for replica, part in zip(expected, batch(6).chunk(2), strict=True):
            replica(part).square().sum().backward()
        for mine, *theirs in zip(
            module.parameters(), *(e.parameters() for e in expected), strict=True
        ):
            assert_same([mine.grad], [theirs[0].grad + theirs[1].grad])
        assert torch.equal(module[2].scale, scale)
        assert module[2].scale._version == 0

    @pytest.mark.parametrize("buffers", ["first", "mean"])
    def test_writes_that_torch_does_not_count(self, buffers: str) -> None:
        """As code does that keeps moving averages by hand."""
        module = Averages().double()
        model = DataParallel(module, TWO, buffers=buffers)
        expected = torch.zeros(4, dtype=torch.float64)
        for rows in (6, 8, 4):
            model(batch(rows))
            rows_seen = batch(rows) if buffers == "mean" else batch(rows).chunk(2)[0]
            expected = expected / 2 + rows_seen.mean(0)
            assert_same([module.average], [expected])

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
            DataParallel(replicable(), TWO, buffers="last")
