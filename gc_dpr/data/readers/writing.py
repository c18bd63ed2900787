"""Text files that appear whole or not at all, packed as their name says."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gc_dpr.artifacts import atomic_file
from gc_dpr.data.readers.compression import compressed
from gc_dpr.data.readers.paths import PathLike
from gc_dpr.errors import DataError


@contextlib.contextmanager
def open_text_for_writing(path: PathLike) -> Iterator[IO[str]]:
    r"""Open a UTF-8 text file that replaces ``path`` only when the block ends without an error.

    Args:
        path: The final place; its folder is created when missing. A name that ends in ``.gz`` or
            ``.zst`` is packed so. Equal text gives equal bytes: no time and no name is stored.

    Returns:
        A context manager; what it gives takes text with ``"\n"`` as line end, on every system.

    Raises:
        DataError: The file cannot be written (no permission, disk full), or the text holds half
            of a character. Nothing is left behind, and an older file at ``path`` stays as it was.

    Example:
        >>> import gzip, pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "lines.txt.gz")
        >>> with open_text_for_writing(path) as handle:
        ...     _ = handle.write("caf\u00e9\n")
        >>> gzip.decompress(path.read_bytes()).decode() == "caf\u00e9\n"
        True
        >>> folder.cleanup()
    """
    place = Path(path).expanduser().absolute()
    try:
        with (
            atomic_file(place, "wb") as raw,
            compressed(raw, place) as packed,
            _as_text(packed) as handle,
        ):
            yield handle
    except UnicodeEncodeError as error:
        raise DataError(
            f"cannot be written: the text holds {error.object[error.start]!r}, half of a "
            "character; remove it from the data",
            path=place,
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot be written ({error.strerror or error}); nothing was left there. Free some "
            "space, or choose a place where you may write",
            path=place,
        ) from None


@contextlib.contextmanager
def _as_text(packed: IO[bytes]) -> Iterator[IO[str]]:
    text = io.TextIOWrapper(packed, encoding="utf-8", newline="\n")
    yield text
    # Without this the wrapper would close the file below, which still has to be flushed to disk.
    text.detach()
