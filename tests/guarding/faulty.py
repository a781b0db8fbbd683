"""Programs of which a rank fails in a step, at a place and in a way that a test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import lockstep

Kind = Literal["exception", "memory", "nan", "inf"]
Phase = Literal["forward", "backward", "between", "update", "behind"]
KINDS: tuple[Kind, ...] = ("exception", "memory", "nan", "inf")
PHASES: tuple[Phase, ...] = ("forward", "backward", "between", "update", "behind")
# More than any machine has, even where memory is promised without a limit.
_TOO_MUCH = 2**62


class Fault(NamedTuple):
    """What happens on a rank in a step."""

    rank: int
    kind: Kind
    phase: Phase


class Flip(NamedTuple):
    """One bit of a parameter that changes on a rank behind a step."""

    rank: int
    name: str
    element: int
    bit: int

    def apply(self, model: nn.Module) -> None:
        """Flip it; again, it is as before."""
        elements = model.get_parameter(self.name).detach().view(-1).view(torch.int32)
        elements[self.element] ^= torch.tensor(1 << self.bit).to(torch.int32)


class Refused(ArithmeticError):
    """What a fault raises."""


def fail(kind: Kind) -> None:
    """Raise as a fault of that kind does."""
    if kind == "memory":
        torch.empty(_TOO_MUCH // 4)
    raise Refused("planted")


class _Faulty(torch.autograd.Function):
    """Returns its input; its backward does what the fault says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.kind in ("nan", "inf"):
            return gradient * float(ctx.kind), None
        fail(ctx.kind)
        raise AssertionError


class Net(nn.Module):
    """With buffers and random numbers of a generator of its own; a fault is between its layers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 40), nn.BatchNorm1d(40)
        self.second, self.last = nn.Linear(40, 40), nn.Linear(40, 3)
        self.generator = torch.Generator().manual_seed(rank)
        self.fault: Fault | None = None
        weights = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = x * torch.bernoulli(torch.full(x.shape, 0.7), generator=self.generator).to(x)
        fault = self.fault
        if fault is not None and fault.phase == "forward":
            if fault.kind in ("exception", "memory"):
                fail(fault.kind)
            x = x * float(fault.kind)
        if fault is not None and fault.phase == "backward":
            x = _Faulty.apply(x, fault.kind)
        return self.last(torch.tanh(self.second(x)))


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(97 * step + rank)
    return torch.randn(4 + rank, 6, generator=generator)


class FaultyAdam(torch.optim.Adam):
    """Raises after its update, in which all parameters have changed already."""

    fault: Fault | None = None

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.fault is not None and self.fault.phase == "update":
            fail(self.fault.kind)
        return result


class Program:
    """A model and an optimizer on a rank, and their steps."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup | None,
        *,
        shards: bool = False,
        overlap: bool = False,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> None:
        """Without a group, the rank is alone."""
        # A new thread takes the process's number later, with other bits before.
        torch.set_num_threads(1)
        self.rank, self.group, self.options = rank, group, {"max_consecutive": 99, **options}
        self.device = device
        self.model = Net(rank).to(device)
        lockstep.parallelize(self.model, process_group=group, bucket_cap_mb=0.002)
        self.optimizer = FaultyAdam(self.model.parameters(), lr=0.01)
        if shards:
            lockstep.shard_optimizer(self.optimizer, overlap=overlap)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def body(self, step: int, fault: Fault | None = None) -> None:
        """Take a step; at the end its scheduler's, too."""
        here = fault if fault is not None and fault.rank == self.rank else None
        self.model.fault = self.optimizer.fault = here
        out = self.model(batch(self.rank, step).to(self.device)).square().mean(1)
        loss = lockstep.mean(out, process_group=self.group) if self.group else out.mean()
        loss.backward()
        if here is not None and here.phase == "between":
            if here.kind in ("exception", "memory"):
                fail(here.kind)
            self.model.second.weight.grad[1, 2] = float(here.kind)
        self.optimizer.step()
        self.scheduler.step()
        if here is not None and here.phase == "behind":
            fail(here.kind)

    def guarded(self, step: int, fault: Fault | None = None) -> Any:
        """Take a guarded step, and return it."""
        guard = lockstep.guard(self.model, self.optimizer, self.scheduler, **self.options)
        with guard as guarded:
            self.body(step, fault)
        self.optimizer.zero_grad()
        return guarded

    def state(self) -> list[torch.Tensor]:
        """Everything that a step changes."""
        found = [*self.model.state_dict().values(), self.model.generator.get_state()]
        state = self.optimizer.state_dict()
        for each in state["state"].values():
            found += each.values()
        found += [torch.tensor(group["lr"]) for group in state["param_groups"]]
        found += [torch.tensor(self.scheduler.last_epoch)]
        return [each.clone() for each in found]


def run(
    program: Program,
    faults: Mapping[int, Fault],
    num_steps: int,
    *,
    leaves_out: bool,
    look: Callable[[Program, int], object] = lambda program, step: None,
) -> Any:
    """Take steps, guarded or without those of ``faults``; return what they tell, and the state.

    Behind each guarded step ``look`` is called.
    """
    told = []
    for step in range(num_steps):
        if not leaves_out:
            told.append(program.guarded(step, faults.get(step)))
            look(program, step)
        elif step not in faults:
            program.body(step)
            program.optimizer.zero_grad()
    return told, program.state()


def are_possible(kind: Kind, phase: Phase) -> bool:
    """Whether there is such a fault."""
    return kind in ("exception", "memory") or phase in ("forward", "backward", "between")
