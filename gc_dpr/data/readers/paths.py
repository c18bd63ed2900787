"""From what a user names (a file, a glob, a list of them) to open UTF-8 text.

Plain, gzip and Zstandard files are told apart by their first bytes, not by their names. Lines end
at a line feed (a carriage return before it is dropped), so line numbers are those of an editor.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.compression import BUFFER_BYTES, decompressed
from gc_dpr.data.readers.kinds import refuse_binary
from gc_dpr.errors import DataError

PathLike = str | os.PathLike[str]
Paths = PathLike | Iterable[PathLike]

_UTF8_BOM = b"\xef\xbb\xbf"
_GLOB_CHARACTERS = frozenset("*?[")


def expand_paths(paths: Paths) -> list[Path]:
    """List the files that a path, a glob or a list of them names.

    Args:
        paths: A file, a glob pattern (``*``, ``?``, ``[...]``, ``**``) or an iterable of both. A
            leading ``~`` is the home folder. A name that exists is never taken as a pattern.

    Returns:
        Absolute paths in the order given; what one glob matches is in natural order, so
        ``part_10`` comes after ``part_2``. Folders that a glob matches are left out.

    Raises:
        DataError: A file is missing, a glob matches no file, a folder is named, a file is named
            twice, or nothing is named.
    """
    entries = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    named_by: dict[Path, str] = {}
    for entry in entries:
        for path in _expand_entry(os.fspath(entry)):
            if path in named_by:
                raise DataError(
                    f"named twice (by {named_by[path]!r} and {os.fspath(entry)!r}) and would be "
                    "read twice; name every file once",
                    path=path,
                )
            named_by[path] = os.fspath(entry)
    if not named_by:
        raise DataError("no input file is named; expected a path, a glob or a list of them")
    return list(named_by)


def _expand_entry(entry: str) -> list[Path]:
    if not entry.strip():
        raise DataError("the name of an input file is empty; expected a path or a glob")
    path = Path(entry).expanduser().absolute()
    if path.is_dir():
        raise DataError(
            f"is a folder, expected a file; name its files, for example with {entry}/*",
            path=path,
        )
    if path.exists():
        return [path]
    if not _GLOB_CHARACTERS.intersection(entry):
        raise DataError(
            f"file not found (relative names start at {Path.cwd()}); check the path", path=path
        )
    found = sorted((match for match in _glob(path) if match.is_file()), key=_natural_order)
    if not found:
        raise DataError(
            f"no file matches this glob (relative names start at {Path.cwd()}); check the pattern",
            path=path,
        )
    return found


def _glob(pattern: Path) -> Iterator[Path]:
    """Walk from the last folder before the first part with a glob character."""
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if _GLOB_CHARACTERS.intersection(part))
    return Path(*parts[:fixed]).glob(str(Path(*parts[fixed:])))


def _natural_order(path: Path) -> tuple[list[tuple[int, str]], str]:
    pieces = re.split(r"(\d+)", str(path))
    # Odd places hold digits; text compares as (0, text) in even places only, so types never mix.
    keys = [(int(piece), "") if i % 2 else (0, piece) for i, piece in enumerate(pieces)]
    return keys, str(path)


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader[Any]]:
    """Open a plain, gzip or Zstandard text file for reading bytes, after any byte order mark.

    Raises:
        DataError: The file cannot be opened, is empty or binary, or its compressed stream is cut
            or damaged (also when that shows only while reading inside the ``with`` block).
    """
    try:
        with (
            io.BufferedReader(io.FileIO(path), BUFFER_BYTES) as raw,
            decompressed(raw, path) as handle,
        ):
            head = handle.peek(BUFFER_BYTES)
            if not head:
                raise DataError("the file is empty", path=path)
            refuse_binary(path, head)
            if head.startswith(_UTF8_BOM):
                handle.read(len(_UTF8_BOM))
            yield handle
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from None


def numbered_lines(handle: io.BufferedReader[Any], path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield (1-based line number, line ending in ``"\n"``); the last line may lack its end.

    Raises:
        DataError: A line is not UTF-8; names the line and the byte within it.
    """
    for number, raw in enumerate(handle, start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"byte {error.start + 1} of this line (0x{raw[error.start]:02x}) is not UTF-8; "
                "convert the file to UTF-8, for example with iconv",
                path=path,
                line=number,
            ) from None
        yield number, (line[:-2] + "\n" if line.endswith("\r\n") else line)
