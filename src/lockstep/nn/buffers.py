"""A module's buffers, and whose values they follow."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.arguments import check_flag, check_type
from lockstep.comm import TensorBroadcast, start_all_reduce, without_repeats

_log = logging.getLogger(__name__)

# After how many backwards in a row that leave a buffer alone something is said of it.
_LEFT_ALONE_TOO_OFTEN = 10

BufferPolicy = Literal["rank0", "mean", "local", "late"]


BufferHook = Callable[[dict[str, torch.Tensor]], Sequence[torch.futures.Future[Any]] | None]
# What to do with buffers: the same for all, or a policy for each pattern of names.
BroadcastBuffers = bool | Mapping[str, BufferPolicy]


def check_policies(broadcast_buffers: BroadcastBuffers, name: str = "broadcast_buffers") -> None:
    """Refuse policies that don't exist."""
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


def policy_of(name: str, broadcast_buffers: BroadcastBuffers) -> str:
    """What to do with the buffer of that name."""
    if not isinstance(broadcast_buffers, Mapping):
        return "rank0" if broadcast_buffers else "local"
    fitting = (p for pattern, p in broadcast_buffers.items() if fnmatchcase(name, pattern))
    return next(fitting, "rank0")


class Buffers:
    """Keeps the buffers of one module alike, each by its policy.

    Attributes:
        source: Whose values they follow; 0 unless rank 0 has no data any more.
        hook: What exchanges them instead: it is given them by name, and may return futures.

    Args:
        module: The module; its buffers may be set anew, but not be added without :meth:`look`.
        group: The ranks.
        broadcast_buffers: Whether they follow rank 0's, or a policy for each pattern of names.
        leave_out: Which modules' buffers somebody else looks after.
        ignored: Names of buffers to leave alone.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        broadcast_buffers: BroadcastBuffers,
        *,
        leave_out: Iterable[nn.Module] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        self._group = group
        self._broadcast_buffers = broadcast_buffers
        self._ignored = frozenset(ignored)
        self.source = 0
        self.hook: BufferHook | None = None
        # Those modules that own buffers, and which of them: to look through all modules costs a
        # millisecond a step for a few hundred.
        self._owners: list[_Owner] = []
        # Buffers that others hold too, such as a view of one or a scripted module: how many do.
        self._num_holders = WeakIdKeyDictionary()
        self._num_left_alone: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.look(module, leave_out)

    def follow(self, broadcast_buffers: BroadcastBuffers, module: nn.Module) -> None:
        """Look after the buffers of ``module`` in another way from now on."""
        self._broadcast_buffers = broadcast_buffers
        self.look(module)

    def look(self, module: nn.Module, leave_out: Iterable[nn.Module] = ()) -> None:
        """Find the buffers of ``module``."""
        others = {id(part) for other in leave_out for part in other.modules()}
        self._owners = [
            _Owner(weakref.ref(part), name, full, policy)
            for path, part in module.named_modules()
            if id(part) not in others
            for name in part._buffers.keys()  # noqa: SIM118 - scripted modules' can't be iterated
            if (full := f"{path}.{name}" if path else name) not in self._ignored
            and (policy := policy_of(full, self._broadcast_buffers)) != "local"
        ]
        for tensor in self.named().values():
            if (num_holders := _num_holders(tensor)) > 1:
                self._num_holders.setdefault(tensor, num_holders)

    def named(self, *policies: str) -> dict[str, torch.Tensor]:
        """The buffers that have one of ``policies``, each once; all that follow, without."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for owner in self._owners:
            module = owner.module()
            tensor = getattr(module, owner.name, None)
            if tensor is not None and (not policies or owner.policy in policies):
                found.setdefault(id(tensor), (owner.full_name, tensor))
        return dict(found.values())

    def start(self, *, late: bool = False) -> _OnTheirWay | _Hooked:
        """Send those that follow with each backward or, if ``late``, those that wait.

        Every rank must call it; finish() of what it returns writes what has come.
        """
        if self.hook is not None:
            return _Hooked(self.hook(self.named()))
        followers, means = ("", "late") if late else ("rank0", "mean")
        return _OnTheirWay(
            self._group,
            self.source,
            list(self.named(followers).values()),
            list(self.named(means).values()),
            self._is_free,
        )

    def _is_free(self, tensor: torch.Tensor) -> bool:
        """Whether no graph holds ``tensor`` that autograd will run backward.

        Autograd doesn't tell, but whoever else holds it has mostly done so from the start.
        """
        num_holders = _num_holders(tensor)
        if num_holders == 1:
            # Who held it from the start is gone: from here on, one more is a graph.
            self._num_holders.pop(tensor, None)
            self._num_left_alone.pop(tensor, None)
            return True
        usual = self._num_holders.get(tensor, 1)
        if num_holders <= usual:
            self._num_holders[tensor] = num_holders
            self._num_left_alone.pop(tensor, None)
            return True
        count = self._num_left_alone[tensor] = self._num_left_alone.get(tensor, 0) + 1
        if count == _LEFT_ALONE_TOO_OFTEN:
            name = next(name for name, own in self.named().items() if own is tensor)
            _log.warning(
                "The buffer %r has not been kept alike on all ranks in the last %s backwards: a "
                "view of it that was made since, or a graph that is kept, holds it, and a backward "
                "may need what is there. Make the view anew in each forward.",
                name,
                count,
            )
        return False


class _Owner(NamedTuple):
    """Where a buffer is, which may be set anew, and what to do with it."""

    module: weakref.ref[nn.Module]
    name: str
    full_name: str
    policy: str


class _Hooked:
    """Buffers that somebody else exchanges."""

    def __init__(self, futures: Sequence[torch.futures.Future[Any]] | None) -> None:
        self._futures = futures or ()

    def finish(self) -> None:
        """Wait for it."""
        for future in self._futures:
            future.wait()


class _OnTheirWay:
    """Buffers that are being exchanged.

    None is written that autograd may have saved for a backward to come, which would compute with
    another value than its forward: it follows with the next backward. Shown by
    test_a_buffer_that_autograd_has_saved_is_left_alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        followers: list[torch.Tensor],
        means: list[torch.Tensor],
        is_free: Callable[[torch.Tensor], bool],
    ) -> None:
        self._is_free = is_free
        counts = [tensor for tensor in means if not _has_mean(tensor)]
        self._broadcast = TensorBroadcast(group, [*followers, *counts], source)
        self._means: list[tuple[torch.Tensor, torch.Tensor, Callable[[], object]]] = []
        for tensor in means:
            if _has_mean(tensor):
                own = without_repeats(tensor.detach()).resolve_conj()
                total = own.clone(memory_format=torch.contiguous_format)
                total.div_(group.size())
                self._means.append((tensor, total, start_all_reduce(group, total).wait))

    def finish(self) -> None:
        """Wait, and write what came, except where a backward still needs what is there."""
        self._broadcast.finish(may_write=self._is_free)
        for tensor, total, wait in self._means:
            wait()
            if self._is_free(tensor):
                without_repeats(tensor.data).copy_(total)


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _num_holders(tensor: torch.Tensor) -> int:
    """How many hold ``tensor``: Python counts as one, and so does each view and each graph."""
    use_count: int = tensor._use_count()  # type: ignore[attr-defined]
    return use_count
