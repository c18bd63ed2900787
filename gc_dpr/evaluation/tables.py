"""Tables of results as aligned plain text and as Markdown."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

Cell = str | int | float


def format_table(rows: Sequence[Sequence[Cell]], headers: Sequence[str]) -> str:
    """Lay out rows in columns, numbers to the right; no final newline.

    Args:
        rows: Cells; a number is written as Python writes it, so round it first.
        headers: One per column.

    Raises:
        ValueError: A row has another number of cells than there are headers.

    >>> print(format_table([["BM25", "50.2"], ["dense", "97.0"]], ["run", "top-5"]))
    run    top-5
    -----  -----
    BM25    50.2
    dense   97.0
    """
    cells, right = _checked(rows, headers)
    lines = [list(headers), *cells]
    widths = [max(_width(line[column]) for line in lines) for column in range(len(headers))]
    laid_out = [
        "  ".join(_pad(*triple) for triple in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([laid_out[0], "  ".join("-" * width for width in widths), *laid_out[1:]])


def format_markdown_table(rows: Sequence[Sequence[Cell]], headers: Sequence[str]) -> str:
    """The same as a Markdown table; no final newline.

    Raises:
        ValueError: A row has another number of cells than there are headers.

    >>> print(format_markdown_table([["BM25", 50.2]], ["run", "top-5"]))
    | run | top-5 |
    | --- | ---: |
    | BM25 | 50.2 |
    """
    cells, right = _checked(rows, headers)
    rule = ["---:" if is_right else "---" for is_right in right]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in ([*headers], rule, *cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _checked(
    rows: Sequence[Sequence[Cell]], headers: Sequence[str]
) -> tuple[list[list[str]], list[bool]]:
    """The cells as one-line strings, and for each column whether it goes to the right."""
    for position, row in enumerate(rows):
        if len(row) != len(headers):
            raise ValueError(f"rows[{position}] has {len(row)} cells for {len(headers)} headers")
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    right = [
        bool(cells) and all(_is_number(line[column]) for line in cells)
        for column in range(len(headers))
    ]
    return cells, right


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip(" %").replace(",", ""))
    except ValueError:
        return cell in ("", "-")
    return True


def _width(text: str) -> int:
    """Columns on a terminal: wide East Asian characters take two, combining marks none."""
    return sum(
        0
        if unicodedata.combining(character)
        else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def _pad(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - _width(text))
    return blanks + text if right else text + blanks
