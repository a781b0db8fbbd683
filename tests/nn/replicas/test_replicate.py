"""``replicate``: replicas share what they can, and gradients come back to the network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from lockstep.nn import replicate

CPUS = ["cpu", "cpu", "cpu"]


class Net(nn.Module):
    """Shared weights, buffers, a list of parameters, and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
        self.again = self.first
        self.calls = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        x = self.norm(self.again(self.second(self.first(x))))
        return x * self.scales[0] + self.scales[1]


def test_a_network_without_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="no shape yet"):
        replicate(nn.Sequential(nn.LazyLinear(2)), CPUS)


def test_replicas_are_of_the_same_class_and_have_all_parameters() -> None:
    network = Net()
    for replica in replicate(network, CPUS):
        assert type(replica) is Net
        assert replica is not network
        names = [name for name, _ in network.named_parameters()]
        assert [name for name, _ in replica.named_parameters()] == names
        assert replica.again is replica.first
        assert replica.second.weight is replica.first.weight
        assert replica.calls is network.calls


def test_replicas_on_the_networks_device_share_its_parameters() -> None:
    network = Net()
    replicas = replicate(network, CPUS)
    for replica in replicas:
        for mine, its in zip(network.parameters(), replica.parameters(), strict=True):
            assert mine.is_set_to(its)
    with torch.no_grad():
        network.first.weight.zero_()
    assert not replicas[2].first.weight.any()


def test_gradients_of_all_replicas_add_up_in_the_network() -> None:
    network, x = Net().eval(), torch.randn(6, 3)
    expected = copy.deepcopy(network)
    expected(x).square().sum().backward()
    for replica, part in zip(replicate(network, CPUS), x.chunk(3), strict=True):
        replica(part).square().sum().backward()
    for mine, theirs in zip(network.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_detached_replicas_give_no_gradients() -> None:
    (replica,) = replicate(Net(), ["cpu"], detach=True)
    assert not any(p.requires_grad for p in replica.parameters())


def test_what_the_first_does_to_buffers_stays() -> None:
    network = Net()
    first, second, _ = replicate(network, CPUS)
    second(torch.randn(4, 3) + 5)
    assert not network.norm.running_mean.any()
    first(torch.randn(4, 3) + 5)
    assert network.norm.running_mean.all()
    assert network.norm.num_batches_tracked == 1


def test_replicas_have_their_own_attributes() -> None:
    network = Net()
    first, second = replicate(network, ["cpu", "cpu"])
    first.calls = None
    first.extra = nn.Linear(1, 1)
    assert network.calls == second.calls == []
    assert not hasattr(network, "extra")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_use_the_replicas_weights(kind: type[nn.RNNBase]) -> None:
    """They keep their weights in a second place."""
    network, x = kind(3, 4), torch.randn(5, 2, 3)
    (replica,) = replicate(network, ["cpu"], detach=True)
    assert torch.equal(replica(x)[0], network(x)[0])
    assert not replica(x)[0].requires_grad


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "normalise",
    [nn.utils.weight_norm, parametrizations.weight_norm, parametrizations.spectral_norm],
    ids=["hook", "parametrized", "spectral"],
)
def test_normalised_weights_are_those_of_the_replica(normalise) -> None:
    network, x = nn.Sequential(normalise(nn.Linear(3, 3))).eval(), torch.randn(2, 3)
    (replica,) = replicate(network, ["cpu"])
    expected = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    found = torch.autograd.grad(replica(x).square().sum(), list(network.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_script_module_is_refused() -> None:
    with pytest.raises(TypeError, match="ScriptModule"):
        replicate(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), ["cpu"])
