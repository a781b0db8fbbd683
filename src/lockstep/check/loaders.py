"""The program's loaders: their batches are recorded on the ranks, and joined in one process."""

from __future__ import annotations

import io
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, default_collate

import lockstep.data
from lockstep.check.batches import Part, global_batch, hashes_of_rows, is_empty, joined_shards
from lockstep.check.records import BatchRecord, CheckPlan, CollatedSamples, Records, of_rank
from lockstep.check.switches import Switches
from lockstep.data import of_batch
from lockstep.generators import global_generators
from lockstep.same_bits import ShardedBatch
from lockstep.torch_private import tree_leaves, tree_map_only


class Finished(BaseException):
    """Ends the program after its last step."""


class Keeping:
    """A loader's ``collate_fn`` that keeps the samples of each batch, in a worker too."""

    def __init__(self, collate: Callable[[Any], Any], records: Records) -> None:
        self.collate = collate
        self._records = records

    def __call__(self, samples: Any) -> Any:
        """Make a batch of ``samples``."""
        if self.collate is default_collate:
            batch = self.collate(samples)
            if all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(batch)):
                return batch  # each of its tensors is a stack, so that joined parts are as good
            written = _written(samples)
            draws = False
        else:
            before = global_generators().read()
            written = _written(samples)  # before collate changes them
            batch = self.collate(samples)
            draws = before != global_generators().read()
        name = of_batch(batch)
        if name and written is not None:
            self._records.save(f"samples-{name}", CollatedSamples(written, draws))
        return batch


def _written(samples: object) -> bytes | None:
    """The samples in bytes; None if they can't be pickled, or aren't a list of samples."""
    if not isinstance(samples, list | tuple):
        return None
    buffer = io.BytesIO()
    try:
        torch.save([*samples], buffer)
    except Exception:  # whatever the pickling of a user's object raises
        return None
    return buffer.getvalue()


class Loaders:
    """All loaders that the program makes, in the order in which it makes them.

    Attributes:
        is_loading: Whether a loader's own iterator runs.
        random_state: Of all generators, after the last batch.
        num_rows: The samples of the last batch.
        num_backwards: How many backwards the program has run.
    """

    def __init__(
        self,
        plan: CheckPlan,
        records: Records,
        switches: Switches,
        after_batch: Callable[[], None],
    ) -> None:
        self._after_batch = after_batch  # is called before the program gets a batch
        self._plan, self._records, self._switches = plan, records, switches
        self._ranks = [plan.records(of_rank(number)) for number in range(plan.num_ranks)]
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._classes: set[tuple[type, str]] = set()  # of loaders, with their methods
        self._iterations: Counter[str] = Counter()
        self.is_loading = False
        self.random_state = global_generators().read()
        self.num_rows = self.num_backwards = 0

    def watch(self) -> None:
        """Watch loaders that are made from now on."""
        self._switches.wrap(DataLoader, "__init__", self._begin)

    def _begin(
        self, original: Callable[..., None], loader: Any, *args: Any, **options: Any
    ) -> None:
        original(loader, *args, **options)
        self._names[loader] = f"batch-{len(self._iterations)}"
        self._iterations[self._names[loader]] = 0
        is_recorded = self._plan.run is None and not self._plan.trial
        has_samples = loader.batch_sampler is not None
        if is_recorded and has_samples and not isinstance(loader.collate_fn, Keeping):
            loader.collate_fn = Keeping(loader.collate_fn, self._records)
        # What the method of a subclass gives is the batch, not what it gets from torch's.
        for name, watched in (("__iter__", self._iterate), ("__len__", self._length)):
            owner = next(cls for cls in type(loader).__mro__ if name in vars(cls))
            if (owner, name) not in self._classes:
                self._classes.add((owner, name))
                self._switches.wrap(owner, name, watched)

    def _length(self, original: Callable[[Any], int], loader: Any) -> int:
        name = self._names.get(loader)
        if self.is_loading or name is None:
            return original(loader)
        if self._plan.run is None:
            length = original(loader)
            self._records.save(f"length-{name}", length)
            return length
        lengths = [length for rank in self._ranks if (length := rank.load(f"length-{name}"))]
        return max(lengths) if lengths else original(loader)

    def _iterate(self, original: Callable[[Any], Any], loader: Any) -> Any:
        name = self._names.get(loader)
        if self.is_loading or name is None:
            return original(loader)
        self._iterations[name] += 1
        name += f"-{self._iterations[name]}"
        if self._plan.run is None:
            return self._recorded(name, loader, self._load(original, loader))
        if not any(rank.has(name) for rank in self._ranks):  # a loader of this run alone
            return original(loader)
        return self._replayed(name, loader)

    def _load(self, function: Callable[..., Any], *args: object) -> Any:
        """Call what a loader does by itself."""
        self.is_loading = True
        try:
            return function(*args)
        finally:
            self.is_loading = False

    def _recorded(self, name: str, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches``, and record each."""
        is_kept = not self._plan.trial
        self._records.save(name, True)
        number, end = 0, object()
        is_ours = isinstance(loader, lockstep.data.DataLoader)
        while (value := self._load(next, batches, end)) is not end:
            content = of_batch(value)
            value = self._doubled(value)
            rows = hashes_of_rows(value)
            self.random_state = global_generators().read()
            if is_kept:
                kept = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
                self._records.save(f"value-{name}-{number}", kept)
                batch = BatchRecord(
                    rows=rows,
                    pads=_pads(loader),
                    is_empty=is_empty(value),
                    is_ours=is_ours,
                    random_state=self.random_state,
                    content=content,
                    num_backwards=self.num_backwards,
                )
                self._records.save(f"{name}-{number}", batch)
            number += 1
            self.num_rows = len(rows)
            self._after_batch()
            self.random_state = global_generators().read()
            yield value
        self._records.save(f"{name}-{number}", None)

    def _replayed(self, name: str, loader: Any) -> Iterator[Any]:
        """The global batches, with rank 0's random numbers after each."""
        number = 0
        while True:
            path = f"{name}-{number}"
            found = [(rank, batch) for rank in self._ranks if (batch := rank.load(path))]
            if not found:
                if any(rank.has(path) for rank in self._ranks):
                    return
                raise Finished  # the ranks had ended before they got this one
            parts = [
                Part(batch, rank.load(f"value-{path}"), rank.load(f"samples-{batch.content}"))
                for rank, batch in found
            ]
            value = parts[0].value
            if isinstance(value, ShardedBatch):
                value = joined_shards([part.value for part in parts])
            elif not self._plan.divides_itself:
                collate = loader.collate_fn if loader.batch_sampler is not None else None
                value = self._doubled(global_batch(collate, parts))
            global_generators().write(parts[0].batch.random_state)
            self.random_state = global_generators().read()
            self.num_rows = len(hashes_of_rows(value))
            yield value
            number += 1

    def _doubled(self, value: Any) -> Any:
        if isinstance(value, ShardedBatch):
            value[:] = map(self._doubled, value)
            return value
        return tree_map_only(torch.Tensor, _doubled, value) if self._plan.float64 else value


def _pads(loader: Any) -> bool:
    """Whether torch's sampler gives some samples twice, so that all ranks get equally many."""
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return False
    return len(sampler.dataset) % sampler.num_replicas != 0  # type: ignore[arg-type]


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
