"""Tables that fit a terminal: columns that don't go side by side follow below the others.

No word of a heading is broken, and no number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lockstep.printable import printable

# Texts are wrapped at spaces, and folded only where a word is longer than this.
_SHORTEST_TEXT = 12
_NARROWEST = 20


class _Column(NamedTuple):
    heading: str
    cells: Sequence[str]
    is_text: bool

    @property
    def least(self) -> int:
        """The width below which a word of the heading, or a number, would be broken."""
        if not self.is_text:
            return max(_longest_word(self.heading), *map(len, self.cells), 0)
        longest = max(map(_longest_word, self.cells), default=0)
        return max(_longest_word(self.heading), min(longest, _SHORTEST_TEXT))

    @property
    def whole(self) -> int:
        """The width in which nothing is wrapped."""
        return max(len(self.heading), *map(len, self.cells), 0)


class FittedTable:
    """What rich prints as one table or, on a narrow terminal, as several.

    Args:
        columns: The headings.
        rows: The cells, plain text of whatever origin. Those of the first column stand before each
            part of the table.
        title: Its title.
        texts: The indices of columns with text, which may be wrapped; others have numbers.
        has_rule: Whether there is a line below the headings, and a space around the table.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        title: str | None = None,
        texts: Collection[int] = (0,),
        *,
        has_rule: bool = True,
    ) -> None:
        self._title, self._has_rule = title, has_rule
        self._columns = [
            _Column(heading, [printable(row[index]) for row in rows], index in texts)
            for index, heading in enumerate(columns)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts."""
        title = self._title
        gap = 1 if self._has_rule else 2
        width = options.max_width + (-1 if self._has_rule else 2)
        for columns, widths in _parts(self._columns, max(_NARROWEST, width), gap):
            table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
            if not self._has_rule:
                table.box, table.pad_edge, table.padding = None, False, (0, gap, 0, 0)
            for column, wide in zip(columns, widths, strict=True):
                table.add_column(
                    Text(column.heading),
                    justify="left" if column.is_text else "right",
                    width=wide,
                    overflow="fold",
                )
            for cells in zip(*(column.cells for column in columns), strict=True):
                table.add_row(*map(Text, cells))
            yield table
            title = None


def _parts(
    columns: Sequence[_Column], width: int, gap: int
) -> Iterator[tuple[Sequence[_Column], Sequence[int]]]:
    """Yield the columns that go side by side, and their widths, each of which has a gap."""
    first, *others = columns
    while True:
        number = len(others)
        while number > 1 and sum(c.least + gap for c in (first, *others[:number])) > width:
            number -= 1
        part, others = [first, *others[:number]], others[number:]
        yield part, _widths(part, width - gap * len(part))
        if not others:
            return


def _widths(columns: Sequence[_Column], width: int) -> Sequence[int]:
    """Share out what is left after the least widths, from the left."""
    widths = [column.least for column in columns]
    left = width - sum(widths)
    for index, column in enumerate(columns):
        more = max(0, min(left, column.whole - widths[index]))
        widths[index] += more
        left -= more
    return widths


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
