"""Batches: checksums of them, the global one of which ranks had parts, and samples given twice."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lockstep.check.records import BatchRecord, CollatedSamples, Records
from lockstep.comm import bytes_of
from lockstep.errors import LockstepError
from lockstep.same_bits import ShardedBatch
from lockstep.torch_private import tree_leaves

OUR_LOADER = "lockstep.DataLoader(dataset, batch_size=...), whose batch_size is the global one"
# So many of the samples of an epoch may be equal by chance.
_FEW = 0.02


def hashes_of_rows(value: object) -> list[int]:
    """A hash for each sample of a batch; none if the tensors in it don't have a row for each."""
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    dense = [t.detach().cpu().contiguous() for t in tensors if t.layout is torch.strided]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in dense}
    if len(lengths) != 1 or not (length := lengths.pop()):
        return []
    wholes = [(bytes_of(t), t.nbytes // length) for t in dense if t.numel()]
    digests = (
        hashlib.blake2b(
            b"".join(whole[row * size : (row + 1) * size] for whole, size in wholes), digest_size=7
        ).digest()
        for row in range(length)
    )
    return [int.from_bytes(digest) for digest in digests]


class Part(NamedTuple):
    """What a rank had of a global batch."""

    batch: BatchRecord
    value: Any
    samples: CollatedSamples | None  # of which it was made, if that is known


def global_batch(collate: Callable[[Any], Any] | None, parts: Sequence[Part]) -> Any:
    """The batch of which the ranks had ``parts``, as ``collate`` makes it of their samples.

    What the loader's ``collate_fn`` makes of all samples at once is right whatever it does with
    them: pad them to the longest, count them, or number their rows. Only where it draws random
    numbers, or isn't known, are the ranks' batches joined.

    Raises:
        LockstepError: If they can't be joined.
    """
    contents = {part.batch.content for part in parts}
    if len(contents) == 1 and "" not in contents:
        return parts[0].value
    given = [part.samples for part in parts if not part.batch.is_empty]
    known = [samples for samples in given if samples is not None and not samples.draws]
    if collate is not None and known and len(known) == len(given):
        return collate([sample for each in known for sample in each.samples()])
    # An empty part doesn't show whether it is a tuple of fields or of samples.
    return joined([part.value for part in parts if not part.batch.is_empty] or [parts[0].value])


def is_empty(value: object) -> bool:
    """Whether a batch has no sample in it."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and not any(leaf.numel() for leaf in leaves)


def joined(parts: Sequence[Any]) -> Any:
    """The batch of which the ranks had ``parts``.

    Raises:
        LockstepError: If they can't be joined.
    """
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim() and len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(list(parts))
    elif isinstance(first, dict):
        values = {key: joined([part[key] for part in parts]) for key in first}
        return values if type(first) is dict else type(first)(values)
    elif isinstance(first, list | tuple):
        if not all(map(_has_fields, parts)):
            every = [element for part in parts for element in part]
            return every if isinstance(first, list) else tuple(every)
        fields = [joined(elements) for elements in zip(*parts, strict=True)]
        return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)
    if all(type(part) is type(first) and _are_equal(part, first) for part in parts):
        return first
    shapes = " and ".join(str(tuple(getattr(part, "shape", ()))) for part in parts)
    raise LockstepError(
        f"The ranks' batches can't be joined to a global one: they hold a {type(first).__name__} "
        f"of {shapes}, and how they were made isn't known, or random numbers were drawn for that. "
        "Let the dataset give single samples, which collate_fn makes a batch of, and draw random "
        "numbers in the dataset."
    )


def joined_shards(parts: Sequence[ShardedBatch]) -> ShardedBatch:
    """The shards of the batch of which the ranks had ``parts``, as one rank has them."""
    first = parts[0]
    return ShardedBatch(
        itertools.chain(*parts),
        [*itertools.chain(*(part.numbers for part in parts))],
        first.num_shards,
        seed=first.seed,
        place=first.place,
    )


def _has_fields(value: Sequence[object]) -> bool:
    """Whether a sequence in a batch is a tuple of fields, rather than one of samples."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    lengths = {len(leaf) if leaf.dim() else 0 for leaf in leaves}
    return len({*map(type, value)}) > 1 or (len(lengths) == 1 and 0 not in lengths)


def _are_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


class Repeated(NamedTuple):
    """Samples that several ranks were given."""

    where: str
    cause: str
    remedy: str = f"Use {OUR_LOADER}."


def is_divided_by_program(ranks: Sequence[Records]) -> bool:
    """Whether loaders give all ranks the same batches, of which the program takes parts."""
    contents = [
        {name: [batch.content for batch in batches] for name, batches in records.passes().items()}
        for records in ranks
    ]
    if not contents[0] or any(each != contents[0] for each in contents):
        return False
    if any("" in batches for batches in contents[0].values()):
        return False
    steps = [step for records in ranks if (step := records.step(1)) is not None]
    inputs = [[back.rows for back in step.backwards] for step in steps]
    return any(each != inputs[0] for each in inputs)


def repeated(ranks: Sequence[Records]) -> Repeated | None:
    """Whether a sampler gives samples to several ranks."""
    passes = [records.passes() for records in ranks]
    for name, first in passes[0].items():
        others = [each.get(name, []) for each in passes[1:]]
        if any(batch.pads for batch in first):
            return Repeated(
                "Some samples are given to two ranks, and so count twice.",
                "the sampler isn't lockstep's: torch's DistributedSampler gives some samples "
                "twice, so that all ranks have equally many.",
            )
        trains = first[-1].num_backwards > first[0].num_backwards
        if first[0].is_ours or not others or not trains:
            continue
        counts = [Counter(_rows(batches)) for batches in (first, *others)]
        # Where a rank has samples twice by itself, the dataset has, or they are drawn so.
        if not all(counts) or any(max(each.values()) > 1 for each in counts):
            continue
        again = sum(map(len, counts)) - len({row for each in counts for row in each})
        total = sum(map(len, counts))
        if _FEW * total < again and any(each.keys() != counts[0].keys() for each in counts):
            return Repeated(
                f"{again} of the {total} samples that the ranks have got in one pass over a loader "
                "were given to another rank before.",
                "the loader's sampler gives the same samples to several ranks.",
            )
    return None


def _rows(batches: Sequence[BatchRecord]) -> list[int]:
    return [row for batch in batches for row in batch.rows]
