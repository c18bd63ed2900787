"""Rows of tab-separated text, with csv quoting or without, each with the line it begins on.

In DPR's files a cell may be wrapped in double quotes, with inner quotes doubled; such a cell may
hold tabs and line breaks. A quote that was never meant so would swallow the rows after it without
a word, therefore csv's strict rules hold here and a swallowed row is looked for.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from gc_dpr.errors import DataError

Quoting = Literal["csv", "none"]

# csv refuses cells over 131,072 characters by default; long passages are legal.
_CELL_LIMIT = 2**31 - 1


def check_quoting(quoting: str) -> None:
    """Raise ValueError unless ``quoting`` is one of the two modes."""
    if quoting not in ("csv", "none"):
        raise ValueError(f"quoting={quoting!r} is unknown; expected 'csv' or 'none'")


def read_rows(
    lines: Iterator[tuple[int, str]],
    path: Path,
    *,
    quoting: Quoting = "csv",
    swallowed_tabs: int | None = None,
    advice: str,
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line on which the row begins, its cells); a blank line is a row of one blank cell.

    Args:
        lines: Numbered lines that keep their line feeds.
        path: The file, for messages.
        quoting: ``"csv"``: cells may be wrapped in double quotes; ``"none"``: quotes are text.
        swallowed_tabs: A continuation line of a quoted cell with at least this many tabs is a
            whole row, so the quote before it was a stray one. None: continuation lines are free.
        advice: What to do about a stray quote; ends the message.

    Raises:
        DataError: A quote is not closed, or more text follows a closing quote; names the line on
            which the row begins.
    """
    if csv.field_size_limit() < _CELL_LIMIT:
        csv.field_size_limit(_CELL_LIMIT)
    for number, line in lines:
        if quoting == "none" or '"' not in line:
            yield number, line.removesuffix("\n").split("\t")
            continue
        row = _QuotedRow(number, line, lines, swallowed_tabs)
        try:
            yield number, next(csv.reader(row, delimiter="\t", strict=True))
        except csv.Error as error:
            raise DataError(
                f'a double quote (") goes wrong in the row that begins here: '
                f"{row.swallowed or _explain(error)}. {advice}",
                path=path,
                line=number,
            ) from None


class _QuotedRow:
    """The lines that csv asks for until one row is complete."""

    def __init__(
        self, number: int, line: str, rest: Iterator[tuple[int, str]], swallowed_tabs: int | None
    ) -> None:
        self._number = number
        self._first: str | None = line
        self._rest = rest
        self._swallowed_tabs = swallowed_tabs
        self.swallowed = ""

    def __iter__(self) -> _QuotedRow:
        return self

    def __next__(self) -> str:
        if self._first is not None:
            line, self._first = self._first, None
            return line
        number, line = next(self._rest)
        if self._swallowed_tabs is not None and line.count("\t") >= self._swallowed_tabs:
            self.swallowed = f"the quoted cell is still open at line {number}, which is a whole row"
            raise csv.Error(self.swallowed)
        return line


def _explain(error: csv.Error) -> str:
    text = str(error)
    if "unexpected end of data" in text:
        return "it is never closed"
    if "expected after" in text:
        return "more text follows the closing quote of a cell (an inner quote must be doubled)"
    if "new-line character" in text:
        return "a bare carriage return stands outside of quotes"
    return text


def is_blank(cells: list[str]) -> bool:
    """Whether a row comes from a line without any text."""
    return len(cells) == 1 and not cells[0].strip()
