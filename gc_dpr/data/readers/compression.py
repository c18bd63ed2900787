"""Gzip and Zstandard: recognised by the first bytes when reading, by the name's end when writing.

Zstandard is Python 3.14's ``compression.zstd``, or the same code as a package before that: unlike
stream readers of other packages it reports a stream that is cut off and goes on through frames
that were written one after another (as ``pzstd`` and ``cat`` leave them).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any

from gc_dpr.errors import DataError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BUFFER_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SUFFIXES = (".gz", ".zst")
# zstd --long=31 is what the largest public dumps are packed with; the decoder refuses it unasked.
_LONGEST_WINDOW = zstd.DecompressionParameter.window_log_max.bounds()[1]
_ZSTD_READING: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _LONGEST_WINDOW}
_ZSTD_WRITING: dict[int, int] = {zstd.CompressionParameter.checksum_flag: 1}


def uncompressed_name(path: PurePath) -> PurePath:
    """The name without a final ``.gz`` or ``.zst``.

    Example:
        >>> uncompressed_name(PurePath("train.jsonl.zst")).name
        'train.jsonl'
    """
    return path.with_suffix("") if path.suffix.lower() in _SUFFIXES else path


@contextlib.contextmanager
def decompressed(raw: io.BufferedReader[Any], path: Path) -> Iterator[io.BufferedReader[Any]]:
    """Unpack what begins like gzip or Zstandard; anything else is passed on as it is.

    Args:
        raw: The file's bytes, at their start.
        path: The file, for messages.

    Raises:
        DataError: The compressed stream is cut or damaged, also when that shows only while
            reading inside the ``with`` block.
    """
    head = raw.peek(4)
    unpacked: Any
    if head.startswith(_GZIP_MAGIC):
        kind, unpacked = "gzip", gzip.GzipFile(fileobj=raw)
    elif _begins_like_zstd(head):
        kind, unpacked = "Zstandard", zstd.ZstdFile(raw, options=_ZSTD_READING)
    else:
        yield raw
        return
    try:
        with io.BufferedReader(unpacked, BUFFER_BYTES) as handle:
            yield handle
    except EOFError:
        raise DataError(
            f"the {kind} stream ends before its end mark: the file is cut off; copy or download "
            "it again",
            path=path,
        ) from None
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise DataError(
            f"the {kind} stream is damaged ({error}); copy or download it again", path=path
        ) from None


def _begins_like_zstd(head: bytes) -> bool:
    # pzstd puts a skippable frame (16 magic numbers are set aside for those) before the first.
    skippable = len(head) >= 4 and head[0] & 0xF0 == 0x50 and head[1:4] == b"\x2a\x4d\x18"
    return skippable or head.startswith(_ZSTD_MAGIC)


@contextlib.contextmanager
def compressed(raw: IO[Any], path: PurePath) -> Iterator[IO[Any]]:
    """Pack what is written if the name ends in ``.gz`` or ``.zst``; equal content, equal bytes.

    Args:
        raw: Where the packed bytes go; left open.
        path: The final name, which tells how to pack.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        # Neither the time nor the (temporary) name, which gzip would both store.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
            yield packed  # type: ignore[misc]  # all but its declared base
    elif suffix == ".zst":
        with zstd.ZstdFile(raw, "w", options=_ZSTD_WRITING) as stream:
            yield stream  # type: ignore[misc]  # likewise
    else:
        yield raw
