"""What is in the model is reached through the wrapper, and what it returns comes as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.ranks import run_ranks

OurDDP = lockstep.DistributedDataParallel


class Model(nn.Module):
    """Has a method, attribute and property of each kind."""

    limit = 7

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6).double()
        self.second = nn.Linear(6, 3).double()
        self.layers = nn.ModuleList([nn.Linear(6, 6).double()])
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0
        self.names: dict[str, int] = {}
        self._scale = 1.0
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)

    def forward(self, x: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        return self.second(self.hidden(x)) ** power

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self._scale * torch.tanh(self.first(x))

    def steps(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        x = self.hidden(x)
        yield x
        for layer in self.layers:
            x = torch.tanh(layer(x))
            yield x

    @property
    def scale(self) -> float:
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self._scale = value

    @property
    def norm(self) -> torch.Tensor:
        return sum(p.square().sum() for p in self.first.parameters())

    @property
    def broken(self) -> float:
        return self.not_there

    @staticmethod
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @classmethod
    def build(cls) -> Model:
        return cls()

    async def later(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x)

    def remember(self, name: str) -> None:
        self.names[name] = self.count
        self.count += 1


def data(world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(world_size, 4, 4, dtype=torch.float64, generator=generator)


def run_now(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits for something")


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "forward": lambda model, x: model(x),
    "forward with a keyword": lambda model, x: model(x, power=2),
    "a method": lambda model, x: model.hidden(x),
    "a bound method kept": lambda model, x: (lambda hidden: hidden(x))(model.hidden),
    "a generator": lambda model, x: torch.cat(list(model.steps(x))),
    "part of a generator": lambda model, x: next(model.steps(x)),
    "a coroutine": lambda model, x: run_now(model.later(x)),
    "a property": lambda model, x: model.norm * x.sum(),
    "a static method": lambda model, x: model.twice(model(x)),
    "a part": lambda model, x: model.second(torch.tanh(model.first(x))),
    "a part of a part": lambda model, x: model.layers[0](model.hidden(x)),
    "a method of a part": lambda model, x: model.first.forward(x),
    "a parameter": lambda model, x: x @ model.first.weight.T,
    "a part by name": lambda model, x: model.get_submodule("module.layers.0")(model.hidden(x)),
    "the model inside": lambda model, x: model.module(x),
    "two ways at once": lambda model, x: model(x).sum() + model.hidden(x).sum(),
    "nothing at all": lambda model, x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_the_mean_whichever_way_the_loss_was_made(name: str) -> None:
    way = WAYS[name]
    alones = [Model(), Model()]
    for alone, x in zip(alones, data(2), strict=True):
        alone.get_submodule = lambda target, alone=alone: nn.Module.get_submodule(
            alone, target.removeprefix("module.")
        )
        object.__setattr__(alone, "module", alone)
        way(alone, x).square().sum().backward()

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(Model(), process_group=group)
        for _ in range(2):
            model.zero_grad()
            way(model, data(2)[rank]).square().sum().backward()
        pairs = zip(*(alone.parameters() for alone in alones), strict=True)
        for parameter, (one, other) in zip(model.parameters(), pairs, strict=True):
            assert (parameter.grad is None) == (one.grad is None)
            if one.grad is not None:
                mean = (one.grad + other.grad) / 2
                torch.testing.assert_close(parameter.grad, mean, rtol=1e-12, atol=1e-12)

    run_ranks(2, body)


def wrapped(inner: nn.Module) -> Any:
    """A wrapper in this process, which is alone."""
    return OurDDP(inner)


def test_attributes_of_the_model_are_read_and_set_there() -> None:
    inner = Model()
    model = wrapped(inner)
    assert model.count == 0
    assert model.limit == 7
    assert model.names is inner.names
    assert model.build().count == 0
    model.count = 3
    model.count += 1
    assert inner.count == 4
    assert "count" not in vars(model)
    model.scale = 2.5
    assert inner._scale == 2.5
    model.remember("this")
    assert inner.names == {"this": 4}
    assert inner.count == 5
    model.seen = torch.ones(())
    assert dict(inner.named_buffers())["seen"] == 1
    model.limit = 9
    assert (inner.limit, Model.limit) == (9, 7)
    del model.count
    assert not hasattr(inner, "count")


def test_attributes_that_the_model_has_not_are_the_wrappers() -> None:
    inner = Model()
    model = wrapped(inner)
    model.epoch = 3
    assert model.epoch == 3
    assert not hasattr(inner, "epoch")
    del model.epoch
    with pytest.raises(AttributeError, match="epoch"):
        model.epoch  # noqa: B018
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'broken'"):
        model.broken  # noqa: B018, as the model itself says
    assert getattr(model, "nowhere", None) is None
    assert hasattr(model, "hidden")
    assert "first" in dir(model.module)


NAMESAKES: dict[str, Any] = {
    "dim": 512,
    "process_group": "of its own",
    "device_ids": [7],
    "output_device": "there",
    "static_graph": "yes",
    "mixed_precision": "bf16",
    "find_unused_parameters": 1,
    "gradient_as_bucket_view": 2,
    "parameters_to_ignore": 3,
    "device": "here",
    "bucket_bytes_cap": 4,
}


class Namesake(nn.Module):
    """Has attributes that the wrapper has, too, and means something else by them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in NAMESAKES.items():
            setattr(self, name, value)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(x)


def test_a_model_keeps_attributes_that_are_called_like_the_wrappers() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = Namesake()
        model = OurDDP(inner, process_group=group)
        for name, value in NAMESAKES.items():
            assert getattr(inner, name) == value, name
        assert model.process_group is group
        assert model.dim == 0
        assert model.device == torch.device("cpu")
        assert model.static_graph is False
        model(torch.ones(1, 2)).sum().backward()
        with model.join():
            pass

    run_ranks(2, body)


def test_parts_and_parameters_set_through_the_wrapper_are_trained() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = OurDDP(Model(), process_group=group)
        x = data(2)[rank]
        model(x).sum().backward()
        torch.manual_seed(rank)
        model.second = nn.Linear(6, 2).double()
        assert model.module.second.out_features == 2
        model.extra = nn.Linear(2, 2)  # in the model, as its parameters are to be trained
        assert model.module.extra is model.extra
        del model.extra
        assert not hasattr(model.module, "extra")
        model.zero_grad()
        model(x).square().mean().backward()
        return [model.second.weight.detach(), model.second.weight.grad]

    first, second = run_ranks(2, body)
    assert all(map(torch.equal, first, second))


@dataclasses.dataclass
class Output:
    """As the models of some libraries return."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    text: str = "text"


class Pair(NamedTuple):
    """Two tensors with names."""

    logits: torch.Tensor
    hidden: torch.Tensor


class Plain:
    """An object that nothing is known of."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Mapping(dict):
    """A dict with more."""

    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False).double()
        nn.init.constant_(self.layer.weight, 0.5)
        self.make = make
        self.made: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.made = self.make(self.layer(x))
        return self.made


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, None, 3), lambda out: out[0]),
    "list of lists": (lambda y: [[y], "x"], lambda out: out[0][0]),
    "dict": (lambda y: {"logits": y, 2: {"deep": y * 2}}, lambda out: out[2]["deep"] / 2),
    "subclass of dict": (lambda y: Mapping(logits=y), lambda out: out.logits),
    "dataclass": (lambda y: Output(y), lambda out: out.logits),
    "named tuple": (lambda y: Pair(y, y), lambda out: out.hidden),
    "object": (lambda y: Plain(y), lambda out: out.logits),
    "function": (lambda y: lambda: y, lambda out: out()),
    "generator": (lambda y: (part for part in (y, y)), lambda out: next(out)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_come_as_they_are_and_train(name: str) -> None:
    make, logits = OUTPUTS[name]

    def body(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        model = OurDDP(Returns(make), process_group=group)
        for _ in range(2):
            model.zero_grad()
            out = model(data(2)[rank])
            assert out is model.module.made
            logits(out).square().mean().backward()
        return model.layer.weight.grad

    alone = Returns(lambda y: y)
    alone(data(2).flatten(0, 1)).square().mean().backward()
    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, alone.layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_hooks_of_modules_run_as_with_torchs_wrapper() -> None:
    def body(world: lockstep.World) -> None:
        heard: dict[type, list[str]] = {}
        for wrap in (OurDDP, TorchDDP):
            calls = heard[wrap] = []
            inner = Returns(lambda y: y)
            model = wrap(inner)
            for name, module in (("outer", model), ("inner", inner), ("layer", inner.layer)):
                note = lambda *_, name=name, calls=calls: calls.append(name)  # noqa: E731
                module.register_forward_pre_hook(note)
                module.register_forward_hook(note)
                module.register_full_backward_hook(note)
            model(data(2)[world.rank].requires_grad_()).sum().backward()
        assert heard[OurDDP] == heard[TorchDDP]
        assert len(heard[OurDDP]) == 9

    lockstep.launch(body, 2, ranks="threads")


def test_train_and_eval_reach_the_model_and_return_the_wrapper() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        model = OurDDP(inner, process_group=group)
        for mode in (model.eval(), model.train(False)):
            assert mode is model
            assert not any(part.training for part in model.modules())
        assert model.train() is model
        assert all(part.training for part in model.modules())
        model.requires_grad_(False).requires_grad_(True)
        assert list(model.children()) == [inner]

    run_ranks(2, body)
