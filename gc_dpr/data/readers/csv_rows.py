"""Rows of csv text under a header, by csv's strict rules, each with the line it begins on.

Unlike ``tab_rows`` it takes commas too and keeps every character of a quoted cell, a carriage
return before a line feed included. A double quote that was never meant as one would swallow the
rows after it; strict rules find nearly all of those, and rows that may still hide one are counted.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gc_dpr.errors import DataError

# csv refuses cells over 131,072 characters by default; long passages are legal.
_CELL_LIMIT = 2**31 - 1
# A quote that is never closed must not read the rest of a huge file into memory.
_ROW_LIMIT = 1 << 28
_DELIMITER_NAMES = {",": "a comma", "\t": "a tab"}

_logger = logging.getLogger(__name__)


class CsvRows:
    """The rows of an open csv file whose first row names the columns.

    Args:
        handle: UTF-8 bytes, after any byte order mark.
        path: The file, for messages.
        delimiter: ``","`` or a tab.

    Attributes:
        names: The cells of the header, without white space around them.
        header_line: The 1-based line of the header.

    Raises:
        DataError: There is no header, or it has one column only.
    """

    def __init__(self, handle: io.BufferedReader[Any], path: Path, *, delimiter: str) -> None:
        self._path = path
        self._delimiter = delimiter
        self._lines = _Lines(handle, path)
        if csv.field_size_limit() < _CELL_LIMIT:
            csv.field_size_limit(_CELL_LIMIT)
        self._cells = csv.reader(self._lines, delimiter=delimiter, strict=True)
        self._blank = 0
        self._suspects: list[int] = []
        self.header_line, header = next(self._filled_rows(), (0, [""]))
        self.names = [cell.strip() for cell in header]
        if len(self.names) < 2:
            raise DataError(
                f"the header has one column ({header[0][:60]!r}), expected at least two, with "
                f"{_DELIMITER_NAMES[delimiter]} between them",
                path=path,
                line=self.header_line or None,
            )

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (line on which the row begins, its cells) of the rows after the header.

        Raises:
            DataError: A row has too few or too many cells, a quote goes wrong, or a line is not
                UTF-8; names the line.
        """
        for line, cells in self._filled_rows():
            if len(cells) != len(self.names):
                raise self._wrong_width(line, cells)
            if self._lines.look_like_rows(self._delimiter, len(cells)):
                self._suspects.append(line)
            yield line, cells
        self._log()

    def _filled_rows(self) -> Iterator[tuple[int, list[str]]]:
        while True:
            line = self._lines.begin_row()
            try:
                cells = next(self._cells)
            except StopIteration:
                return
            except csv.Error as error:
                raise self._wrong_quote(line, str(error)) from None
            if cells and (len(cells) > 1 or cells[0].strip()):
                yield line, cells
            else:
                self._blank += 1

    def _wrong_quote(self, line: int, error: str) -> DataError:
        if "unexpected end of data" in error:
            problem = "it is never closed"
        elif "expected after" in error:
            problem = "more text follows the closing quote of a cell"
        elif "new-line character" in error:
            return DataError(
                "a bare carriage return stands outside of quotes; end lines with a line feed and "
                'put cells with line breaks in double quotes (")',
                path=self._path,
                line=line,
            )
        else:
            problem = error
        return DataError(
            f'a double quote (") goes wrong in the row that begins here: {problem}. A cell with a '
            "quote in it must stand in quotes, and the inner quote must be doubled",
            path=self._path,
            line=line,
        )

    def _wrong_width(self, line: int, cells: Sequence[str]) -> DataError:
        many = len(cells) > len(self.names)
        return DataError(
            f"found {len(cells)} cells, expected {len(self.names)} ({', '.join(self.names)})"
            + (
                f"; a cell with {_DELIMITER_NAMES[self._delimiter]} in it must stand in double "
                'quotes (")'
                if many
                else ""
            ),
            path=self._path,
            line=line,
        )

    def _log(self) -> None:
        if self._blank:
            _logger.warning("%s: %d blank lines skipped", self._path, self._blank)
        if self._suspects:
            _logger.warning(
                "%s: in %d rows (the first begins on line %d) a quoted cell runs over lines that "
                "could each be a row; if a stray double quote opened it, double that quote",
                self._path,
                len(self._suspects),
                self._suspects[0],
            )


class _Lines:
    """Decoded lines for csv's reader, with the number and the text of the row being read."""

    def __init__(self, handle: io.BufferedReader[Any], path: Path) -> None:
        self._handle = handle
        self._path = path
        self._row: list[str] = []
        self._size = 0
        self.number = 0

    def begin_row(self) -> int:
        """Forget the lines of the last row; the line number of the next one."""
        self._row, self._size = [], 0
        return self.number + 1

    def look_like_rows(self, delimiter: str, width: int) -> bool:
        """Whether the row took several lines and each of them has the delimiters of a row."""
        return len(self._row) > 1 and all(line.count(delimiter) == width - 1 for line in self._row)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        raw = next(self._handle)
        self.number += 1
        self._size += len(raw)
        if self._row and self._size > _ROW_LIMIT:
            raise csv.Error(
                f"the quoted cell is still open at line {self.number}, {self._size >> 20} MiB later"
            )
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"byte {error.start + 1} of this line (0x{raw[error.start]:02x}) is not UTF-8; "
                "convert the file to UTF-8, for example with iconv",
                path=self._path,
                line=self.number,
            ) from None
        self._row.append(line)
        return line
