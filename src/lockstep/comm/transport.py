"""What the ranks of one host share, as the algorithms see it: places to put data, and meetings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from lockstep.comm.call import Call
from lockstep.comm.messages import Mailbox

# Where a rank has put something, in words that its peers understand: a number for processes, the
# memory itself for threads.
Place = int | torch.Tensor


class Ranks(ABC):
    """The ranks of a group, connected.

    Attributes:
        rank: Which of the ranks this is.
        size: How many there are.
    """

    rank: int
    size: int

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return new memory, as bytes, that is reduced with the least copying."""

    @abstractmethod
    def check_open(self) -> None:
        """Raise what broke this group, if something did."""

    @abstractmethod
    def abort(self, why: str = "") -> None:
        """Make every wait of this rank end with an error."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the others that this rank takes no further part, and let go of everything."""


class Transport(Ranks):
    """Ranks that reach each other's memory.

    Note [Two slots]: each rank has two slots of ``slot_bytes``, and stages in them by turns.
    What was staged may be read from the meeting that announces it until the reader's next
    meeting but one: a rank stages in the same slot again only after a meeting at which everyone
    had finished with it. So one meeting is enough for data to go from everyone to everyone.

    Attributes:
        slot_bytes: How much can be staged at a time; the same on every rank.
        mailbox: Through which single ranks send to single ranks.
    """

    slot_bytes: int
    mailbox: Mailbox

    @abstractmethod
    def stage(self, dtype: torch.dtype, numel: int) -> tuple[Place, torch.Tensor]:
        """Return the next slot's place, and the slot as a flat tensor to write to."""

    @abstractmethod
    def meet(self, call: Call, place: Place, timeout: float) -> Sequence[Place]:
        """Wait until every rank has made the same call; return the places they announce.

        What a rank wrote before it met, the others see after they met.

        Raises:
            PeerLost: If a rank is gone.
            CollectiveTimeout: If one doesn't come within ``timeout`` seconds.
            CollectiveMismatch: If one makes another call.
        """

    @abstractmethod
    def at(self, rank: int, place: Place, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return, as a flat tensor, what ``rank`` announced to have at ``place``.

        Of this rank itself, only slots: other memory is the caller's, who has it at hand.
        """

    @abstractmethod
    def find(self, tensor: torch.Tensor) -> Place | None:
        """Return where the others reach a contiguous ``tensor``, or None if they don't."""

    @abstractmethod
    def is_staged(self, place: Place) -> bool:
        """Whether ``place``, of any rank, is in a slot."""
