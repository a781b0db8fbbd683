"""One flat buffer that is all-reduced at once, and the gradients that are views of it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from lockstep.comm import Pending, can_average, start_all_reduce, zero_buffer
from lockstep.errors import ParameterChanged
from lockstep.grad.comm_hook import CommHook, GradBucket, reduced_buffer
from lockstep.grad.ready_state import TOUCHED_NOW
from lockstep.grad.views import gradient_dtype, view_like
from lockstep.grad.wording import naming
from lockstep.torch_private import _foreach_copy_, _foreach_div_, _foreach_mul_, _foreach_zero_

T = TypeVar("T")

# Gradients from this size on, on average, are dealt with one by one. Below it, what a call costs
# is more than what a second pass over the memory does (2 us against 16 K floats).
_COARSE_NUMEL = 16 * 1024
# So many elements of smaller ones are brought together.
_CHUNK_NUMEL = 128 * 1024


class Bucket:
    """Some parameters' gradients, side by side in one buffer.

    Between two backwards every gradient that has been reduced IS its view here: nothing is
    copied back, and where it is still there in the next backward, autograd adds to it in place.

    Args:
        names: What these parameters are called.
        parameters: They themselves; of one dtype, and on one device. There may be none.
        touched: For each, what has become of its gradient since it was last reduced: 0,
            TOUCHED_EARLIER or TOUCHED_NOW. Who has given it goes on writing to it.
        start: How many gradients are in the buckets before this one.
        tail_size: How many elements to leave room for, behind the gradients.
        buffers_from: The group to ask for memory that it reduces in place. That memory is dear to
            get, so it is for buckets that are kept. Without, the tail lies elsewhere, since a
            communication hook may do with its buffer what it likes.
        like: A tensor of the bucket's dtype and device, if there are no parameters.

    Attributes:
        parameter_names: As given, in buffer order.
        touched: As given.
        start: As given.
        stop: The same for the bucket behind this one.
        tail: Space at the end of the buffer for facts that travel with the gradients.
        num_missing: How many gradients of this backward have yet to come.
        takes_at: At how many missing ones to take some that have come; 0 if that is not wanted.
            Till then the reducer need not look at it.
        has_left: Whether what comes now comes too late in this backward: it was launched, or is
            not to be.
        scales_on_the_way: Whether its gradients are large, and so are scaled while they are copied.
        averages: Whether the group had better average it: to scale small gradients on their way
            in takes another pass over memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        touched: memoryview,
        *,
        start: int = 0,
        tail_size: int = 0,
        buffers_from: dist.ProcessGroup | None = None,
        like: torch.Tensor | None = None,
    ) -> None:
        self.parameter_names = list(names)
        self.touched = touched
        self.start, self.stop = start, start + len(parameters)
        self._parameters = list(parameters)
        sizes = [parameter.numel() for parameter in self._parameters]
        first = self._parameters[0] if like is None else like
        self.scales_on_the_way = sum(sizes) >= _COARSE_NUMEL * len(sizes)
        self._chunk = max(1, _CHUNK_NUMEL * len(sizes) // max(1, sum(sizes)))
        self.averages = False
        dtype = gradient_dtype(first)
        if buffers_from is None:
            self._buffer = torch.zeros(sum(sizes), dtype=dtype, device=first.device)
            self._gradients, self.tail = self._buffer, self._buffer.new_zeros(tail_size)
        else:
            numel = sum(sizes) + tail_size
            self._buffer = zero_buffer(buffers_from, numel, dtype, first.device)
            self._gradients, self.tail = self._buffer.split([sum(sizes), tail_size])
            self.averages = not self.scales_on_the_way and can_average(buffers_from, first.device)
        self._offsets = [0, *itertools.accumulate(sizes)]
        self._views = [
            view_like(self._buffer, self._offsets[place], parameter)
            for place, parameter in enumerate(self._parameters)
        ]
        self._pointers = [view.data_ptr() for view in self._views]
        # What has been launched, and is waited for with wait().
        self._work: Pending | None = None
        self._hooked: torch.futures.Future[torch.Tensor] | None = None
        self.forget()

    @property
    def names(self) -> str:
        """Its parameters, in words."""
        names = self.parameter_names
        if len(names) < 2:
            return "".join(map(repr, names)) or "no parameter"
        return f"{names[0]!r} to {names[-1]!r}"

    @property
    def gradients(self) -> torch.Tensor:
        """They, as one tensor of one dimension."""
        return self._gradients[: self._offsets[-1]]

    @property
    def num_bytes(self) -> int:
        """The size of its gradients."""
        return self._offsets[-1] * self._buffer.element_size()

    def take(self, place: int) -> None:
        """Bring the gradient at ``place`` here, which has come just now.

        While it is still in the cores' caches; and what autograd has made for it is free again
        long before the bucket is full.
        """
        self.takes_at = max(0, self.num_missing - 1)
        parameter, view = self._parameters[place], self._views[place]
        gradient = parameter.grad
        # Mostly it has just been made. What else there is, the bucket sees to when it is full.
        if gradient is None or gradient is view or gradient.layout is not torch.strided:
            return
        if view.data_ptr() != self._pointers[place]:
            return
        torch.mul(gradient, self._take_scale, out=view)
        self._put_view(parameter, view)
        self._is_taken[place] = True

    def take_chunk(self) -> None:
        """Bring the next small gradients here, if they have all come."""
        places = range(self._next_chunk, self._next_chunk + self._chunk)
        self._next_chunk += self._chunk
        self.takes_at = max(0, self.takes_at - self._chunk)
        if self._touched_at(places).count(TOUCHED_NOW) == len(places):
            self._bring(places, self._take_scale)
            self._is_taken[places.start : places.stop] = b"\1" * len(places)

    def has_taken(self, place: int) -> bool:
        """Whether it is too late to add to the gradient at ``place``."""
        is_scaled = self._take_scale != 1 and self._is_taken[place]
        return self.has_left or bool(is_scaled)

    def give_back(self) -> None:
        """The backward has failed: gradients that were scaled on their way are as they came.

        Those that have left are None: a collective still writes to their memory, and no rank knows
        whether the others sent theirs too.
        """
        if self.has_left:
            for place in range(len(self._parameters)):
                if self.touched[place]:
                    self._drop(place)
        elif self._take_scale != 1:
            if taken := self._taken_views():
                _foreach_div_(taken, self._take_scale)
            self._is_taken[:] = bytes(len(self._parameters))

    def drop(self) -> None:
        """Gradients that are here are lost, as another rank had none to add."""
        for place in range(len(self._parameters)):
            self._drop(place)

    def _drop(self, place: int) -> None:
        parameter = self._parameters[place]
        self.touched[place] = 0
        if parameter.grad is self._views[place]:
            parameter.grad = None

    def fill_with(self, value: float) -> None:
        """Have ``value`` everywhere, and move gradients that are here elsewhere."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
        self._buffer.fill_(value)

    def _taken_views(self) -> list[torch.Tensor]:
        return list(itertools.compress(self._views, self._is_taken))

    def fill(self, scale: float) -> None:
        """Bring every gradient here, times ``scale``, and zeros for parameters that have none.

        A gradient that is there but that no backward has touched since the last reduction is
        copied and left alone: the other ranks may not touch it either, and then it must be as
        it was, to the bit. Shown by test_gradient_nobody_touched_keeps_its_bits.
        """
        rest, changed = [], []
        for place, is_taken in enumerate(self._is_taken):
            if not is_taken:
                rest.append(place)
            elif self._parameters[place].grad is not self._views[place]:
                changed.append(place)  # by a hook of somebody else's, since it was taken
        if rest:
            side_by_side = range(rest[0], rest[-1] + 1)
            places = side_by_side if len(side_by_side) == len(rest) else rest
            self._bring(places, scale)
        if changed:
            self._bring(changed, 1)
        if self._take_scale != scale and (taken := self._taken_views()):
            _foreach_mul_(taken, scale)

    def _bring(self, places: Sequence[int], scale: float) -> None:
        """Bring the gradients at ``places`` here; large ones are scaled on the way.

        So they pass through the cores once and not twice.
        """
        self._renew_views(places)
        here: list[torch.Tensor] = []
        lacking: list[torch.Tensor] = []
        views, parameters = _at(places, self._views), _at(places, self._parameters)
        sources: list[torch.Tensor] = [parameter.grad for parameter in parameters]  # type: ignore[misc]
        if _are_new(sources, views) and 0 not in self._touched_at(places):
            self._put_views(parameters, views)  # a step like most
        else:
            here, views, sources, lacking = self._sort(places)
        if lacking:
            _foreach_zero_(lacking)
        if self.scales_on_the_way:
            for view, source in zip([*here, *views], [*here, *sources], strict=True):
                torch.mul(source, scale, out=view)
            return
        if views:
            _foreach_copy_(views, sources)
        if scale != 1:
            if isinstance(places, range):
                first, last = self._offsets[places.start], self._offsets[places.stop]
                self._gradients[first:last].mul_(scale)
            else:
                _foreach_mul_(_at(places, self._views), scale)

    def _touched_at(self, places: Sequence[int]) -> bytes:
        if isinstance(places, range):
            return self.touched[places.start : places.stop].tobytes()
        return bytes([self.touched[place] for place in places])

    def _put_view(self, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        """Make ``view`` the gradient of ``parameter``."""
        try:
            parameter.grad = view
        except RuntimeError as error:
            raise self._changed(parameter) from error

    def _put_views(
        self, parameters: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]
    ) -> None:
        """Make ``views`` the gradients of ``parameters``."""
        parameter = parameters[0]
        try:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        except RuntimeError as error:
            raise self._changed(parameter) from error

    def _sort(self, places: Sequence[int]) -> tuple[list[torch.Tensor], ...]:
        """Tell gradients that are here from those to be copied, with where to, and none at all."""
        here, views, sources, lacking = [], [], [], []
        moved = []
        for place in places:
            parameter, view = self._parameters[place], self._views[place]
            gradient = parameter.grad
            if gradient is None:
                # It is undefined, as a Function's backward() that returns None leaves it, or
                # zero_grad() has dropped it since. No rank need have another.
                self.touched[place] = 0
                lacking.append(view)
            elif gradient is view:
                here.append(view)
                if not self.touched[place]:
                    parameter.grad = view.clone()
            else:
                views.append(view)
                sources.append(_dense(gradient))
                if self.touched[place]:
                    moved.append((parameter, view))
        if moved:
            self._put_views(*zip(*moved, strict=True))
        return here, views, sources, lacking

    def _renew_views(self, places: Sequence[int]) -> None:
        """Make views anew of those that were given other memory.

        model.float() and p.grad.data = ... do that; what the gradient is now is there, and not
        in the buffer.
        """
        pointers = [view.data_ptr() for view in _at(places, self._views)]
        if pointers == _at(places, self._pointers):
            return
        for place in places:
            if self._views[place].data_ptr() != self._pointers[place]:
                self._views[place] = view_like(
                    self._buffer, self._offsets[place], self._views[place]
                )

    def adopt(self, place: int) -> None:
        """Make the parameter at ``place`` have its view here as its gradient."""
        self._put_views([self._parameters[place]], [self._views[place]])

    def _place_of(self, parameter: torch.nn.Parameter) -> int:
        return next(place for place, own in enumerate(self._parameters) if own is parameter)

    def _changed(self, parameter: torch.nn.Parameter) -> ParameterChanged:
        """What to say when torch, which compares them, refuses a view as a gradient."""
        place = self._place_of(parameter)
        name, view = self.parameter_names[place], self._views[place]
        now = _describe(parameter, gradient_dtype(parameter))
        was = _describe(view, view.dtype)
        return ParameterChanged(
            f"The gradient of {name!r} is {now}, but was {was} when it was made parallel. "
            "Build the model as it is to be trained, then call parallelize() or "
            "DistributedDataParallel()."
        )

    def launch(self, group: dist.ProcessGroup, *, average: bool = False) -> None:
        """Start summing, or averaging, the gradients and the tail over the ranks."""
        self.has_left = True
        self._work = start_all_reduce(group, self._buffer, average=average)

    def launch_through(self, hook: CommHook, index: int, *, is_last: bool) -> None:
        """Let ``hook`` reduce the gradients, but not the tail."""
        bucket = GradBucket(index, self._gradients, self._parameters, is_last=is_last)
        self._hooked = hook(bucket)
        self.has_left = True

    def is_hook_done(self) -> bool:
        """Whether no hook is at work on it."""
        return self._hooked is None or self._hooked.done()

    def finish_hook(self, group: dist.ProcessGroup) -> None:
        """Wait for what a hook makes of it, and take that over."""
        if self._hooked is not None:
            hooked, self._hooked = self._hooked, None
            numel = self._offsets[-1]
            with naming(self.names, group):
                reduced = reduced_buffer(hooked, numel)
            if reduced.data_ptr() != self._gradients.data_ptr():
                self._gradients[:numel].copy_(reduced.view(-1))

    def launch_tail(self, group: dist.ProcessGroup) -> None:
        """Start summing the tail alone."""
        self._work = start_all_reduce(group, self.tail)

    def wait(self, group: dist.ProcessGroup) -> None:
        """Wait for what was launched, on this device's stream if it is a GPU.

        Raises:
            CollectiveFailed: If another rank is lost, or doesn't come in time.
        """
        self.finish_hook(group)
        if self._work is not None:
            work, self._work = self._work, None
            with naming(self.names, group):
                work.wait()

    def forget(self) -> None:
        """Get ready for the next backward, whatever became of this one."""
        self._work = self._hooked = None
        self.has_left = False
        self.num_missing = len(self._parameters)
        # What is here already of this backward's, and where those begin that come next.
        self._is_taken: bytearray = bytearray(len(self._parameters))
        self._next_chunk = 0
        self.takes_at = 0
        self._take_scale: float = 1.0

    def take_early(self, scale: float) -> None:
        """Take gradients when they come in this backward, and not only when all are there.

        Args:
            scale: What they are multiplied by then; 1 if more may still come to them.
        """
        self._take_scale = scale
        one_by_one = self.num_missing - 1
        in_chunks = len(self._parameters) - self._chunk
        self.takes_at = max(0, one_by_one if self.scales_on_the_way else in_chunks)


def _at(places: Sequence[int], items: list[T]) -> list[T]:
    """The items at ``places``; those side by side all at once."""
    if isinstance(places, range):
        return items[places.start : places.stop]
    return [items[place] for place in places]


def _are_new(gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> bool:
    """Whether all are there and strided, and none is its view still."""
    return (
        not any(map(operator.is_, gradients, views))
        and not any(map(operator.is_, gradients, itertools.repeat(None)))
        and {gradient.layout for gradient in gradients} <= {torch.strided}  # type: ignore[union-attr]
    )


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _describe(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    return f"{tuple(tensor.shape)} {str(dtype).removeprefix('torch.')} on {tensor.device}"
