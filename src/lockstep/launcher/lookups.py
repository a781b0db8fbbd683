"""Which embedding an index was out of range of, found in the frames of torch's error."""

from __future__ import annotations

import sys
from traceback import walk_tb
from typing import Any


def note_lookup(error: BaseException) -> str:
    """Note in ``error``, if a lookup has raised it, the embedding, its size and the wrong index.

    torch's error tells of neither module nor index, or of no module. Return the note, if any.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(error, IndexError | RuntimeError):
        return ""
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    within = [frame.f_locals for frame, _ in walk_tb(error.__traceback__)]
    called = [each["self"] for each in within if isinstance(each.get("self"), torch.nn.Module)]
    places = [each for each in within if isinstance(each.get("self"), kinds)]
    indices = places[-1].get("input") if places else None
    # After a failed lookup, a GPU can't be asked for anything.
    if not isinstance(indices, torch.Tensor) or indices.device.type != "cpu":
        return ""
    table = places[-1]["self"]
    if indices.is_nested:
        indices = indices.values()
    wrong = indices[(indices < 0) | (indices >= table.num_embeddings)]
    if not len(wrong):
        return ""
    names = (name for name, module in called[0].named_modules() if module is table)
    place = f"{name!r}, an {type(table).__name__}" if (name := next(names, "")) else repr(table)
    note = (
        f"It was a lookup in {place}, whose table has {table.num_embeddings:,} rows: {len(wrong)} "
        f"of {indices.numel():,} indices aren't from 0 to {table.num_embeddings - 1}, and the "
        f"first of these is {wrong[0]}."
    )
    error.add_note(note)
    return note
