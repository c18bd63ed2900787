"""Passages TSV, the format of DPR's ``psgs_w100.tsv``: id, text and title, tab-separated.

Differences from DPR and GC-DPR, on purpose: only the first row can be a header (they drop any
later passage whose id is ``id``); both rows of a repeated id are read (``corpus`` refuses them);
quotes at the ends of a text are kept, as GC-DPR does (DPR strips them).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.paths import Paths, expand_paths, numbered_lines, open_bytes
from gc_dpr.data.readers.tab_rows import Quoting, check_quoting, is_blank, read_rows
from gc_dpr.data.records import Passage
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)

_EXPECTED = "a passages TSV with the columns id, text and title"
_ADVICE = (
    "If the quotes of this file are plain text, read it with quoting='none' "
    "(config key data.passages_quoting=none); otherwise mend this row"
)


def read_passages(paths: Paths, *, quoting: Quoting = "csv") -> Iterator[Passage]:
    r"""Read passages one by one from TSV files, plain or compressed.

    Args:
        paths: A file, a glob or a list of them; see ``expand_paths``.
        quoting: ``"csv"``: cells may be wrapped in double quotes with inner quotes doubled, as in
            DPR's file; ``"none"``: quotes are part of the text.

    Returns:
        A lazy iterator in file order. The header row, when there is one, names the columns in any
        order; without it they are id, text, title.

    Raises:
        DataError: At once: a file is missing. While reading: a row has too few columns or an empty
            id, a quote goes wrong, the text is not UTF-8, or the file is of another kind.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "passages.tsv")
        >>> _ = path.write_text("id\ttext\ttitle\n007\tBorn in Ulm.\tAlbert Einstein\n")
        >>> list(read_passages(path))
        [Passage(id='007', title='Albert Einstein', text='Born in Ulm.')]
        >>> folder.cleanup()
    """
    check_quoting(quoting)
    files = expand_paths(paths)
    return (passage for path in files for _, passage in numbered_passages(path, quoting=quoting))


def numbered_passages(path: Path, *, quoting: Quoting = "csv") -> Iterator[tuple[int, Passage]]:
    """Yield (line on which the passage begins, passage) of one file; logs counts at its end."""
    counts = _Counts()
    with open_bytes(path) as handle:
        kinds.check_kind(
            path,
            handle.peek(),
            expected=_EXPECTED,
            accepted=frozenset({kinds.PASSAGES_TSV, kinds.UNKNOWN}),
        )
        lines = counts.watch(numbered_lines(handle, path))
        rows = read_rows(lines, path, quoting=quoting, swallowed_tabs=2, advice=_ADVICE)
        yield from _passages(rows, path, counts)
    counts.report(path)


@dataclass(slots=True)
class _Counts:
    lines: int = 0
    passages: int = 0
    blank_lines: int = 0
    extra_columns: int = 0

    def watch(self, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
        for numbered in lines:
            self.lines = numbered[0]
            yield numbered

    def report(self, path: Path) -> None:
        _logger.info("%s: %d passages from %d lines", path, self.passages, self.lines)
        if self.blank_lines:
            _logger.warning("%s: %d blank lines skipped", path, self.blank_lines)
        if self.extra_columns:
            _logger.warning(
                "%s: %d rows have more columns than id, text and title; the others are ignored",
                path,
                self.extra_columns,
            )


def _passages(
    rows: Iterator[tuple[int, list[str]]], path: Path, counts: _Counts
) -> Iterator[tuple[int, Passage]]:
    columns: tuple[int, int, int] | None = None
    width = needed = 3
    for line, cells in rows:
        if is_blank(cells):
            counts.blank_lines += 1
            continue
        if columns is None:
            named = _header(cells, path, line)
            columns = named or (0, 1, 2)
            if named:
                needed, width = max(named) + 1, len(cells)
                continue
        if len(cells) < needed:
            raise DataError(
                f"found {len(cells)} tab-separated columns, expected {width} (id, text, title); "
                "a passage without a title still needs the last tab",
                path=path,
                line=line,
            )
        counts.extra_columns += len(cells) > 3
        passage_id = cells[columns[0]]
        if not passage_id:
            raise DataError(
                "the passage id is empty; give every passage an id", path=path, line=line
            )
        counts.passages += 1
        yield line, Passage(id=passage_id, title=cells[columns[2]], text=cells[columns[1]])


def _header(cells: list[str], path: Path, line: int) -> tuple[int, int, int] | None:
    """Places of id, text and title when the first row names them, None when it is a passage."""
    names = [cell.strip().strip('"').lower() for cell in cells]
    if kinds.is_passages_header(names) and "title" in names:
        id_column = next(i for i, name in enumerate(names) if name in kinds.ID_NAMES)
        return id_column, names.index("text"), names.index("title")
    # Not taken for a passage called "id": that would hide a header with a misspelt column.
    if kinds.is_passages_header(names) or names[0] == "id":
        raise DataError(
            f"the header names the columns {', '.join(cells)}; expected id, text and title "
            "(in any order)",
            path=path,
            line=line,
        )
    return None
