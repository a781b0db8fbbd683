"""In which module of a step values begin not to be finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.torch_private import tree_leaves


class Origin:
    """Looks at what goes into modules and what comes out, forward and backward, in one step."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        # They tell where NaN began, and infinity, which a mask may have with good reason.
        self._first: Callable[[], str] | None = None
        self._infinite: Callable[[], str] | None = None
        self._names = {
            module: f"{prefix}{name}".rstrip(".") or "the model"
            for number, model in enumerate(models)
            for prefix in [f"models[{number}]." if len(models) > 1 else ""]
            for name, module in model.named_modules()
        }
        self._running: list[_WatchedCall] = []  # the innermost last
        self._handles: list[Any] = []
        self._num_uses: Counter[torch.Tensor] = Counter()  # calls of each parameter's module

    @property
    def text(self) -> str:
        """Where the first value came from that isn't finite; "" if none was seen."""
        if self._first is None:
            return "" if self._infinite is None else self._infinite()
        if self._infinite is None or (before := self._infinite()) == self._first():
            return self._first()
        return f"{self._first()}; infinity was first {before}"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look, within, at each call of a module."""
        try:
            for module in self._names:
                self._handles += [
                    module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]
            yield
        finally:
            for handle in self._handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, options: Any) -> Any:
        outer = self._running[-1] if self._running else None
        call = _WatchedCall(self, f"{self._names[module]!r} ({type(module).__name__})", outer)
        self._running.append(call)
        parameters = [p for p in module.parameters(recurse=False) if p.requires_grad]
        self._num_uses.update(parameters)
        for parameter in parameters:
            look = self._only_if_used_once(parameter, call.look_at)
            self._handles.append(parameter.register_hook(look))
        call.take(_tensors_in((args, options)), [*module.parameters(recurse=False)])
        # What several modules take gets the sum of their gradients; each is to show its own.
        # Not those in lists and dicts, which the module may change for others to see.
        return (
            tuple(map(call.apart, args)),
            {name: call.apart(value) for name, value in options.items()},
        )

    def _only_if_used_once(
        self, parameter: torch.Tensor, look: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        return lambda gradient: look(gradient) if self._num_uses[parameter] == 1 else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop().give(_tensors_in(output))

    def note(self, tell: Callable[[], str], values: Sequence[torch.Tensor]) -> None:
        """Note who can tell where the first ``values`` come from that aren't finite."""
        if any(bool(value.detach().isnan().any()) for value in values if _is_plain(value)):
            self._first = self._first or tell
        elif self._first is None:
            self._infinite = self._infinite or tell


class _WatchedCall:
    """One call of a module: whether what it took was finite, and then the gradients behind it."""

    def __init__(self, origin: Origin, what: str, outer: _WatchedCall | None) -> None:
        self._origin, self._what, self._outer = origin, what, outer
        self._took_finite = self._is_finite_behind = True
        self._has_outputs = False  # that were found, and have gradients

    def take(self, values: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """Look at what the module is called with, and at its parameters."""
        self._took_finite = _are_finite(values)
        if not _are_finite(parameters):
            self._origin.note(lambda: f"in the parameters of {self._what}", parameters)

    def apart(self, value: Any) -> Any:
        """Return ``value``, if it is a tensor, as one whose gradient is of this call alone."""
        if not (isinstance(value, torch.Tensor) and value.requires_grad and _is_plain(value)):
            return value
        if not torch.is_grad_enabled():
            return value
        alone = value.view_as(value)
        alone.register_hook(self.look_at)
        return alone

    def give(self, values: Sequence[torch.Tensor]) -> None:
        """Look at what it returns."""
        if not _are_finite(values):
            # Such as a mask of -inf, which need not be why.
            given = "" if self._took_finite else ", which was given values that aren't finite"
            self._origin.note(lambda: f"in the forward of {self._what}{given}", values)
        for value in values:
            if value.requires_grad:
                self._has_outputs = True
                value.register_hook(self._look_behind)

    def _look_behind(self, gradient: torch.Tensor) -> None:
        if not _are_finite([gradient]):
            self._is_finite_behind = False
            self._origin.note(self._behind, [gradient])

    def _behind(self) -> str:
        """Tell in which module's own code it was, behind this one; known when all is computed."""
        outermost: _WatchedCall = self
        while (outer := outermost._outer) is not None:
            if outer._is_finite_behind and outer._has_outputs:
                return f"in the backward of {outer._what}"
            outermost = outer
        return f"behind {outermost._what}, as in the loss"

    def look_at(self, gradient: torch.Tensor) -> None:
        """Look at a gradient that the module's backward has computed."""
        is_seen = self._is_finite_behind and self._has_outputs
        if is_seen and not _are_finite([gradient]):
            self._origin.note(lambda: f"in the backward of {self._what}", [gradient])


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(t.detach().isfinite().all()) for t in tensors if _is_plain(t))
