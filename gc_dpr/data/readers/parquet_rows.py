"""Rows of strings and lists of strings from and to Parquet, one row group after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gc_dpr.artifacts import atomic_file
from gc_dpr.errors import DataError

PARQUET_MAGIC = b"PAR1"

_BATCH_ROWS = 1024
# A row group is what a reader may hold in memory at once.
_GROUP_ROWS = 10_000
_GROUP_CHARACTERS = 32 << 20


@contextlib.contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file as a ``pyarrow.parquet.ParquetFile``; its faults become DataErrors.

    Raises:
        DataError: The file cannot be opened, or is cut, damaged or no Parquet (also when that
            shows only while reading inside the ``with`` block).
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with (
            path.open("rb") as handle,
            parquet.ParquetFile(handle, pre_buffer=False, page_checksum_verification=True) as file,
        ):
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:  # the latter: a broken name
        raise _damaged(path, error) from None
    except OSError as error:
        # pyarrow reports broken pages as OSError too, but without an error number.
        if error.errno is None:
            raise _damaged(path, error) from None
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from None


def _damaged(path: Path, error: Exception) -> DataError:
    text = str(error).split("\n", 1)[0]
    return DataError(
        f"the Parquet file is cut off or damaged ({text}); copy or write it again", path=path
    )


def has_parquet_magic(path: Path) -> bool:
    """Whether a file begins like Parquet, whatever its name."""
    try:
        with path.open("rb") as handle:
            return handle.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from None


def check_types(
    schema: Any, names: Sequence[str], path: Path, *, whole_numbers: Sequence[str] = ()
) -> None:
    """Raise DataError unless the named columns hold strings or lists of strings.

    Args:
        schema: A ``pyarrow.Schema``.
        names: The columns that will be read.
        path: The file, for messages.
        whole_numbers: Those of ``names`` that may hold whole numbers instead (ids).
    """
    from pyarrow import types

    for name in names:
        kind = schema.field(name).type
        if not (_is_text(kind) or (name in whole_numbers and types.is_integer(kind))):
            raise DataError(
                f"column {name}: found the type {kind}, expected string or a list of strings",
                path=path,
            )


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def numbered_rows(
    file: Any, names: Sequence[str], path: Path
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based row, cells by column name) of an open file; other columns are not read.

    Raises:
        DataError: A string is not UTF-8; names row and column.
    """
    row = 0
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(
            batch_size=_BATCH_ROWS, row_groups=[group], columns=list(names), use_threads=False
        ):
            cells = [_python_values(batch, name, path, row) for name in names]
            for values in zip(*cells, strict=True):
                row += 1
                yield row, dict(zip(names, values, strict=True))


def _python_values(batch: Any, name: str, path: Path, rows_before: int) -> list[Any]:
    column = batch.column(batch.schema.get_field_index(name))
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        for row, cell in enumerate(column, start=rows_before + 1):
            try:
                cell.as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"column {name}: byte {error.start + 1} of this cell "
                    f"(0x{error.object[error.start]:02x}) is not UTF-8; write the file again",
                    path=path,
                    line=row,
                ) from None
        raise


def write_rows(path: Path, names: Mapping[str, bool], rows: Iterable[Sequence[Any]]) -> int:
    """Write rows to a Parquet file that appears whole or not at all.

    Args:
        path: The file.
        names: The columns in order; true where a cell is a list of strings.
        rows: Their cells.

    Returns:
        The number of rows.

    Raises:
        DataError: The file cannot be written, or a text holds half of a character.
    """
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        (name, pyarrow.list_(pyarrow.string()) if is_list else pyarrow.string())
        for name, is_list in names.items()
    )
    written = 0
    with (
        _writing_faults(path),
        atomic_file(path, "wb") as handle,
        parquet.ParquetWriter(handle, schema, write_page_checksum=True) as writer,
    ):
        for group in _groups(rows):
            columns = [
                pyarrow.array(cells, type=field.type)
                for cells, field in zip(zip(*group, strict=True), schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
            written += len(group)
    return written


@contextlib.contextmanager
def _writing_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise DataError(
            f"cannot be written: the text holds {error.object[error.start]!r}, half of a "
            "character; remove it from the data",
            path=path,
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot be written ({error.strerror or error}); nothing was left there. Free some "
            "space, or choose a place where you may write",
            path=path,
        ) from None


def _groups(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Cut rows into row groups, by their number and by their size."""
    group: list[Sequence[Any]] = []
    characters = 0
    for row in rows:
        group.append(row)
        characters += sum(len(cell) if type(cell) is str else sum(map(len, cell)) for cell in row)
        if len(group) == _GROUP_ROWS or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
