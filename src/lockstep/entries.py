"""What processes of a run tell each other in a store, to which others may write what they like.

As objects, JSON takes up to twenty times its length, so that how much of an entry is read has a
bound, whatever there is: neither processes nor launchers grow by it.
"""

from __future__ import annotations

import json
from typing import Any

from lockstep.printable import printable

MOST_BYTES = 256 << 10
MOST_WORDS = 32 << 10  # of a message, whose characters take up to six bytes
_MOST_VALUES = 1 << 14
_MOST_NAME_BYTES = 4096


def value_in(entry: bytes | bytearray | str) -> Any:
    """Return the value that an entry has as JSON.

    Raises:
        ValueError: If it is no JSON, or more than ranks and launchers write.
    """
    text = entry.encode(errors="surrogatepass") if isinstance(entry, str) else bytes(entry)
    if not has_room_for(text):
        raise ValueError(f"an entry has {len(text):,} bytes, which no rank has written")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("an entry is nested too deeply") from error


def has_room_for(text: bytes) -> bool:
    """Whether an entry may have this text, and be read by :func:`value_in`."""
    return len(text) <= MOST_BYTES and sum(map(text.count, b"[{,")) <= _MOST_VALUES


def text_in(entry: bytes) -> str:
    """Return the text of an entry, cut off where it is longer than entries are."""
    return bytes(entry[:MOST_BYTES]).decode(errors="replace")


def name_in(entry: bytes) -> str:
    """Return a name, or a sentence, that is to be shown."""
    return printable(bytes(entry[:_MOST_NAME_BYTES]).decode(errors="replace"))
