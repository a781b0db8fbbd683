"""``lockstep.DataLoader``: torch's, for the global batch."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Sequence, Sized
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lockstep import spans
from lockstep.arguments import as_whole_number, check_flag, check_type, refusal
from lockstep.comm import all_gather, device_of_facts, differing_facts
from lockstep.data.batches import (
    GlobalBatches,
    LocalBatch,
    Reader,
    digest,
    is_list,
    length_of,
    local_batch,
    num_samples,
    samplers_in,
)
from lockstep.data.faults import telling_how_workers_end
from lockstep.data.iterable import Request, Requests, StreamReader, global_stream
from lockstep.data.order import MAX_KEPT
from lockstep.data.pace import Pace, checked_shares
from lockstep.data.partition import cuts
from lockstep.data.place import EpochPlace
from lockstep.data.same_dataset import check_same_dataset
from lockstep.data.self_sharding import View
from lockstep.data.sharded import ShardedIteration, check_shards, grouped, sharding_of
from lockstep.data.workers import WorkerSampler, loader_with_workers
from lockstep.errors import SplitError
from lockstep.generators import mixed
from lockstep.world import group_or_all

_T_co = TypeVar("_T_co", covariant=True)
_VERSION = 1
_END = object()
_STATE = {"version", "seed", "epoch", "num_batches", "digest", "facts"}
_SAME_LOADER = "Make the same loader of the same dataset on every rank."
# What to do if ranks differ, by what in.
_CURES = {
    "seed": "Give the same seed on every rank, or none.",
    "epoch": "Call set_epoch() with the same number on every rank, or on none.",
    "number of batches given": "Load the same state on every rank.",
    "length of the dataset": "This loader gives each rank its part of every batch: give all ranks "
    "the whole dataset.",
    "order of samples": "This loader gives each rank its part of every batch: let the sampler give "
    "all samples on every rank, not a rank's, in one order that depends on the epoch alone or on "
    "random numbers of torch, random or numpy.random; or leave it out.",
}


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """torch's DataLoader, of which ``batch_size`` is the global batch, shared out among the ranks.

    Each rank gets its part of each global batch, a last short one too: all samples of an epoch come
    exactly once, and every rank takes equally many steps. A rank for which a short batch has no
    sample gets an empty one, of the same structure; :func:`lockstep.mean` is right for it. ::

        loader = lockstep.DataLoader(dataset, batch_size=128, shuffle=True)

    The order of samples, and which are in which global batch, depend on the seed and the epoch, and
    not on the number of ranks or workers. Neither do the random numbers that the dataset draws for
    a sample (from torch, ``random`` or NumPy), in an augmentation say. Each iteration is the next
    epoch; ``set_epoch()`` need not be called, and sets the epoch if it is. A shuffle takes 8 bytes
    a sample on each rank; of more than 33 million samples none: it is computed as it goes.

    In the midst of an epoch :meth:`state_dict` says how far it is, and :meth:`load_state_dict` goes
    on from there: with any number of ranks and workers, with each further sample exactly once.

    All of torch's arguments are taken, and mean what they do there; but batches come in their order
    even with ``in_order=False``, as the ranks' parts of a batch belong together. ``sampler`` and
    ``batch_sampler`` give all samples, not a rank's; random numbers that they draw are from the
    seed and the epoch. One that gives an index twice is refused, unless it has an attribute
    ``replacement`` that is true, as torch's have. With ``batch_size=None`` a sampler gives lists of
    indices, and the dataset a batch for such a list.

    An iterable dataset is read by all workers of all ranks, each of which is to give samples of its
    own: :func:`torch.utils.data.get_worker_info` counts the workers of all ranks there, and one for
    each rank without workers. One that divides its samples among the ranks itself (by
    :func:`torch.distributed.get_rank`, as ``split_by_node`` of webdataset, or as HF's
    ``split_dataset_by_node``) is told from others by what it gives to each rank, and sees the
    workers of its own rank; it draws the same random numbers on each rank, as in torch's loader.
    Generators that an iterable dataset holds, such as a ``numpy.random.default_rng()``, aren't
    seeded: all shards draw the same numbers from them, as they have to for an order that they
    share. For noise of each shard's own, ``__iter__`` is to make a generator of the worker's number
    (and of the rank, if the dataset divides its samples among the ranks itself).
    Batches have samples of all ranks then; an epoch lasts until no rank has any left. It goes on in
    its midst with the same numbers of ranks and workers, by reading anew what it has given.

    Every rank iterates over it. When an epoch begins, the ranks compare their settings.

    Args:
        dataset: As torch's.
        batch_size: The samples of a global batch, at least one for each rank; None if the dataset
            makes batches itself.
        args: Torch's further arguments, in their order.
        seed: Of all random numbers; by default that of ``generator``, or else of
            :func:`torch.manual_seed` on the first rank.
        shares: How much of each batch the ranks get, one whole number for each, such as ``[3, 1]``
            for a fast and a slow device; a single rank gets all, whatever they are. ``"auto"``: as
            much as they computed lately in the same time; what a rank waits for others in
            lockstep's collectives doesn't count.
        self_sharding: Whether an iterable dataset divides its samples among the ranks itself. By
            default it is found out.
        shards: Into how many shards to cut each batch, for :func:`lockstep.shards`: the loader
            gives those of this rank then. An iteration sets the number of intra-op threads to 1.
        process_group: The ranks; by default all of :func:`lockstep.init`.
        options: Torch's further arguments, by name.

    Raises:
        SplitError: If the batch is smaller than the number of ranks, or the sampler already divides
            the samples. In iterating: if the ranks' settings or datasets differ, the sampler gives
            an index twice, an empty batch can't be made, the length of the dataset has changed, or
            several shards of an iterable dataset give the same samples.
        TypeError: If ``shares`` aren't whole numbers.

    Source: ``torch.utils.data.DataLoader``; its state dict is like that of torchdata's
    StatefulDataLoader.
    """

    # Accelerate's prepare() leaves it alone, whose ranks would get twice as large global batches;
    # its save_state() saves what state_dict() gives, and load_state() loads it.
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        *args: Any,
        seed: int | None = None,
        shares: Sequence[int] | str | None = None,
        self_sharding: bool | None = None,
        shards: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_size, *args, **options)
        group = group_or_all(process_group)
        self._group, self._num_shards = group, shards
        self._rank, self._num_ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._pace: Pace | None = None
        self._shares = (1,) * self._num_ranks
        if shares == "auto":
            self._pace = Pace(group, max(1, self.num_workers) * (self.prefetch_factor or 1) + 1)
        elif shares is not None:
            self._shares = checked_shares(shares, self._num_ranks)
        if seed is None and isinstance(self.generator, torch.Generator):
            seed = self.generator.initial_seed()
        self._seed = None if seed is None else as_whole_number("seed", seed)
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._view: View | None = None  # until it is found out
        if self_sharding is not None:
            check_flag("self_sharding", self_sharding)
            self._view = View.LOCAL if self_sharding else View.ALL
        if type(self.sampler) is RandomSampler and self.sampler.generator is None:
            self.sampler.generator = torch.Generator()  # which is seeded for each epoch
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        self._samplers = [] if self._is_iterable else samplers_in(sampler)
        self._check_arguments()
        torchs = (BatchSampler, RandomSampler, SequentialSampler)
        self._may_repeat = all(type(each) in torchs for each in self._samplers) or any(
            getattr(each, "replacement", False) for each in self._samplers
        )
        self._length: int | None = None
        self._place = EpochPlace()
        self._iteration = self._run = 0
        self._reader: Any = None
        self._loader: torch.utils.data.DataLoader[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy for the same ranks."""
        memo[id(self._group)] = self._group
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def _check_arguments(self) -> None:
        has_shares = self._pace is not None or len({*self._shares}) > 1
        check_shards(self, self._num_shards, self._num_ranks, has_shares=has_shares)
        if self.batch_size is not None and self.batch_size < self._num_ranks:
            raise SplitError(
                f"A global batch of {self.batch_size} can't be split over {self._num_ranks} ranks: "
                "batch_size counts the samples of all ranks together. Use a larger batch or fewer "
                "ranks."
            )
        is_cut = self._num_ranks > 1 or self._num_shards
        if self.batch_size is None and is_cut and not self._gives_lists():
            raise SplitError(
                "With batch_size=None the dataset makes a batch of each index, which can't be cut. "
                "Give batch_size; or a sampler that gives lists of indices, such as a "
                "BatchSampler, and a dataset that makes a batch of such a list."
            )
        if self._is_iterable and self.batch_size is not None:
            bounds = cuts(self.batch_size, self._shares)
            if len(set(bounds)) < len(bounds):
                raise SplitError(
                    f"With shares {list(self._shares)}, a rank would have no sample in a batch of "
                    f"{self.batch_size}. All ranks read an iterable dataset, and what that rank "
                    "reads would be lost. Use a larger batch or other shares."
                )
        for each in self._samplers:
            if isinstance(each, DistributedSampler):
                raise SplitError(
                    f"A {type(each).__name__} gives each rank samples of its own, which this "
                    "loader would divide once more. Leave the sampler out, and give shuffle=True; "
                    "if a trainer has added it, give the trainer use_distributed_sampler=False."
                )

    def _gives_lists(self) -> bool:
        """Whether the ranks can share what the sampler gives at a time."""
        is_given = self.batch_sampler is not None or self._is_iterable
        return is_given or not isinstance(self.sampler, RandomSampler | SequentialSampler)

    @property
    def num_samples(self) -> int:
        """The samples of an epoch, of all ranks together; ``len(loader)`` is its steps.

        Raises:
            TypeError: If the dataset, or a batch sampler of the program's, doesn't tell.
        """
        batches = self.batch_sampler
        if self._is_iterable or not isinstance(batches, BatchSampler):
            if self.batch_size is None:
                name = type(self.sampler if batches is None else batches).__name__
                raise TypeError(f"A {name} tells how many batches it gives, not how many samples.")
            return len(cast(Sized, self.dataset))
        number = len(cast(Sized, batches.sampler))
        return number - number % batches.batch_size if batches.drop_last else number

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from 0; trainers call it."""
        self._place.set_epoch(as_whole_number("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration is, the same on every rank; for :meth:`load_state_dict`.

        Batches count that the program was given, not those that workers have read ahead.
        """
        place = self._place
        return {
            "version": _VERSION,
            "seed": self._seed,
            "epoch": place.epoch if place.is_in_epoch else place.next_epoch,
            "num_batches": place.num_given,
            "digest": place.digest,
            "facts": self._facts_of_order(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called, at any number of ranks and workers.

        Raises:
            ValueError: If it is of another dataset, batch size or version; nothing has changed.
        """
        if not isinstance(state_dict, dict) or not state_dict.keys() >= _STATE:
            raise ValueError(refusal("state_dict", state_dict, "what state_dict() returned"))
        if state_dict["version"] != _VERSION:
            raise ValueError(
                f"This state of a DataLoader has version {state_dict['version']}, and this release "
                f"of lockstep knows version {_VERSION}. Install the one that saved it."
            )
        seed, facts = state_dict["seed"], state_dict["facts"]
        check_type("facts", facts, dict, "what state_dict() returned")
        seed = None if seed is None else as_whole_number("seed", seed)
        epoch, num_batches, checksum = (
            as_whole_number(name, state_dict[name], "a whole number from 0 up", at_least=0)
            for name in ("epoch", "num_batches", "digest")
        )
        local, place = self._facts_of_order(), EpochPlace.loaded(epoch, num_batches, checksum)
        # Between epochs all may change but the dataset.
        for name in [*local, *facts] if place.is_in_epoch else ["dataset", "length of the dataset"]:
            if local.get(name) != facts.get(name):
                raise ValueError(
                    f"This state is of a DataLoader whose {name} was {facts.get(name)!r}, and this "
                    f"one's is {local.get(name)!r}: the rest of its epoch would be other samples. "
                    "Make the loader as it was, or call set_epoch() to begin a new epoch."
                )
        self._run += 1
        self._seed, self._place = seed, place

    def _facts_of_order(self) -> dict[str, Any]:
        """What the samples of global batches depend on, besides seed and epoch."""
        facts: dict[str, Any] = {
            "dataset": type(self.dataset).__name__,
            "length of the dataset": length_of(self.dataset),
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "samplers": [type(each).__name__ for each in self._samplers],
        }
        is_random = any(type(each) is RandomSampler for each in self._samplers)
        if is_random and (facts["length of the dataset"] or 0) > MAX_KEPT:  # lockstep.data.order
            facts["way of shuffling"] = "computed"
        if self._is_iterable:
            facts |= {"number of ranks": self._num_ranks, "num_workers": self.num_workers}
        return facts

    def __iter__(self) -> Any:
        """Begin the next epoch, or go on with one that was loaded. Every rank calls it."""
        self._settle_seed()
        place = self._place
        skip, expected = (place.num_given, place.digest) if place.goes_on else (0, 0)
        place.epoch = place.next_epoch
        assert self._seed is not None
        facts = {
            "seed": self._seed,
            "epoch": self._place.epoch,
            "number of batches given": skip,
            "shares": self._shares,
            "shards": self._num_shards,
            **self._facts_of_order(),
        }
        length = length_of(self.dataset)
        stream: Iterator[Any]
        asked: deque[tuple[int, int]] = deque()
        if self._pace is not None:
            facts["number of batches read ahead"] = self._pace.ahead
            self._pace.restart()  # before workers are asked for batches
        if self._is_iterable:
            self._check_same(facts)
            stream = self._iterable_batches(skip)
        else:
            batches = GlobalBatches(
                self.sampler if self.batch_sampler is None else self.batch_sampler,
                self._samplers,
                self._seed,
                self._place.epoch,
                may_repeat=self._may_repeat,
            )
            facts["order of samples"] = functools.reduce(
                lambda checksum, batch: digest(batch, checksum), batches.peek(), 0
            )
            self._check_same(facts)
            if self._length is None and self._group is not None:
                self._reader = self._reader or self._make_reader()
                check_same_dataset(self._group, self._reader, batches.peek(), self._seed)
            local = self._rank, self._num_ranks, self._seed, place.epoch
            sharding = sharding_of(self._num_shards, *local)
            parts = self._parts(batches, skip, expected, asked, sharding)
            stream = grouped(self._read(parts), sharding)
        self._length = length
        place.begin(skip, expected)
        self._run += 1
        return self._counted(stream, asked, self._run)

    def _read(self, requests: Iterator[Any]) -> Iterator[Any]:
        """Return what is read for each of ``requests``, by workers or in this process."""
        self._reader = self._reader or self._make_reader()
        if not self.num_workers and not self.pin_memory:
            return map(self._reader.__getitem__, requests)
        loader = self._loader
        if loader is None:
            self._worker_sampler = WorkerSampler()
            self._loader = loader = loader_with_workers(self, self._reader, self._worker_sampler)
        self._worker_sampler.stream = requests
        assert self._seed is not None
        # Workers' own seeds, which their worker_init_fn sees, differ by rank, epoch and worker.
        loader.generator.manual_seed(mixed(self._seed, self._place.epoch, self._rank))
        return telling_how_workers_end(iter(loader))

    def _make_reader(self) -> Any:
        if self._is_iterable:
            return StreamReader(self.dataset, self.collate_fn, self._rank, self._num_ranks)
        makes_batches = self.batch_sampler is None
        return Reader(self.dataset, self.collate_fn, self._rank, makes_batches=makes_batches)

    def _iterable_batches(self, skip: int) -> Iterator[Any]:
        """Yield this rank's parts of what is left of an iterable dataset."""
        assert self._seed is not None
        size = self.batch_size
        if size is not None:
            bounds = cuts(size, self._shares)
            size = bounds[self._rank + 1] - bounds[self._rank]
        self._iteration += 3  # as many as it may take to find out the view
        seed, view = mixed(self._seed, self._place.epoch), self._view or View.ALL
        is_trial = self._view is None and self._num_ranks > 1
        asked = Requests(Request(self._iteration, seed, size, self.drop_last, view, is_trial))
        answers, num_workers = self._read(asked), max(1, self.num_workers)
        note_view = functools.partial(setattr, self, "_view") if self._view is None else None
        stream = global_stream(asked, answers, self._reader, num_workers, self._group, note_view)
        return itertools.islice(stream, skip, None)

    def _counted(
        self, stream: Iterator[Any], asked: deque[tuple[int, int]], run: int
    ) -> Iterator[Any]:
        """Yield batches, and note which ones the program has been given.

        ``run`` is the number of this iteration. Once there is a later one, or a state was loaded,
        what is still read in this one doesn't count.
        """
        place = self._place
        while True:
            with spans.span("data"):
                batch = next(stream, _END)
            if batch is _END:
                if spans.recorder is not None:
                    spans.recorder.end_of_epoch(self)
                break
            checksum, num_samples = asked.popleft() if asked else (0, 0)
            if spans.recorder is not None:
                spans.recorder.batch(self, num_samples)
            if run == self._run:
                place.num_given += 1
                place.digest = checksum
                if spans.status is not None:
                    length = length_of(self) or 0
                    spans.status.count_batch(place.epoch, place.num_given, length, num_samples)
            if self._pace is None:
                yield batch
            else:
                self._pace.begin()
                yield batch
                self._pace.end(place.num_given, num_samples)
        if run == self._run:
            place.leave()

    def _settle_seed(self) -> None:
        if self._seed is not None:
            return
        self._seed = torch.initial_seed() % 2**62
        if self._group is not None:
            local_seed = torch.tensor([self._seed], device=device_of_facts(self._group))
            self._seed = int(all_gather(self._group, local_seed)[0])

    def _check_same(self, facts: dict[str, Any]) -> None:
        """Compare the ranks, and then the epochs: so no rank waits for one that raises."""
        by_rank = [] if self._group is None else differing_facts(self._group, facts)
        for rank, theirs in enumerate(by_rank):
            for name, value in theirs.items():
                if value != by_rank[0].get(name):
                    raise SplitError(
                        f"The ranks' DataLoaders differ: {name} is {value!r} on rank {rank} and "
                        f"{by_rank[0].get(name)!r} on rank 0. {_CURES.get(name, _SAME_LOADER)}"
                    )
        length = facts["length of the dataset"]
        if self._length not in (None, length):
            raise SplitError(
                f"The dataset had {self._length} samples in an earlier epoch, and has {length} "
                "now, so that epochs differ. Make a new DataLoader for it."
            )

    def _parts(
        self,
        batches: GlobalBatches,
        skip: int,
        expected: int,
        asked: deque[tuple[int, int]],
        sharding: ShardedIteration | None,
    ) -> Iterator[LocalBatch]:
        """Yield this rank's part of each global batch but the first ``skip``.

        ``asked`` gets the checksum of the batches so far, and the number of samples of the part.
        """
        assert self._seed is not None
        seed, start = mixed(self._seed, self._place.epoch), batches.skip(skip)
        if start.number < skip:
            raise SplitError(
                f"The state that was loaded counts {skip} batches of epoch {self._place.epoch}, "
                f"and the sampler gives {start.number}. Make the loader as it was."
            )
        if start.checksum not in (None, expected):
            raise SplitError(
                f"The sampler doesn't give the same indices again in epoch {self._place.epoch}, so "
                "that the rest of it isn't known. Let it draw random numbers from torch, "
                "random or numpy.random, or from an attribute 'generator'."
            )
        position, checksum = start.position, expected
        for number, batch in enumerate(batches, skip):
            checksum = digest(batch, checksum)
            parts = [LocalBatch([batch], seed, position, is_one=True)]
            if sharding is not None:
                parts = sharding.parts(batch, number, position)
            elif is_list(batch):
                parts = [self._local_batch(batch, number, position, seed)]
            asked.append((checksum, sum(len(p.indices) for p in parts if not p.is_empty)))
            yield from parts
            position += num_samples(batch)

    def _local_batch(self, batch: Any, number: int, position: int, seed: int) -> LocalBatch:
        shares = self._shares if self._pace is None else self._pace.shares_at(number)
        bounds = cuts(len(batch), shares)
        return local_batch(batch, bounds[self._rank], bounds[self._rank + 1], seed, position)
