"""Where a loader is: in which epoch, and how much of it the program was given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EpochPlace:
    """The epoch that was begun last, or from which the next iteration goes on.

    Attributes:
        epoch: Its number.
        next_epoch: The number of the epoch that begins next.
        num_given: How many of its batches the program was given.
        digest: A checksum of these.
        goes_on: Whether the next iteration goes on with it.
        is_in_epoch: Whether it is begun, and not over.
    """

    epoch: int = 0
    next_epoch: int = 0
    num_given: int = 0
    digest: int = 0
    goes_on: bool = False
    is_in_epoch: bool = False

    @classmethod
    def loaded(cls, epoch: int, num_given: int, digest: int) -> EpochPlace:
        """Return one that a state tells of."""
        return cls(epoch, epoch, num_given, digest, num_given > 0, num_given > 0)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, from its beginning if it is another one."""
        if self.goes_on and epoch != self.epoch:
            self.goes_on = False
            self.leave()
        self.next_epoch = epoch

    def begin(self, skip: int, digest: int) -> None:
        """The epoch begins, or goes on behind batches that were given before."""
        self.goes_on, self.is_in_epoch = False, True
        self.num_given, self.digest, self.next_epoch = skip, digest, self.epoch + 1

    def leave(self) -> None:
        """The epoch is over, or left."""
        self.num_given, self.digest, self.is_in_epoch = 0, 0, False
