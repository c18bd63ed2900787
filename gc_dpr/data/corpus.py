"""A corpus as a whole: checked in one streaming pass, and passages looked up by id."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gc_dpr.data.readers.passages_tsv import numbered_passages
from gc_dpr.data.readers.paths import Paths, expand_paths
from gc_dpr.data.readers.tab_rows import Quoting, check_quoting
from gc_dpr.data.records import Passage
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """What one pass over a corpus found.

    Attributes:
        rows: Number of passages.
        paths: The files, absolute, in the order read.
        empty_texts: Passages whose text is blank (their title alone will be encoded).
        content_hash: 64 hexadecimal digits that stand for ids, titles, texts and their order;
            the same for plain and compressed files, however the rows are spread over files.
    """

    rows: int
    paths: list[Path]
    empty_texts: int
    content_hash: str


def scan_corpus(paths: Paths, *, quoting: Quoting = "csv") -> CorpusSummary:
    """Read a corpus once from end to end and check it.

    Memory: 8 bytes per passage, whatever the length of the texts.

    Args:
        paths: Passages TSV: a file, a glob or a list of them.
        quoting: See ``read_passages``.

    Raises:
        DataError: An id occurs twice (names both lines), there is no passage at all, or what the
            reader raises.
    """
    check_quoting(quoting)
    files = expand_paths(paths)
    id_hashes = array("q")
    digest = hashlib.blake2b(digest_size=32)
    empty_texts = 0
    for _, _, passage in _places(files, quoting):
        id_hashes.append(hash(passage.id))
        empty_texts += not passage.text.strip()
        # The lengths make the joined fields unambiguous.
        lengths = f"{len(passage.id)} {len(passage.title)} {len(passage.text)} "
        digest.update((lengths + passage.id + passage.title + passage.text).encode())
    rows = len(id_hashes)
    if not rows:
        raise DataError(f"the corpus holds no passage ({', '.join(map(str, files[:3]))})")
    _refuse_repeated_ids(id_hashes, files, quoting)
    _logger.info("corpus: %d passages in %d files", rows, len(files))
    if empty_texts:
        _logger.warning("corpus: %d of %d passages have an empty text", empty_texts, rows)
    return CorpusSummary(rows, files, empty_texts, digest.hexdigest())


def _places(files: list[Path], quoting: Quoting) -> Iterator[tuple[Path, int, Passage]]:
    for path in files:
        for line, passage in numbered_passages(path, quoting=quoting):
            yield path, line, passage


def _refuse_repeated_ids(id_hashes: array[int], files: list[Path], quoting: Quoting) -> None:
    """Raise for an id that occurs twice. Hashes only raise the suspicion; a second look decides."""
    hashes = np.frombuffer(id_hashes, dtype=np.int64)
    hashes.sort()  # in place: no second array
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return
    first_places: dict[str, tuple[Path, int]] = {}
    for path, line, passage in _places(files, quoting):
        if hash(passage.id) not in suspects:
            continue
        if passage.id in first_places:
            first_path, first_line = first_places[passage.id]
            raise DataError(
                f"the passage id {passage.id!r} occurs a second time (first at "
                f"{first_path}:{first_line}); ids must be unique over the whole corpus",
                path=path,
                line=line,
            )
        first_places[passage.id] = (path, line)


def passages_by_id(
    paths: Paths, ids: Iterable[str], *, quoting: Quoting = "csv"
) -> dict[str, Passage]:
    """Read only the wanted passages of a corpus, streaming; stops when all are found.

    Args:
        paths: Passages TSV: a file, a glob or a list of them.
        ids: The ids wanted; repetitions do no harm.
        quoting: See ``read_passages``.

    Returns:
        Id to passage, in corpus order.

    Raises:
        DataError: An id is not in the corpus (names the first few and how many), or what the
            reader raises.
    """
    check_quoting(quoting)
    files = expand_paths(paths)
    wanted = dict.fromkeys(ids)
    found: dict[str, Passage] = {}
    for _, _, passage in _places(files, quoting) if wanted else ():
        if passage.id in wanted and passage.id not in found:
            found[passage.id] = passage
            if len(found) == len(wanted):
                break
    missing = [passage_id for passage_id in wanted if passage_id not in found]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(wanted)} passage ids are not in the corpus "
            f"({', '.join(map(str, files[:3]))}), the first: {', '.join(map(repr, missing[:5]))}; "
            "use the corpus that the index was made from"
        )
    return found
