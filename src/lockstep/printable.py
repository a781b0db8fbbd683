"""Text for a terminal: what others wrote, such as names in a file, and names of signals."""

from __future__ import annotations

import re
import signal

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    r"""Return ``text`` with what a terminal would obey, or not show, as Python's escapes.

    Escape sequences may move the cursor, rename a window, or paint over lines; ``\x1b[2J`` is
    returned as these seven characters. Rich's markup isn't escaped: give it ``Text(printable(x))``.
    """
    if text.isprintable():
        return text
    # A lone surrogate, which is how Python reads a byte that isn't UTF-8, can't be written at all.
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(path: object) -> str:
    """Return a path for a message: as it is :func:`printable`, on one line."""
    return printable(str(path))


def printable_lines(text: str) -> str:
    """Return lines each of which is :func:`printable`, without their colours.

    Of a progress bar, whose states follow each other by carriage returns, the last is left.
    """
    lines = _COLOURS.sub("", text).expandtabs().split("\n")
    return "\n".join(printable(line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def signal_name(number: int) -> str:
    """``9`` -> ``"SIGKILL"``; a signal without a name is called by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
