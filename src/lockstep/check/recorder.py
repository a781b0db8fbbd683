"""What happens in a process whose program is checked: it is watched, and ended after N steps.

The program itself is unchanged. In one process its loaders give the global batches of which the
ranks had got parts. In a trial, suspects are switched off.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import lockstep.nn
from lockstep import checkpoint
from lockstep.check.batches import hashes_of_rows
from lockstep.check.loaders import Finished, Loaders
from lockstep.check.locate import Trace
from lockstep.check.models import Models
from lockstep.check.records import ROUNDED, Backward, CheckPlan, End, Step, of_rank
from lockstep.check.switches import Switches, rounded
from lockstep.check.trials import Suspect, Trial, options_of
from lockstep.comm import bytes_of
from lockstep.generators import global_generators
from lockstep.nn import are_parallel, current_shard
from lockstep.torch_private import tree_leaves
from lockstep.world import parameters_of

NO_SAVES = "lockstep.save() writes nothing during a check"
_HASHES = 1 << 56


class _StepSoFar:
    """What has been seen of the step that goes on.

    Attributes:
        start: The tensors of optimizers that were made in it.
        backwards: Its backwards.
        inputs: A checksum of what modules were given.
        changed: The names of tensors that the program has changed between two steps.
        draws: Whether the program has drawn random numbers.
        accumulates: Whether it has called accumulate().
        num_in_shards: The number of backwards in loops over shards.
    """

    def __init__(self) -> None:
        self.start: dict[str, torch.Tensor] = {}
        self.backwards: list[Backward] = []
        self.inputs = 0
        self.changed: list[str] = []
        self.draws = self.accumulates = False
        self.num_in_shards = 0


class WatchedProgram:
    """A context for the program of the rank ``rank``, which is watched as ``plan`` says."""

    def __init__(self, plan: CheckPlan, rank: int) -> None:
        self._plan = plan
        self._rank = rank
        self._records = plan.records(plan.run or of_rank(rank), plan.trial)
        self._ranks = [plan.records(of_rank(number)) for number in range(plan.num_ranks)]
        self._models = Models()
        self._end = End()
        self._made: list[weakref.ref[Optimizer]] = []  # optimizers, in the order of their making
        self._depth = 0  # of optimizers that step inside of others' steps
        self._step = _StepSoFar()
        self._input: Backward | None = None  # of the next backward, whose loss isn't known
        self._last: dict[str, torch.Tensor] = {}
        self._eps = 0.0
        self._undo = ExitStack()
        self._switches = Switches(self._undo, self._end.notes)
        self._trace = Trace(self._models) if plan.trial else None
        self._trial = Trial(plan, rank, self._switches, self._trains, self._num_rows)
        self._loaders = Loaders(plan, self._records, self._switches, self._trial.after_batch)

    def _trains(self) -> bool:
        return bool(self._made) and not self._depth and not self._loaders.is_loading

    def _num_rows(self) -> int:
        return self._input.num_rows if self._input is not None else self._loaders.num_rows

    def __enter__(self) -> Self:
        switches = self._switches
        switches.seed(0 if self._trial.has(Suspect.SEEDS) else self._rank)
        switches.turn_off_dropout()
        if self._plan.float64:
            switches.use_float64()
        self._models.watch(switches)
        self._loaders.watch()
        self._trial.watch()
        switches.wrap(Optimizer, "__init__", self._begin_optimizer)
        switches.wrap(torch.autograd, "backward", self._note_backward)
        switches.wrap(checkpoint, "save", self._leave_out_save)
        switches.wrap(lockstep.nn, "accumulate", self._note_accumulation)
        switches.wrap(lockstep.nn, "join", self._note_join)
        switches.wrap(lockstep.nn.DistributedDataParallel, "join", self._note_join)
        switches.wrap(nn.parallel.DistributedDataParallel, "join", self._note_join)
        # The program has no hooks that would be called twice for it.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global")
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            nn.modules.module.register_module_forward_pre_hook(self._note_input),
        ]
        if self._trace is not None:
            handles += [
                nn.modules.module.register_module_forward_pre_hook(self._trace.note_input),
                nn.modules.module.register_module_forward_hook(self._trace.note_output),
            ]
            self._be_silent()
            # Without a suspect the ranks may wait for each other in collectives.
            timer = threading.Timer(self._plan.patience, os._exit, (1,))
            timer.daemon = True
            timer.start()
            self._undo.callback(timer.cancel)
        for handle in handles:
            self._undo.callback(handle.remove)
        self._loaders.random_state = global_generators().read()
        if self._trial.together is not None:
            self._undo.enter_context(self._trial.together)
        return self

    def _be_silent(self) -> None:
        """Show nothing of what the program prints in a trial: it has been shown before."""
        null = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            with contextlib.suppress(OSError):
                os.dup2(null, number)
        os.close(null)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._undo.close()
        others = (
            self._plan.records(of_rank(n), self._plan.trial) for n in range(self._plan.num_ranks)
        )
        is_lost = (  # it waits in vain for ranks that have made their steps
            self._plan.run is None
            and isinstance(error, RuntimeError)
            and any(other.end() is not None for other in others)
        )
        if error is None or is_lost or isinstance(error, Finished | SystemExit):
            self._records.save("end", self._end)
            self._records.save("sites", self._trial.sites)
            if self._trial.together is not None:
                self._records.save("drawn", self._trial.together.drawn)
        return is_lost or isinstance(error, Finished)

    def _leave_out_save(
        self, original: object, path: str | os.PathLike[str], **options: object
    ) -> Path:
        """Stand for ``lockstep.save``: a check would remove the checkpoints of real runs.

        One run would also resume from what the run before has saved.
        """
        if NO_SAVES not in self._end.notes:
            self._end.notes.append(NO_SAVES)
        self._note_evaluation()
        return Path(path).absolute() / "000000"

    def _note_accumulation(self, original: Callable[..., object], *args: Any) -> object:
        self._step.accumulates = True
        return original(*args)

    def _note_join(self, original: Callable[..., object], *args: Any, **options: Any) -> object:
        self._end.joins = True
        return original(*args, **options)

    # Steps.

    def _begin_optimizer(
        self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **options: Any
    ) -> None:
        original(optimizer, *args, **options)
        self._made.append(weakref.ref(optimizer))
        name = f"start-{len(self._made)}"
        tensors = self._models.tensors(optimizer)
        if self._plan.run is None:
            self._trial.start(tensors)
            self._records.save(name, _copies(tensors))
        else:
            # In one process the models start as on rank 0, whatever numbers they were made of.
            given = self._ranks[0].load(name) or {}
            if not self._end.num_steps:
                self._records.save(name, _copies(tensors))
            with torch.no_grad():
                for key, tensor in tensors.items():
                    value = given.get(key)
                    if value is not None and value.shape == tensor.shape:
                        is_rounded = self._plan.run == ROUNDED and value.is_floating_point()
                        tensor.copy_(rounded(value, _eps_of(value)) if is_rounded else value)
        if not self._end.num_steps:
            self._step.start |= _copies(tensors)

    def _all_trained(self) -> dict[str, torch.Tensor]:
        """The tensors that any optimizer changes."""
        found: dict[str, torch.Tensor] = {}
        for number, optimizer in self._optimizers():
            named = self._named(optimizer)
            found |= {_of_optimizer(name, number): tensor for name, tensor in named.items()}
        return found

    def _optimizers(self) -> Iterator[tuple[int, Optimizer]]:
        """The optimizers that there are, with their numbers."""
        for number, ref in enumerate(self._made, start=1):
            if (optimizer := ref()) is not None:
                yield number, optimizer

    def _named(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The tensors that ``optimizer`` changes."""
        ids = {id(parameter) for parameter in parameters_of(optimizer)}
        tensors = self._models.tensors(optimizer)
        return {name: tensor for name, tensor in tensors.items() if id(tensor) in ids}

    def _note_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled():
            if not module.training:
                self._note_evaluation()
                self._note_weights(module)
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if not tensors or not tensors[0].dim():
            return
        if tensors[0].layout is torch.strided:
            first = tensors[0].detach().cpu().contiguous()  # kept while its memory is read
            self._step.inputs = zlib.crc32(bytes_of(first), self._step.inputs)
        if self._input is None:
            rows = sum(hashes_of_rows(tensors[:1])) % _HASHES
            self._input = Backward(0.0, len(tensors[0]), rows)
            kind = tensors[0].device.type
            if torch.is_autocast_enabled(kind):
                self._eps = torch.finfo(torch.get_autocast_dtype(kind)).eps

    def _note_evaluation(self) -> None:
        """Write down the tensors with which the program evaluates, once after each step."""
        name = f"evaluation-{self._end.num_steps}"
        if self._end.num_steps and not self._depth and not self._records.has(name):
            found: dict[str, torch.Tensor] = {}
            for number, optimizer in self._optimizers():
                tensors = self._models.tensors(optimizer)
                found |= {_of_optimizer(name, number): t for name, t in tensors.items()}
            self._records.save(name, _copies(found))

    def _note_weights(self, module: nn.Module) -> None:
        """Note whether ``module`` is evaluated with weights that its optimizer only trains with."""
        for _, optimizer in self._optimizers():
            trains = any(group.get("train_mode") is True for group in optimizer.param_groups)
            if trains and callable(getattr(optimizer, "eval", None)):
                evaluated = {id(parameter) for parameter in module.parameters()}
                if evaluated & {id(parameter) for parameter in parameters_of(optimizer)}:
                    self._end.not_evaluating = type(optimizer).__name__

    def _note_backward(
        self, original: Callable[..., None], tensors: Any, *args: Any, **options: Any
    ) -> None:
        losses = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
        loss = sum(float(leaf.detach().double().sum()) for leaf in losses)
        self._note_draws()
        known = (self._input or Backward(0.0, 0, 0))._replace(loss=loss)
        self._input = None
        if not self._step.backwards:
            self._trial.note_kept(self._all_trained().values())
        self._step.backwards.append(known)
        self._step.num_in_shards += current_shard() is not None
        self._loaders.num_backwards += 1
        trained = self._all_trained() if self._plan.suspects else {}
        tensors = self._trial.before_backward(tensors, known.num_rows, trained)
        with DividedBackward(losses) as division:
            original(tensors, *args, **options)
        if self._step.backwards:  # no optimizer has stepped in the backward
            self._step.backwards[-1] = self._step.backwards[-1]._replace(divisor=division.divisor)

    def _note_draws(self) -> None:
        self._step.draws |= self._loaders.random_state != global_generators().read()

    def _before_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._note_draws()
        last = self._last or self._step.start
        self._step.changed = [
            name
            for name, tensor in self._named(optimizer).items()
            if name in last and not torch.equal(tensor.detach().cpu(), last[name])
        ]
        self._trial.before_step(optimizer, parameters_of(optimizer))
        if self._plan.run == ROUNDED:
            for parameter in parameters_of(optimizer):
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    eps = max(self._eps, _eps_of(parameter))
                    parameter.grad.copy_(rounded(parameter.grad, eps))

    def _after_step(self, optimizer: Optimizer, args: object, options: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        self._end.num_steps += 1
        number = self._end.num_steps
        named, trained = self._named(optimizer), parameters_of(optimizer)
        gradients = {name: t.grad for name, t in named.items() if t.grad is not None}
        self._last = _copies(self._models.tensors(optimizer))
        step = Step(
            tensors=self._last,
            gradients=_copies(gradients),
            start=self._step.start,
            trained=[*named],
            parallel=self._parallel(named),
            backwards=self._step.backwards,
            options=options_of(optimizer),
            changed=self._step.changed,
            inputs=self._step.inputs,
            draws=self._step.draws,
            accumulates=self._step.accumulates,
            eps=max([self._eps, *map(_eps_of, trained)]),
            in_shards=0 < self._step.num_in_shards == len(self._step.backwards),
        )
        self._records.save(f"step-{number}", step)
        if self._trace is not None:
            self._records.save(f"trace-{number}", self._trace.take())
        self._trial.after_step(trained)
        self._step = _StepSoFar()
        self._loaders.random_state = global_generators().read()
        if number == self._plan.num_steps:
            raise Finished

    def _parallel(self, named: dict[str, torch.Tensor]) -> list[str]:
        if self._models.has_wrapper():
            return [*named]
        parameters = {name: p for name, p in named.items() if isinstance(p, nn.Parameter)}
        are = are_parallel(parameters.values())
        return [name for name, is_one in zip(parameters, are, strict=True) if is_one]


class DividedBackward:
    """A context for a backward; ``divisor`` is what the result of lockstep.mean() is divided by."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        self.divisor = 1.0
        self._node = losses[0].grad_fn if len(losses) == 1 else None
        self._handle: Any = None

    def __enter__(self) -> Self:
        if self._node is None or self._node.name() not in ("DivBackward0", "MulBackward0"):
            return self
        below = [node for node, _ in self._node.next_functions if node is not None]
        if len(below) == 1 and below[0].name().endswith("MeanBackward"):  # of this package
            self._handle = below[0].register_prehook(self._note)
        return self

    def _note(self, gradients: tuple[torch.Tensor, ...]) -> None:
        factor = float(gradients[0])
        # Half of a square is nothing that an accumulation of two micro-batches has brought.
        is_half = factor == 0.5 and self._node is not None and self._node.name() == "MulBackward0"
        self.divisor = 1 / factor if factor and not is_half else 1.0

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()


def _of_optimizer(name: str, number: int) -> str:
    """Tell tensors apart that two optimizers have, and no model."""
    return f"optimizer {number}: {name}" if name.startswith("param_groups") else name


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dense = {k: t.to_dense() if t.is_sparse else t for k, t in tensors.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in dense.items()}


def _eps_of(tensor: torch.Tensor) -> float:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if is_float else 0.0
