"""Lets collectives raise, while one rank alone tries an optimizer whose steps may call some."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch.distributed import distributed_c10d

_one_at_a_time = threading.Lock()  # ranks may be threads


@contextmanager
def collectives_refused() -> Iterator[list[str]]:
    """Let functions of ``torch.distributed`` by which ranks meet raise in this thread.

    Whoever refers to them, and however: each asks first whether this rank is in the group. Yields a
    list of the names of those that were called.
    """
    called, this_thread = list[str](), threading.get_ident()
    with _one_at_a_time:
        rank_not_in_group = distributed_c10d._rank_not_in_group

        @wraps(rank_not_in_group)
        def refuse(group: Any) -> bool:
            name = sys._getframe(1).f_code.co_name
            is_question = name.startswith("get_") or name.endswith("_timeout")
            if is_question or threading.get_ident() != this_thread:
                return rank_not_in_group(group)
            called.append(name)
            raise RuntimeError(f"{name}() is called while one rank alone tries a step.")

        distributed_c10d._rank_not_in_group = refuse
        try:
            yield called
        finally:
            distributed_c10d._rank_not_in_group = rank_not_in_group
