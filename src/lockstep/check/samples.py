"""What the batches of the ranks say: whether samples are divided, and none comes twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.check.records import Batch, Records

OUR_LOADER = "lockstep.DataLoader(dataset, batch_size=...), whose batch_size is the global one"
# So many of the samples of an epoch may be equal by chance.
_FEW = 0.02


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
        if any(batch.is_ours for batch in first) or not others:
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


def _rows(batches: Sequence[Batch]) -> list[int]:
    return [row for batch in batches for row in batch.rows]
