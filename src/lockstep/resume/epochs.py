"""The batches of a loader, epoch after epoch, from where it was; or the numbers of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.data import DataLoader

_END: Any = object()


class Epochs:
    """Gives the batches of a loader, which can tell and load its state.

    Attributes:
        is_foreign: Whether the loader is another than lockstep's: its state may be the rank's own,
            and it may draw from the global generators.
    """

    def __init__(self, loader: Any, num_epochs: int | None) -> None:
        self._loader, self._num_epochs = loader, num_epochs
        self._epoch, self._num_given = 0, 0
        self.is_foreign = not isinstance(loader, DataLoader)
        if not self.is_foreign:  # the program may have set its epoch
            self._epoch = loader.state_dict()["epoch"]
        self._iterator: Iterator[Any] | None = None
        self._ahead: Any = None  # a batch that was asked for early, in a list; or the end
        self._state: dict[str, Any] = {}  # before that

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0; before the first batch, that of the batch."""
        is_over = self._iterator is None and 0 < self._num_given == self._length()
        return self._epoch + is_over

    def state(self) -> dict[str, Any]:
        """Return where it is, but for a foreign loader's own state.

        Raises:
            RuntimeError: If something else has changed the loader.
        """
        state = {"epoch": self._epoch, "given": self._num_given, "of": type(self._loader).__name__}
        return state if self.is_foreign else state | {"loader": self._checked()}

    def loader_state(self) -> Any:
        """Return the state of a foreign loader; None of lockstep's."""
        return self._loader_state() if self.is_foreign else None

    def _loader_state(self) -> Any:
        return self._state if self._ahead is not None else self._loader.state_dict()

    def _checked(self) -> dict[str, Any]:
        found: dict[str, Any] = self._loader_state()
        now = found["epoch"], found["num_batches"]
        if now == (self._epoch, self._num_given):
            return found
        raise RuntimeError(
            f"The loader that steps() iterates over is at batch {now[1]} of epoch {now[0]}, and "
            f"steps() has given {self._num_given} batches of epoch {self._epoch}: the body of a "
            "step has iterated over it, or changed its epoch. Make another loader for that."
        )

    def load(self, state: dict[str, Any], loader_state: Any) -> None:
        """Go on from a state, and that of a foreign loader.

        Raises:
            ValueError: If they are of another loader.
        """
        name = type(self._loader).__name__
        if "next" in state or ("loader" in state) == self.is_foreign:
            raise ValueError(
                f"The run's batches came from a {state['of']}, and this loader is a {name}. Give "
                "steps() the loader that the run was begun with, or another path."
            )
        self._epoch, self._num_given = state["epoch"], state["given"]
        self._loader.load_state_dict(loader_state if self.is_foreign else state["loader"])

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
        while self._num_epochs is None or self._epoch < self._num_epochs:
            if self._iterator is None:
                self._iterator = iter(self._loader)
            batch = next(self._iterator, _END)
            if batch is not _END:
                return [batch]
            if not self._num_given:
                raise ValueError(
                    f"Epoch {self._epoch} of the {type(self._loader).__name__} has no batch. Give "
                    "steps() a loader that has some."
                )
            self._iterator, self._num_given = None, 0
            self._epoch += 1
        return _END

    @property
    def is_last_epoch(self) -> bool:
        """Whether no epoch follows, by number."""
        return self._num_epochs is not None and self._epoch + 1 >= self._num_epochs

    def is_last_of_epoch(self, *, reads: bool = True) -> bool:
        """Whether no batch of the epoch follows the one that was given last, as far as is known.

        Args:
            reads: Whether it may read the next batch to know.
        """
        if (length := self._length()) is not None:
            return self._num_given >= length
        if reads and self._ahead is None and self._iterator is not None:
            self._state = self._loader.state_dict()
            batch = next(self._iterator, _END)
            self._ahead = _END if batch is _END else [batch]
        return self._ahead is _END

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None


class Numbers:
    """Gives numbers of steps: for a program without a loader.

    Attributes:
        epoch: 0.
        is_foreign: False.
        is_last_epoch: True.
    """

    epoch, is_foreign, is_last_epoch = 0, False, True

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._next = num_steps, 0

    def state(self) -> dict[str, Any]:
        """Return the next number."""
        return {"next": self._next, "of": "number of steps"}

    def loader_state(self) -> None:
        """There is no loader."""

    def load(self, state: dict[str, Any], loader_state: Any) -> None:
        """Go on from a state."""
        if "loader" in state or "given" in state:
            raise ValueError(
                f"The run's batches came from a {state['of']}, and steps() is given a number of "
                "steps. Give it the loader that the run was begun with, or another path."
            )
        self._next = state["next"]

    def next(self) -> Any:
        """Return the next number, in a list; None after the last one."""
        if self._next >= self._num_steps:
            return None
        self._next += 1
        return [self._next - 1]

    def is_last_of_epoch(self, *, reads: bool = True) -> bool:
        """Whether it is the last step."""
        return self._next == self._num_steps
