"""What torch's global hooks know of an engine, and have to do for it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Forwards(enum.Enum):
    """Of which modules a hook is called before a forward, to refresh an engine."""

    NONE = enum.auto()
    OF_ALL = enum.auto()
    OF_ITS_MODULES = enum.auto()


class ForwardWatch:
    """What hooks are to do for an engine before a forward.

    Attributes:
        refreshing: Which forwards refresh it, which is stale. Else its next backward does.
        is_to_look: Whether a backward has ended since it last looked at its parameters.
        backward_ended: Called with the engine when a backward has ended, of its own or of others.
    """

    def __init__(self) -> None:
        self.refreshing, self.is_to_look = Forwards.NONE, False
        self.backward_ended: Callable[[Any], None] = lambda _: None


class Stepped:
    """With how many of an engine's backwards optimizers have stepped.

    Attributes:
        num_backwards: Those before the last step of any optimizer.
        by: Those before the last step of each.
    """

    def __init__(self) -> None:
        self.num_backwards = 0
        self.by: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
