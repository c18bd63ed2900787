"""Passage ids in row order, packed: one byte string and the places where its lines end.

A list of 21 million Python strings takes more than 1 GB; packed it takes their bytes plus 8 bytes
each. On disk it is a text file with one id per line (UTF-8, every line ended by a line feed).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gc_dpr.errors import ArtifactError

_LINE_FEED = 10


def id_lines(ids: Iterable[str]) -> bytes:
    """The lines that ``ids`` take in a file.

    Raises:
        ArtifactError: An id is empty, holds a line feed or half a surrogate pair, so a line could
            not stand for it.
    """
    lines: list[str] = []
    for row, passage_id in enumerate(ids):
        if not passage_id or "\n" in passage_id or not _is_unicode(passage_id):
            raise ArtifactError(
                f"{passage_id!r} (number {row} of the passage ids being written) cannot be an id: "
                "every passage of a corpus needs one that fits on one line and is not empty"
            )
        lines.append(passage_id + "\n")
    return "".join(lines).encode("utf-8")


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


class PassageIds(Sequence[str]):
    """A read-only sequence of ids; unlike a list it refuses negative rows.

    FAISS says "no hit" by the row -1, which must never turn into the last passage.

    Args:
        lines: The ids as UTF-8, each followed by a line feed.

    Example:
        >>> ids = PassageIds.of(["a", "b7"])
        >>> len(ids), ids[1], list(ids)
        (2, 'b7', ['a', 'b7'])
    """

    def __init__(self, lines: bytes) -> None:
        if lines and lines[-1] != _LINE_FEED:
            raise ArtifactError("a list of passage ids is cut off: its last line has no end")
        self.lines = lines
        self._ends: NDArray[np.int64] = np.flatnonzero(
            np.frombuffer(lines, dtype=np.uint8) == _LINE_FEED
        )

    @classmethod
    def of(cls, ids: Iterable[str]) -> PassageIds:
        """Pack ids (see `id_lines` for what is refused)."""
        return cls(id_lines(ids))

    @classmethod
    def read(cls, path: str | Path) -> PassageIds:
        """Read a file of ids.

        Raises:
            ArtifactError: The file is missing, cut off or not UTF-8.
        """
        path = Path(path)
        try:
            lines = path.read_bytes()
            lines.decode("utf-8")
            return cls(lines)
        except FileNotFoundError:
            raise ArtifactError(f"{path.absolute()} is missing; write its folder again") from None
        except (UnicodeDecodeError, ArtifactError) as error:
            raise ArtifactError(
                f"{path.absolute()} is damaged ({error}); write its folder again"
            ) from None

    def __len__(self) -> int:
        return len(self._ends)

    def _line(self, row: int) -> bytes:
        start = int(self._ends[row - 1]) + 1 if row else 0
        return self.lines[start : int(self._ends[row])]

    def __getitem__(self, row: int) -> str:  # type: ignore[override]  # slices are not needed
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passage ids")
        return self._line(row).decode("utf-8")

    def first_duplicate(self) -> tuple[str, int, int] | None:
        """The first id that occurs again, with the first two rows that hold it.

        64-bit hashes find the candidates (8 bytes an id, no set of strings), the ids themselves
        decide.
        """
        hashes = np.fromiter((hash(self._line(row)) for row in range(len(self))), dtype=np.int64)
        order = np.argsort(hashes, kind="stable")
        repeated = np.flatnonzero(hashes[order][1:] == hashes[order][:-1]) + 1
        candidates = np.union1d(order[repeated], order[repeated - 1])
        first_row: dict[bytes, int] = {}
        for row in candidates.tolist():
            line = self._line(row)
            if line in first_row:
                return line.decode("utf-8"), first_row[line], row
            first_row[line] = row
        return None

    def refuse_duplicates(self, *, where: str) -> None:
        """Raise an ArtifactError that names an id held by two rows of ``where``."""
        if (found := self.first_duplicate()) is not None:
            passage_id, first, again = found
            raise ArtifactError(
                f"{where} holds the passage id {passage_id!r} twice (rows {first} and {again}, "
                "counted from 0); ids name passages in runs, so make them unique in the corpus "
                "and generate the embeddings again"
            )
