"""What the primitives of torch's ``nn.DataParallel`` do by themselves, on CPUs."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from lockstep.nn import gather, parallel_apply, replicate, scatter, scatter_kwargs
from tests.nn.replicas.as_torchs import TWO, Does


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
        assert torch.autograd.gradcheck(lambda *pieces: gather(pieces, "cpu"), parts)
        assert torch.autograd.gradgradcheck(lambda *pieces: gather(pieces, "cpu"), parts)

    def test_named_arguments_may_be_more_or_fewer(self) -> None:
        """torch's calls with () or {} what has fewer parts; ours refuses it, see test_scatter."""
        x = torch.arange(4)
        inputs, kwargs = scatter_kwargs((x, 3), {"y": x, "z": "z"}, TWO)
        assert [(one[0].tolist(), one[1]) for one in inputs] == [([0, 1], 3), ([2, 3], 3)]
        assert [(one["y"].tolist(), one["z"]) for one in kwargs] == [([0, 1], "z"), ([2, 3], "z")]
