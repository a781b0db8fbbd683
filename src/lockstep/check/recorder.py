"""What happens in a process whose program is checked: it is watched, and ended after N steps.

The program itself is unchanged. In one process its loaders give the batches that the ranks had got,
joined.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, DistributedSampler

from lockstep import checkpoint
from lockstep.check.models import Models
from lockstep.check.records import (
    ROUNDED,
    Backward,
    Batch,
    End,
    Records,
    Step,
    hashes_of_rows,
    joined,
    of_rank,
)
from lockstep.check.switches import Switches, rounded
from lockstep.data import bytes_of
from lockstep.nn import are_parallel
from lockstep.torch_private import tree_leaves, tree_map_only

NO_SAVES = "lockstep.save() writes nothing during a check"
_HASHES = 1 << 56


class Plan(NamedTuple):
    """What is to be watched of a run."""

    folder: str
    num_steps: int
    float64: bool
    num_ranks: int  # of the parallel run
    run: str | None = None  # None: as a rank of the parallel run
    divides_itself: bool = False  # whether the program gives each rank its part of global batches


class _Finished(BaseException):
    """Ends the program after its last step."""


class Recorder:
    """A context for the program of the rank ``rank``, which is watched as ``plan`` says."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._records = Records(plan.folder, plan.run or of_rank(rank))
        self._ranks = [Records(plan.folder, of_rank(number)) for number in range(plan.num_ranks)]
        self._models = Models()
        self._end = End()
        self._num_optimizers = 0
        self._depth = 0  # of optimizers that step inside of others' steps
        self._is_loading = False  # inside of a loader's own iterator
        self._loaders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._classes: set[tuple[type, str]] = set()  # of loaders, with their methods
        self._iterations: Counter[str] = Counter()
        self._backwards: list[Backward] = []
        self._input: Backward | None = None  # of the next one, whose loss isn't known
        self._last: dict[str, torch.Tensor] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._changed: list[str] = []
        self._draws = False
        self._eps = 0.0
        self._random: object = None
        self._undo = ExitStack()
        self._switches = Switches(self._undo, self._end.notes)

    def __enter__(self) -> Self:
        switches = self._switches
        switches.seed(self._rank)
        switches.turn_off_dropout()
        if self._plan.float64:
            switches.use_float64()
        self._models.watch(switches)
        switches.wrap(DataLoader, "__init__", self._begin_loader)
        switches.wrap(Optimizer, "__init__", self._begin_optimizer)
        switches.wrap(torch.autograd, "backward", self._note_backward)
        switches.wrap(checkpoint, "save", self._leave_out_save)
        for handle in (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            nn.modules.module.register_module_forward_pre_hook(self._note_input),
        ):
            self._undo.callback(handle.remove)
        self._random = _random_state()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._undo.close()
        is_lost = (  # it waits in vain for ranks that have made their steps
            self._plan.run is None
            and isinstance(error, RuntimeError)
            and any(other.end() is not None for other in self._ranks)
        )
        if error is None or is_lost or isinstance(error, _Finished | SystemExit):
            self._records.save("end", self._end)
        return is_lost or isinstance(error, _Finished)

    # Loaders.

    def _begin_loader(
        self, original: Callable[..., None], loader: Any, *args: Any, **options: Any
    ) -> None:
        original(loader, *args, **options)
        self._loaders[loader] = f"batch-{len(self._iterations)}"
        self._iterations[self._loaders[loader]] = 0
        # What the method of a subclass gives is the batch, not what it gets from torch's.
        for name, watched in (("__iter__", self._iterate), ("__len__", self._length)):
            owner = next(cls for cls in type(loader).__mro__ if name in vars(cls))
            if (owner, name) not in self._classes:
                self._classes.add((owner, name))
                self._switches.wrap(owner, name, watched)

    def _length(self, original: Callable[[Any], int], loader: Any) -> int:
        name = self._loaders.get(loader)
        if self._is_loading or name is None:
            return original(loader)
        if self._plan.run is None:
            length = original(loader)
            self._records.save(f"length-{name}", length)
            return length
        length = self._ranks[0].load(f"length-{name}")
        return original(loader) if length is None else int(length)

    def _iterate(self, original: Callable[[Any], Any], loader: Any) -> Any:
        name = self._loaders.get(loader)
        if self._is_loading or name is None:
            return original(loader)
        self._iterations[name] += 1
        name += f"-{self._iterations[name]}"
        if self._plan.run is None:
            return self._recorded(name, self._load(original, loader), _pads(loader))
        if self._ranks[0].load(name) is None:  # a loader of this run alone
            return original(loader)
        return self._replayed(name)

    def _load(self, function: Callable[..., Any], *args: object) -> Any:
        """Call what a loader does by itself."""
        self._is_loading = True
        try:
            return function(*args)
        finally:
            self._is_loading = False

    def _recorded(self, name: str, batches: Iterator[Any], pads: bool) -> Iterator[Any]:
        """Yield ``batches``, and record each."""
        self._records.save(name, True)
        number, end = 0, object()
        while (value := self._load(next, batches, end)) is not end:
            if self._plan.float64:
                value = tree_map_only(torch.Tensor, _doubled, value)
            kept = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
            batch = Batch(kept, hashes_of_rows(value), pads, torch.get_rng_state())
            self._records.save(f"{name}-{number}", batch)
            number += 1
            self._random = _random_state()
            yield value
        self._records.save(f"{name}-{number}", None)

    def _replayed(self, name: str) -> Iterator[Any]:
        """The batches of all ranks, joined, with rank 0's random numbers after each."""
        number = 0
        while True:
            path = f"{name}-{number}"
            batches = [batch for rank in self._ranks if (batch := rank.load(path)) is not None]
            if not batches:
                if self._ranks[0].has(path):
                    return
                raise _Finished  # the ranks had ended before they got this one
            torch.set_rng_state(batches[0].random_state)
            self._random = _random_state()
            values = [batch.value for batch in batches]
            yield values[0] if self._plan.divides_itself else joined(values)
            number += 1

    def _leave_out_save(
        self, original: object, path: str | os.PathLike[str], **options: object
    ) -> Path:
        """Stand for ``lockstep.save``: a check would remove the checkpoints of real runs.

        One run would also resume from what the run before has saved.
        """
        if NO_SAVES not in self._end.notes:
            self._end.notes.append(NO_SAVES)
        return Path(path).absolute() / "000000"

    # Steps.

    def _begin_optimizer(
        self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **options: Any
    ) -> None:
        original(optimizer, *args, **options)
        self._num_optimizers += 1
        name = f"start-{self._num_optimizers}"
        tensors = self._models.tensors(optimizer)
        if self._plan.run is None:
            self._records.save(name, _copies(tensors))
            return
        # In one process the models start as on rank 0, whatever random numbers they were made of.
        given = self._ranks[0].load(name) or {}
        with torch.no_grad():
            for key, tensor in tensors.items():
                value = given.get(key)
                if value is not None and value.shape == tensor.shape:
                    is_rounded = self._plan.run == ROUNDED and value.is_floating_point()
                    tensor.copy_(rounded(value, _eps_of(value)) if is_rounded else value)

    def _note_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._input is not None or not torch.is_grad_enabled():
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if tensors and tensors[0].dim():
            self._input = Backward(0.0, len(tensors[0]), sum(hashes_of_rows(tensors[:1])) % _HASHES)
            kind = tensors[0].device.type
            if torch.is_autocast_enabled(kind):
                self._eps = torch.finfo(torch.get_autocast_dtype(kind)).eps

    def _note_backward(
        self, original: Callable[..., None], tensors: Any, *args: Any, **options: Any
    ) -> None:
        losses = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        loss = sum(float(leaf.detach().double().sum()) for leaf in losses)
        self._draws |= _random_state() != self._random
        self._backwards.append((self._input or Backward(0.0, 0, 0))._replace(loss=loss))
        self._input = None
        original(tensors, *args, **options)

    def _before_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._draws |= _random_state() != self._random
        tensors = self._models.tensors(optimizer)
        if not self._end.num_steps:
            self._start = _copies(tensors)
        trained = {id(parameter) for parameter in _trained(optimizer)}
        self._changed = [
            name
            for name, tensor in tensors.items()
            if id(tensor) in trained and name in self._last
            if not torch.equal(tensor.detach().cpu(), self._last[name])
        ]
        if self._plan.run == ROUNDED:
            for parameter in _trained(optimizer):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    eps = max(self._eps, _eps_of(parameter))
                    parameter.grad.copy_(rounded(parameter.grad, eps))

    def _after_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._end.num_steps += 1
        tensors = self._models.tensors(optimizer)
        trained = _trained(optimizer)
        ids = {id(parameter) for parameter in trained}
        gradients = {
            name: tensor.grad
            for name, tensor in tensors.items()
            if id(tensor) in ids and tensor.grad is not None
        }
        self._last = _copies(tensors)
        step = Step(
            tensors=self._last,
            gradients=_copies(gradients),
            start=self._start,
            trained=[name for name, tensor in tensors.items() if id(tensor) in ids],
            backwards=self._backwards,
            options=_options(optimizer),
            changed=self._changed,
            batch_norms=self._models.batch_norms(),
            draws=self._draws,
            is_parallel=any(are_parallel(p for p in trained if isinstance(p, nn.Parameter)))
            or self._models.has_wrapper(),
            eps=max([self._eps, *map(_eps_of, trained)]),
        )
        self._records.save(f"step-{self._end.num_steps}", step)
        self._start, self._backwards, self._draws = {}, [], False
        self._random = _random_state()
        if self._end.num_steps == self._plan.num_steps:
            raise _Finished


def _random_state() -> tuple[object, ...]:
    """The states of all generators that programs draw from without a word."""
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return (
        bytes_of(torch.get_rng_state()),
        random.getstate(),
        *(part.tobytes() if hasattr(part, "tobytes") else part for part in state),
    )


def _pads(loader: Any) -> bool:
    """Whether torch's sampler gives some samples twice, so that all ranks get equally many."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return False
    return len(sampler.dataset) % sampler.num_replicas != 0  # type: ignore[arg-type]


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dense = {k: t.to_dense() if t.is_sparse else t for k, t in tensors.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in dense.items()}


def _trained(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _eps_of(tensor: torch.Tensor) -> float:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_float else 0.0


def _options(optimizer: Optimizer) -> dict[str, str]:
    """Learning rates and other numbers, by names such as ``lr`` or, of other groups, ``lr[1]``."""
    return {
        name + (f"[{number}]" if number else ""): f"{float(value):g}"
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
    }
