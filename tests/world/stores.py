"""Files in which ranks meet, closed by tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping


def close_after_their_stores(files: Mapping[str, int]) -> None:
    """Close them when no store is left that could be freed later.

    Torch's FileStore opens its file once more when it is freed, and aborts the process where
    another file, which can't be opened, has the number of its descriptor by then.
    """
    gc.collect()
    for file in files.values():
        os.close(file)
