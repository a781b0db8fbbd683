"""The batches of a loader, epoch after epoch, from where it was; or the numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.data import DataLoader

_END: Any = object()


class Epochs:
    """Gives the batches of a loader, which can tell and load its state.

    Attributes:
        epoch: The number of the epoch, from 0.
    """

    def __init__(self, loader: Any, num_epochs: int | None) -> None:
        self._loader, self._num_epochs = loader, num_epochs
        self.epoch, self._num_given = 0, 0
        if isinstance(loader, DataLoader):  # the program may have set its epoch
            self.epoch = loader.state_dict()["epoch"]
        self._iterator: Iterator[Any] | None = None
        self._ahead: Any = None  # a batch that was asked for early, in a list; or the end
        self._state: dict[str, Any] = {}  # before that

    def state(self) -> dict[str, Any]:
        """Return where the loader is.

        Raises:
            RuntimeError: If something else has changed the loader.
        """
        found = self._state if self._ahead is not None else self._loader.state_dict()
        if isinstance(self._loader, DataLoader):
            # Between epochs its state is that of the next one.
            now = found["epoch"], found["num_batches"]
            if now not in ((self.epoch, self._num_given), (self.epoch + 1, 0)):
                raise RuntimeError(
                    f"The loader that steps() iterates over is at batch {now[1]} of epoch {now[0]},"
                    f" and steps() has given {self._num_given} batches of epoch {self.epoch}: the "
                    "body of a step has iterated over it, or changed its epoch. Make another "
                    "loader for that."
                )
        return {"epoch": self.epoch, "given": self._num_given, "loader": found}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.epoch, self._num_given = state["epoch"], state["given"]
        self._loader.load_state_dict(state["loader"])

    def next(self) -> Any:
        """Return the next batch, in a list; None after the last epoch."""
        if self._ahead is not None:
            found, self._ahead = self._ahead, None
            if found is _END:
                self._iterator = iter(())
                found = self._read()
        else:
            found = self._read()
        if found is _END:
            return None
        self._num_given += 1
        return found

    def _read(self) -> Any:
        while self._num_epochs is None or self.epoch < self._num_epochs:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator, _END)
            if batch is not _END:
                return [batch]
            if not self._num_given:
                raise ValueError(
                    f"Epoch {self.epoch} of the {type(self._loader).__name__} has no batch. Give "
                    "steps() a loader that has some."
                )
            self._iterator, self._num_given = None, 0
            self.epoch += 1
        return _END

    def is_last_of_epoch(self) -> bool:
        """Whether no batch of the epoch follows the one that was given last."""
        try:
            return bool(self._num_given >= len(self._loader))
        except (TypeError, NotImplementedError):
            pass
        if self._ahead is None and self._iterator is not None:
            self._state = self._loader.state_dict()
            batch = next(self._iterator, _END)
            self._ahead = _END if batch is _END else [batch]
        return self._ahead is _END


class Numbers:
    """Gives numbers of steps: for a program without a loader.

    Attributes:
        epoch: 0.
    """

    epoch = 0

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._next = num_steps, 0

    def state(self) -> dict[str, Any]:
        """Return the next number."""
        return {"next": self._next}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._next = state["next"]

    def next(self) -> Any:
        """Return the next number, in a list; None after the last one."""
        if self._next >= self._num_steps:
            return None
        self._next += 1
        return [self._next - 1]

    def is_last_of_epoch(self) -> bool:
        """Whether it is the last step."""
        return self._next == self._num_steps
