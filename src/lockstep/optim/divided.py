"""``optimizer.state`` of a sharded optimizer, of which this rank has a part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lockstep.errors import ModelError
from lockstep.grad import name_of

State = dict[str, Any]
# The key in ``optimizer.state`` of the object that represents divided state.
_MARK = "divided among the ranks"


class Divided(State):
    """Represents in ``optimizer.state`` the state that is divided among the ranks.

    With it, ``optimizer.state`` is empty on all ranks or on none, and can't be copied or pickled.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "The state of this optimizer is divided among the ranks, so that a copy or a pickle of "
            "it on one rank would lack most of it. Let every rank call its state_dict(), and copy "
            "or save that."
        )


class DividedState(defaultdict[Any, State]):
    """The state of what this rank updates, by the tensors that it updates.

    To read the state of a parameter that isn't among these raises an error, as it would seem to be
    empty. What the program puts there is kept for :meth:`take_changes`.

    Args:
        kind: The name of the optimizer's class.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(dict)
        self._kind = kind
        # The divided parameters whose state isn't here, and the rank that has it; None for several.
        self._owners: dict[torch.Tensor, int | None] = {}
        self._admitted: dict[torch.Tensor, int | None] = {}  # those of them whose state is
        # What the program has put; nothing where it has deleted state.
        self._changes: dict[torch.Tensor, State] = {}

    def reset(self, owners: Mapping[torch.Tensor, int | None]) -> None:
        """Drop all state, and refuse from now on that of ``owners``, divided parameters.

        The value is the rank that has it, or None if it is divided among several ranks.
        """
        self.clear()
        self._owners, self._admitted, self._changes = {**owners}, {}, {}

    def set_marked(self, is_marked: bool) -> None:
        """Let a :class:`Divided` represent the state of all ranks, or not."""
        if is_marked:
            self[_MARK] = Divided()
        else:
            self.pop(_MARK, None)

    def admit(self, key: torch.Tensor, state: State) -> None:
        """Have the state of a tensor that this rank updates for the length of a step."""
        if key in self._owners:
            self._admitted[key] = self._owners.pop(key)
        if state:
            super().__setitem__(key, state)

    def dismiss(self, key: torch.Tensor) -> State:
        """Return the state of such a tensor, which isn't here afterwards."""
        state: State = super().pop(key, {})
        if key in self._admitted:
            self._owners[key] = self._admitted.pop(key)
        return state

    def take_changes(self) -> dict[torch.Tensor, State]:
        """Return what the program has put for parameters whose state is on several ranks.

        That of other parameters is of use on their owner alone, and is there already.
        """
        changes, self._changes = self._changes, {}
        return {key: state for key, state in changes.items() if self._owners[key] is None}

    def __missing__(self, key: Any) -> State:
        """Make an empty state, as torch's does; raise if another rank has it."""
        if key in self._changes:
            return self._changes[key]
        if key in self._owners:
            raise ModelError(self._refusal(key))
        return super().__missing__(key)

    def __contains__(self, key: Any) -> bool:
        """Whether it is here; raise if another rank has it."""
        if super().__contains__(key):
            return True
        if key in self._owners and key not in self._changes:
            raise ModelError(self._refusal(key))
        return key in self._owners and bool(self._changes[key])

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``, if there is any; raise if another rank has it."""
        return self[key] if key in self else default  # noqa: SIM401 - which would call this

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of ``key``, or set it; raise if another rank has it."""
        if key not in self:
            self[key] = default
        return self[key]

    def __setitem__(self, key: Any, value: State) -> None:
        """Set the state of ``key``; keep it for later if it is another rank's."""
        if key in self._owners:
            self._changes[key] = value
        else:
            super().__setitem__(key, value)

    def update(self, *others: Any, **named: Any) -> None:
        """Set the states of several keys."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    def __delitem__(self, key: Any) -> None:
        """Delete the state of ``key``, on the rank that has it."""
        if key in self._owners:
            self._changes[key] = {}
        else:
            super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Delete the state of ``key``, if it is here, and return it."""
        if key not in self._owners:
            return super().pop(key, *default)
        if not default:
            raise ModelError(self._refusal(key))
        self._changes[key] = {}
        return default[0]

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled."""
        return Divided().__reduce_ex__(2)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse to be copied."""
        return self.__reduce__()

    __copy__ = copy = __reduce__

    def _refusal(self, key: Any) -> str:
        owner = self._owners[key]
        where = "divided among the ranks" if owner is None else f"on rank {owner}"
        return (
            f"The state of {name_of(key)} in this sharded {self._kind} is {where}, and "
            "optimizer.state has this rank's part alone. To read it, let every rank call "
            "optimizer.state_dict(). To change it, let every rank set optimizer.state[parameter] "
            "to all of it, or delete it."
        )


def without(state: Mapping[Any, State], keys: Iterable[Any]) -> dict[Any, State]:
    """Return the part of ``state`` that isn't of ``keys``, nor of divided state."""
    left_out = {*keys, _MARK}
    return {key: values for key, values in state.items() if key not in left_out}
