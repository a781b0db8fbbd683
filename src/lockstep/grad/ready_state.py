"""Which gradients have come, in the order in which they are to launch."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence

import torch

# What has become of a gradient since it was last reduced: nothing (0), it was added to in an
# earlier backward, or in this one.
TOUCHED_EARLIER, TOUCHED_NOW = 1, 2
# What is known of it in this backward: its bucket waits for it (0), or it isn't expected, and the
# bucket doesn't wait but would take it, or it has come. Numbers and not an Enum, as each gradient
# of each step passes here.
EXCUSED, COME = 1, 2


class ReadyState:
    """What is known of each gradient, at its place in the order in which they launch.

    Most come in that order, too, and then many can be dealt with at once. Last are the sparse ones,
    for which no bucket waits.

    Args:
        parameters: Whose gradients they are.
        sparse: Those parameters, by index, whose gradients are sparse.

    Attributes:
        order: At each place the index of a parameter.
        in_order: These parameters.
        places: By the ``id()`` of a parameter, its place.
        num_dense: How many gradients aren't sparse.
        touched: At each place 0, TOUCHED_EARLIER or TOUCHED_NOW. Always the same memory.
        states: At each place 0, EXCUSED or COME.
        seen: The indices of those that have come, in that order.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], sparse: Collection[int]) -> None:
        self._parameters = parameters
        count = len(parameters)
        # Registration order turned around is a good guess: backward ends where forward began.
        dense = [index for index in range(count - 1, -1, -1) if index not in sparse]
        self.num_dense = len(dense)
        self.order = [*dense, *sparse]
        self.touched = bytearray(count)
        self._first_states = bytes(len(dense)) + bytes([EXCUSED]) * len(sparse)
        self.states = bytearray(self._first_states)
        self.seen: list[int] = []
        self._next_place = 0
        self._look_up()

    def _look_up(self) -> None:
        self.in_order = [self._parameters[index] for index in self.order]
        self.places = {id(parameter): place for place, parameter in enumerate(self.in_order)}

    def rearrange(self, dense: Iterable[int]) -> None:
        """Have those that aren't sparse in that order, by index."""
        touched = dict(zip(self.order, self.touched, strict=True))
        self.order[: self.num_dense] = dense
        self.touched[:] = bytes(touched[index] for index in self.order)
        self._look_up()

    def take_over(self, previous: ReadyState) -> None:
        """Go on where those of other parameters stop, of which some are here too."""
        for place, parameter in enumerate(self.in_order):
            if id(parameter) in previous.places:
                self.touched[place] = previous.touched[previous.places[id(parameter)]]
            elif parameter.grad is not None:
                self.touched[place] = TOUCHED_EARLIER

    def has_unreduced(self) -> bool:
        """Whether gradients have been added up since they were last reduced, and are there."""
        return any(
            touched and parameter.grad is not None
            for touched, parameter in zip(self.touched, self.in_order, strict=True)
        )

    def order_seen(self) -> list[int]:
        """The order in which gradients have come, by index; those that haven't are last."""
        unseen = sorted(set(range(len(self._parameters))) - set(self.seen), reverse=True)
        return [*self.seen, *unseen]

    def begin(self) -> None:
        """A backward has begun."""
        self.forget()
        self.seen = []
        self.touched[:] = self.touched.replace(bytes([TOUCHED_NOW]), bytes([TOUCHED_EARLIER]))

    def forget(self) -> None:
        """The backward is over, or has failed."""
        self.states[:] = self._first_states
        self._next_place = 0

    def next_places(self, parameters: Sequence[torch.Tensor]) -> range | None:
        """Where ``parameters`` are, if they are the next ones in order, and all awaited."""
        first, last = self._next_place, self._next_place + len(parameters)
        if (
            last <= self.num_dense
            and all(map(operator.is_, parameters, self.in_order[first:last]))
            and not any(self.states[first:last])
        ):
            return range(first, last)
        return None

    def come(self, places: range) -> None:
        """The gradients at ``places`` have come."""
        first, last = places.start, places.stop
        self._next_place = last
        self.states[first:last] = bytes([COME]) * len(places)
        self.touched[first:last] = bytes([TOUCHED_NOW]) * len(places)
        self.seen += self.order[first:last]

    def missing(self) -> list[int]:
        """The indices of those that haven't come."""
        if self.states.count(COME) == len(self.states):  # as after most backwards
            return []
        states = zip(self.order, self.states, strict=True)
        return sorted(index for index, state in states if state != COME)
