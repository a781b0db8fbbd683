"""Exchanges the buffers of a module between ranks, such as BatchNorm's running statistics."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_flag, check_type
from lockstep.comm import (
    Started,
    TensorBroadcast,
    differing_facts,
    join_state_of,
    start_all_reduce,
    without_repeats,
)
from lockstep.errors import ModelMismatch

_log = logging.getLogger(__name__)

_kind_of = operator.attrgetter("shape", "dtype", "device")
# The number of backwards in a row that couldn't write a buffer, after which a warning is logged.
_MANY_SKIPS = 10

BufferPolicy = Literal["rank0", "mean", "local", "late"]
BufferHook = Callable[[dict[str, torch.Tensor]], Sequence[torch.futures.Future[Any]] | None]
# One policy for all buffers (True is "rank0", False is "local"), or one for each name pattern.
BroadcastBuffers = bool | Mapping[str, BufferPolicy]


def check_policies(broadcast_buffers: BroadcastBuffers, name: str = "broadcast_buffers") -> None:
    """Raise TypeError or ValueError unless ``broadcast_buffers`` has known policies only."""
    if not isinstance(broadcast_buffers, Mapping):
        wanted = "True, False or a dict with a policy for each pattern of names"
        check_flag(name, broadcast_buffers, wanted)
        return
    for pattern, policy in broadcast_buffers.items():
        check_type(f"A pattern of names in {name}", pattern, str, "a str")
        if policy not in get_args(BufferPolicy):
            known = ", ".join(map(repr, get_args(BufferPolicy)))
            raise ValueError(
                f"{name} has {policy!r} for {pattern!r}, but must have one of {known}."
            )


def policy_of(name: str, policies: BroadcastBuffers) -> str:
    """Return the policy of the buffer ``name``: that of the first pattern that matches."""
    if not isinstance(policies, Mapping):
        return "rank0" if policies else "local"
    matching = (policy for pattern, policy in policies.items() if fnmatchcase(name, pattern))
    return next(matching, "rank0")


class _Slot(NamedTuple):
    """An attribute of a module that holds a buffer; the program may set another one at any time."""

    module: weakref.ref[nn.Module]
    attribute: str
    name: str
    policy: str

    def tensor(self) -> torch.Tensor | None:
        """Return the buffer that is there now."""
        return getattr(self.module(), self.attribute, None)


class _Form(NamedTuple):
    """What must be the same on all ranks if they exchange a buffer."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    first_name: str  # of those that the same tensor has

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    def is_that_of(self, tensor: torch.Tensor | None) -> bool:
        if tensor is None:
            return False
        return (tensor.shape, tensor.dtype, tensor.device) == self[:3]


class _Snapshot(NamedTuple):
    """The buffers as they were found to have the forms that all ranks have agreed on.

    To find that nothing has changed since takes a tenth of finding the forms.
    """

    places: list[tuple[dict[str, torch.Tensor | None], str]]  # of each slot, its module's buffers
    tensors: list[torch.Tensor | None]
    kinds: list[Any]  # of those that are there
    exchanged: dict[str, list[torch.Tensor]]  # by policy

    def is_current(self) -> bool:
        now = [buffers.get(attribute) for buffers, attribute in self.places]
        if not all(map(operator.is_, now, self.tensors)):
            return False
        return [_kind_of(tensor) for tensor in now if tensor is not None] == self.kinds


class Buffers:
    """Keeps the buffers of one module equal on all ranks, each by its policy.

    After each change of the module's buffers or of their policies, :meth:`find` must be called.

    Buffers are exchanged in the forms that all ranks have agreed on, as messages of different sizes
    are mixed up. A rank whose buffers have others tells that with its gradients; then :meth:`agree`
    compares them. Shown by test_a_buffer_of_another_form_on_a_rank_is_named.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # A function of the program that exchanges the buffers instead; it gets them by name, and
        # may return futures.
        self.hook: BufferHook | None = None
        # Found once: a search costs a millisecond in each step for a few hundred modules.
        self._slots: list[_Slot] = []
        # Those that all ranks have, with their forms.
        self._agreed: dict[_Slot, _Form | None] = {}
        self._snapshot: _Snapshot | None = None
        # For each buffer: the number of references apart from those of graphs (a view or a scripted
        # module has one), and the number of backwards in a row that found more.
        self._num_references = WeakIdKeyDictionary()
        self._num_skips = WeakIdKeyDictionary()

    def find(
        self,
        module: nn.Module,
        policies: BroadcastBuffers,
        *,
        leave_out: Iterable[nn.Module],
        ignored: Collection[str],
    ) -> None:
        """Find the buffers of ``module``, and the policy of each among ``policies``.

        Buffers of ``leave_out``, which are modules with engines of their own, are left alone, and
        so are those of the names ``ignored``.
        """
        others = {id(each) for other in leave_out for each in other.modules()}
        self._slots = [
            _Slot(weakref.ref(each), attribute, name, policy)
            for path, each in module.named_modules()
            if id(each) not in others
            for attribute in each._buffers.keys()  # noqa: SIM118 - scripted ones can't be iterated
            if (name := f"{path}.{attribute}" if path else attribute) not in ignored
            and (policy := policy_of(name, policies)) != "local"
        ]
        self._note_references()
        # The program sets policies on all ranks alike.
        slots = {slot.name: slot for slot in self._slots}
        self._agreed = {
            slots.get(slot.name, slot): form
            for slot, form in self._agreed.items()
            if slot.name in slots or policy_of(slot.name, policies) != "local"
        }
        self._snapshot = None

    def _note_references(self) -> None:
        for tensor in self.named().values():
            self._num_references.setdefault(tensor, _num_references(tensor))

    def forget_graphs(self) -> None:
        """Write to the buffers although graphs have saved them: no backward of these will come.

        Autograd's queue keeps parts of one that has failed, until some later backward, if the rank
        hears of the failure at some moments of its own.
        """
        for tensor in self.named().values():
            self._num_references[tensor] = _num_references(tensor)

    def accept(self) -> list[torch.Tensor]:
        """Take the buffers as all ranks', whose models are the same; return those that are new."""
        known = {slot.name for slot in self._agreed}
        self._agreed, self._snapshot = self._forms(), None
        return [buffer for name, buffer in self.named().items() if name not in known]

    def _forms(self) -> dict[_Slot, _Form | None]:
        first: dict[int, str] = {}
        tensors = [(slot, slot.tensor()) for slot in self._slots]
        return {
            slot: None
            if tensor is None
            else _Form(
                tensor.shape, tensor.dtype, tensor.device, first.setdefault(id(tensor), slot.name)
            )
            for slot, tensor in tensors
        }

    def has_changed(self) -> bool:
        """Whether any buffer has another form than ranks have agreed on."""
        if self.hook is not None or (self._snapshot is not None and self._snapshot.is_current()):
            return False
        self._snapshot = None
        if self._forms() != self._agreed:
            return True
        modules = [slot.module() for slot in self._slots]
        if all(isinstance(getattr(module, "_buffers", None), dict) for module in modules):
            places = [
                (module._buffers, slot.attribute)  # type: ignore[union-attr]
                for module, slot in zip(modules, self._slots, strict=True)
            ]
            tensors = [slot.tensor() for slot in self._slots]
            kinds = [_kind_of(tensor) for tensor in tensors if tensor is not None]
            exchanged = {policy: self._to_exchange(policy) for policy in ("rank0", "mean", "late")}
            self._snapshot = _Snapshot(places, tensors, kinds, exchanged)
        return False

    def changed(self) -> list[str]:
        """Return which buffers have other forms than ranks have agreed on, with both."""
        if not self.has_changed():
            return []
        before, now = (
            {s.name: f for s, f in each.items()} for each in (self._agreed, self._forms())
        )
        pairs = {name: (before.get(name), now.get(name)) for name in {**before, **now}}
        differing = ((name, *pair) for name, pair in pairs.items() if pair[0] != pair[1])
        return [f"{name!r} from {old or 'none'} to {new or 'none'}" for name, old, new in differing]

    def agree(self) -> None:
        """Compare the forms of all ranks' buffers, and exchange these. Every rank must call it.

        Raises:
            ModelMismatch: Naming the first that differs.
        """
        forms = self._forms()
        facts = {
            slot.name: [str(form), form.first_name]
            for slot, form in forms.items()
            if form is not None
        }
        by_rank = differing_facts(self._group, facts)
        if by_rank:
            raise _mismatch(by_rank)
        self._agreed, self._snapshot = forms, None
        self._note_references()
        self.start()()

    def named(self, *policies: str) -> dict[str, torch.Tensor]:
        """Return the buffers by name, each once: those with one of ``policies``, by default all."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for slot in self._slots:
            tensor = slot.tensor()
            if tensor is not None and (not policies or slot.policy in policies):
                found.setdefault(id(tensor), (slot.name, tensor))
        return dict(found.values())

    def start(self, *, late: bool = False) -> Callable[[], None]:
        """Start the exchange of buffers after a backward; if ``late``, of those of policy "late".

        Every rank must call it, and then the function that it returns, which waits and writes
        the new values. It doesn't write to a buffer that autograd may have saved for a later
        backward, which would compute with another value than its forward; the next exchange does.
        Shown by test_a_buffer_that_autograd_has_saved_is_left_alone.
        """
        if self.hook is not None:
            return partial(_wait_for, self.hook(self.named()) or ())
        if not self._agreed:
            return lambda: None
        copied = [] if late else self._to_exchange("rank0")
        averaged = self._to_exchange("late" if late else "mean")
        whole = [tensor for tensor in averaged if not _has_mean(tensor)]
        join_state = join_state_of(self._group)
        source = 0 if join_state is None else join_state.last_active[0]  # a rank that has data
        broadcast = TensorBroadcast(self._group, [*copied, *whole], source)
        sums: list[tuple[torch.Tensor, torch.Tensor, Started]] = []
        for tensor in filter(_has_mean, averaged):
            dense = without_repeats(tensor.detach()).resolve_conj()
            total = dense.clone(memory_format=torch.contiguous_format).div_(self._group.size())
            sums.append((tensor, total, start_all_reduce(self._group, total)))

        def finish() -> None:
            broadcast.finish(may_write=self._may_write)
            for tensor, total, work in sums:
                work.wait()
                if self._may_write(tensor):
                    without_repeats(tensor.data).copy_(total)

        return finish

    def _to_exchange(self, policy: str) -> list[torch.Tensor]:
        """Return the buffers of ``policy``, each once; others in place of those that have changed.

        What comes into the others' place is of no use: :meth:`agree` follows.
        """
        if self._snapshot is not None and self._snapshot.is_current():
            return self._snapshot.exchanged[policy]
        found = []
        for slot, form in self._agreed.items():
            if form is not None and slot.policy == policy and slot.name == form.first_name:
                tensor = slot.tensor()
                if tensor is None or not form.is_that_of(tensor):
                    tensor = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
                found.append(tensor)
        return found

    def _may_write(self, tensor: torch.Tensor) -> bool:
        """Whether no graph that autograd may still run backward has saved ``tensor``.

        A reference that hasn't been there from the start is probably that of a graph.
        """
        num_references = _num_references(tensor)
        if num_references <= self._num_references.get(tensor, 1):
            self._num_references[tensor] = num_references
            self._num_skips.pop(tensor, None)
            if num_references > 1 and not tensor.is_inference():
                # A graph that saved a view must raise in its backward, as after other writes.
                # Shown by
                # test_a_backward_that_needs_an_earlier_value_of_a_view_is_refused.
                increment_version(tensor)
            return True
        count = self._num_skips[tensor] = self._num_skips.get(tensor, 0) + 1
        if count == _MANY_SKIPS:
            name = next(name for name, buffer in self.named().items() if buffer is tensor)
            _log.warning(
                "The buffer %r has not been kept alike on all ranks in the last %s backwards: a "
                "view of it that was made since, or a graph that is kept, holds it, and a backward "
                "may need what is there. Make the view anew in each forward.",
                name,
                count,
            )
        return False


def _wait_for(futures: Iterable[torch.futures.Future[Any]]) -> None:
    for future in futures:
        future.wait()


def _mismatch(by_rank: Sequence[Mapping[str, Sequence[str]]]) -> ModelMismatch:
    """Return the error for buffers that differ; each rank tells form and first name by name."""
    rank, name = next(
        (rank, name)
        for rank, theirs in enumerate(by_rank)
        for name in [*theirs, *by_rank[0]]
        if theirs.get(name) != by_rank[0].get(name)
    )
    theirs, first = (by_rank[each].get(name, ["not there"])[0] for each in (rank, 0))
    return ModelMismatch(
        f"The buffer {name!r} is {theirs} on rank {rank} and {first} on rank 0, so it can't be "
        "kept alike. If it is a cache that each rank makes for its own samples, leave it to the "
        f"ranks: broadcast_buffers={{{name!r}: 'local'}}. If it is state of the training, give it "
        "one form on every rank."
    )


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _num_references(tensor: torch.Tensor) -> int:
    """The number of references to ``tensor``: one for Python, and one for each view and graph."""
    use_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return use_count
