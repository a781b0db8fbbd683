"""A rank's part of a dataset's indices, or of those of another sampler, for each epoch."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from lockstep.arguments import as_whole_number, refusal
from lockstep.comm import check_same_facts, differing_facts, join_state_of
from lockstep.data.batches import samplers_in
from lockstep.errors import CollectiveMismatch
from lockstep.same_bits import exclusive
from lockstep.world import group_or_all

Mode = Literal["pad", "drop", "exact"]

_T_co = TypeVar("_T_co", covariant=True)
# How many indices are made numbers of Python at once.
_CHUNK = 2**16
_CURE = (
    "It gives each rank its part of all indices: make it with the same options on all ranks, of "
    "the whole dataset, or of a sampler that gives all indices in the same order."
)


class DistributedSampler(TorchSampler[_T_co]):
    """This rank's indices: every ``num_replicas``-th of an epoch's, beginning with ``rank``. ::

        sampler = lockstep.DistributedSampler(dataset)
        for x, y in DataLoader(dataset, batch_size, sampler=sampler): ...

        batches = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)
        batches = lockstep.DistributedSampler(batches)  # the ranks share whole batches
        for x, y in DataLoader(dataset, batch_sampler=batches): ...

    Each ``iter()`` begins the next epoch, 0 at first, unless ``set_epoch()`` has set another.
    With torch's arguments an epoch has the indices of torch's ``DistributedSampler``. If the ranks
    are those of a process group, all of them must call ``iter()``, which blocks until they have,
    and verifies that they agree (but not in ``lockstep.join``).

    With ``mode="exact"`` the ranks may get different numbers of batches. That is right for an
    evaluation, with :func:`lockstep.reduce` at its end; to train so takes :func:`lockstep.join`.

    Args:
        dataset: A dataset of known length; or a sampler or batch sampler of known length, or
            anything else that is iterable, has a length and can't be indexed. The ranks share its
            indices, or its batches. It is read in each epoch with its ``generator``, or else the
            random numbers of torch and Python, seeded by ``seed`` and the epoch.
        num_replicas: The number of ranks; by default that of the process group.
        rank: This rank; by default that in the process group.
        shuffle: Whether to shuffle a dataset's indices. The order of a sampler is its own.
        seed: Seed of the shuffle, the same on all ranks.
        drop_last: Chooses ``mode="drop"``.
        mode: If the ranks can't get equally many, ``"pad"`` repeats the first indices, ``"drop"``
            leaves the last ones out, and ``"exact"`` gives each index to exactly one rank, so that
            some ranks have one more. The default is ``"pad"``, as torch does.
        process_group: The ranks; by default all of ``lockstep.init()``.

    Raises:
        CollectiveMismatch: From ``iter()``, on every rank, if ranks have other epochs, seeds,
            lengths, modes or orders, or the same ``rank``.
        TypeError: If ``dataset`` has no length, or a number isn't whole.
        ValueError: If there is no such ``rank`` or ``mode``; from ``iter()``, if the length has
            changed, or a sampler gave more or fewer indices.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mode: Mode | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        mode = mode if mode is not None else "drop" if drop_last else "pad"
        if mode not in get_args(Mode) or (drop_last and mode != "drop"):
            raise ValueError(refusal("mode", mode, f"one of {get_args(Mode)} that fits drop_last"))
        self._group = _group_of(num_replicas, rank, process_group)
        if num_replicas is None:
            num_replicas = self._group.size() if self._group is not None else 1
        if rank is None:
            rank = self._group.rank() if self._group is not None else 0
        num_replicas = as_whole_number("num_replicas", num_replicas, "1 rank or more", at_least=1)
        rank = as_whole_number("rank", rank)
        self.mode, self._length = mode, _length_of(dataset)
        seed, drop_last = as_whole_number("seed", seed), mode == "drop"
        super().__init__(cast(Any, dataset), num_replicas, rank, shuffle, seed, drop_last)
        if mode == "exact":
            self.num_samples = len(range(rank, self._length, num_replicas))
            self.total_size = self._length
        self._is_sampler = isinstance(dataset, Sampler) or not hasattr(dataset, "__getitem__")
        self._has_begun = False  # the epoch of this number

    def __iter__(self) -> Iterator[_T_co]:
        """Begin the next epoch."""
        if self._has_begun:
            self.epoch += 1
        self._has_begun = True
        return _Indices(self)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be of this epoch."""
        self.epoch, self._has_begun = as_whole_number("epoch", epoch), False

    def state_dict(self) -> dict[str, int]:
        """The epoch that the next ``iter()`` begins.

        How far an epoch is, the iterators' ``state_dict()`` says: torchdata's StatefulDataLoader
        saves both, where this is its ``sampler`` or ``batch_sampler``. Loaders read ahead, so only
        one that saves a state knows how much of the epoch it has given.
        """
        return {"epoch": self.epoch + self._has_begun}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with that epoch."""
        self.set_epoch(state["epoch"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None}  # which can't be pickled or copied

    def _local_indices(self, start: int = 0) -> Iterator[_T_co]:
        """Return this rank's indices in this epoch, but the first ``start``.

        Every rank calls it; it compares their orders.
        """
        order = self._order()
        self._check(order)
        places = range(self.rank, self.total_size, self.num_replicas)[start:]
        if not isinstance(order, Tensor):  # with "pad", places beyond the end begin anew
            return (order[place % self._length] for place in places)
        # This rank's alone are kept; the generator has them when the others are let go of.
        end = min(self.total_size, self._length)
        indices = order[places.start : end : places.step].clone()
        again = [int(order[place % self._length]) for place in places[len(indices) :]]
        del order
        return itertools.chain(_numbers(indices), again)

    def _order(self) -> Any:
        """Return the indices of all ranks in this epoch, the same on each rank."""
        seed, source = self.seed + self.epoch, cast(Any, self.dataset)
        if self._is_sampler:
            if callable(set_epoch := getattr(source, "set_epoch", None)):
                set_epoch(self.epoch)
            with _seeded(source, seed):
                return [*itertools.islice(source, self._length + 1)]
        if self.shuffle:
            generator = torch.Generator().manual_seed(seed)
            return torch.randperm(len(source), generator=generator, device="cpu")
        return range(len(source))

    def _check(self, order: Any) -> None:
        """Raise an error unless all ranks have the same order, of the length that it first had."""
        if self._group is not None and join_state_of(self._group) is None:
            facts: dict[str, object] = {
                "mode": self.mode,
                "num_replicas": self.num_replicas,
                "length": f"{len(order)}, and {self._length} at first,",
                "seed": self.seed,
                "epoch": self.epoch,
                "shuffle": bool(self.shuffle) or self._is_sampler,
            }
            if self._is_sampler:
                digest = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest()
                facts["order of the sampler, by its digest,"] = digest
            # Ranks with numbers of their own are compared; else equal facts cost one all-reduce.
            given = None if self.rank == self._group.rank() else self.rank
            by_rank = differing_facts(self._group, facts | {"rank": given})
            numbers = [theirs.pop("rank") for theirs in by_rank]
            check_same_facts(self._group, "DistributedSampler", by_rank, _CURE)
            numbers = [rank if given is None else given for rank, given in enumerate(numbers)]
            for rank, number in enumerate(numbers):
                if number in numbers[:rank]:
                    raise CollectiveMismatch(
                        f"DistributedSampler got rank={number} on ranks {numbers.index(number)} "
                        f"and {rank}, which would train on the same data. Leave it out.",
                        [rank],
                        "DistributedSampler",
                    )
        if len(order) != self._length:
            what = "indices in this epoch, or more," if self._is_sampler else "elements now,"
            raise ValueError(
                f"{type(self.dataset).__name__} has {len(order)} {what} and its length was "
                f"{self._length}. Make a new DistributedSampler when it changes."
            )


def _numbers(tensor: Tensor) -> Iterator[Any]:
    """Yield the elements as numbers of Python, of which there are few at once."""
    for first in range(0, len(tensor), _CHUNK):
        yield from tensor[first : first + _CHUNK].tolist()


class _Indices(Iterator[_T_co]):
    """A rank's indices in an epoch, whose state torchdata's StatefulDataLoader saves."""

    def __init__(self, sampler: DistributedSampler[_T_co]) -> None:
        self._sampler, self._epoch, self._num_given = sampler, sampler.epoch, 0
        self._rest = sampler._local_indices()

    def __next__(self) -> _T_co:
        index = next(self._rest)
        self._num_given += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """How many indices of which epoch it has given."""
        facts = _facts_of_order(self._sampler)
        return {"epoch": self._epoch, "num_given": self._num_given, "facts": facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the sampler's next ``iter()`` begins the epoch after it.

        Raises:
            ValueError: If the indices of the other sampler were others; nothing has changed.
        """
        for name, value in _facts_of_order(self._sampler).items():
            if (saved := state["facts"].get(name)) != value:
                raise ValueError(
                    f"This state is of a DistributedSampler whose {name} was {saved!r}, and this "
                    f"one's is {value!r}: the rest of its epoch would be other samples. Make the "
                    "sampler as it was, or begin a new epoch."
                )
        sampler, self._epoch, self._num_given = self._sampler, state["epoch"], state["num_given"]
        sampler.set_epoch(self._epoch)
        sampler._has_begun = True
        self._rest = sampler._local_indices(self._num_given)


def _facts_of_order(sampler: DistributedSampler[Any]) -> dict[str, Any]:
    """What a rank's indices in an epoch depend on, besides the epoch and the rank."""
    return {
        "num_replicas": sampler.num_replicas,
        "mode": sampler.mode,
        "length": sampler._length,
        "seed": sampler.seed,
        "shuffle": bool(sampler.shuffle),
    }


def _group_of(
    num_replicas: int | None, rank: int | None, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the group whose ranks share the indices; None if there is none of that size."""
    if process_group is not None or num_replicas is None or rank is None:
        group = group_or_all(process_group)
    else:  # by hand, for which no group is made
        group = dist.group.WORLD if dist.is_initialized() else None
    is_shared = group is not None and group.size() > 1 and num_replicas in (None, group.size())
    return group if is_shared else None


def _length_of(dataset: object) -> int:
    try:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise TypeError("it has no __len__")
        length = len(dataset)
    except (NotImplementedError, TypeError) as error:
        wanted = "a dataset, sampler or batch sampler of known length"
        raise TypeError(refusal("dataset", dataset, wanted)) from error
    return length


@contextmanager
def _seeded(sampler: object, seed: int) -> Iterator[None]:
    """Let ``sampler`` draw from random numbers of this seed, and leave all generators as before."""
    drawn = (getattr(each, "generator", None) for each in samplers_in(sampler))
    generators = [torch.default_generator, *(g for g in drawn if isinstance(g, torch.Generator))]
    with exclusive:
        states, state = [generator.get_state() for generator in generators], random.getstate()
        try:
            random.seed(seed)
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            random.setstate(state)
            for generator, before in zip(generators, states, strict=True):
                generator.set_state(before)
