"""What a file looks like from its beginning, so that a wrong file gets one clear message.

A reader asks before its first record. Nothing here decides how a good file is read.
"""

from __future__ import annotations

import re
from pathlib import Path

from gc_dpr.errors import DataError

TRAINING_JSON = "DPR training JSON"
RETRIEVAL_RESULTS = "a DPR retrieval-result JSON"
QUESTIONS_JSONL = "JSON Lines with questions"
OTHER_JSON = "JSON"
PASSAGES_TSV = "a passages TSV (id, text, title)"
QUESTIONS_CSV = "a questions CSV (question, tab, list of answers)"
QRELS = "a qrels file (query-id, corpus-id, score)"
UNKNOWN = "some other text"

# Where each kind belongs, for "did you mean".
_CONFIG_KEYS = {
    TRAINING_JSON: "data.train_file",
    PASSAGES_TSV: "data.passages_file",
    QUESTIONS_CSV: "data.questions_file",
    QUESTIONS_JSONL: "data.questions_file",
}

ID_NAMES = frozenset({"id", "_id", "passage_id", "psg_id", "docid"})

_BINARY_KINDS = (
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"PK\x03\x04", "a zip archive (also .npz, .xlsx and PyTorch checkpoints)"),
    (b"\x1f\x8b", "gzip inside another compression; decompress it once"),
    (b"\x28\xb5\x2f\xfd", "Zstandard inside another compression; decompress it once"),
    (b"BZh", "a bzip2 file; decompress it first"),
    (b"\xfd7zXZ", "an xz file; decompress it first"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite format 3", "an SQLite database"),
    (b"\xff\xfe", "UTF-16 text; convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16 text; convert it to UTF-8"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
)

_JSON_START = re.compile(r"\[\s*([\[{\]\"]|$)|\{\s*([\"}]|$)")
_LITERAL_LIST = re.compile(r"\[\s*(r?['\"].*)?\]|\(\s*(r?['\"].*)?\)")


def refuse_binary(path: Path, head: bytes) -> None:
    """Raise DataError when a file that should be UTF-8 text begins like something else."""
    for magic, what in _BINARY_KINDS:
        if head.startswith(magic):
            raise DataError(f"this is not a UTF-8 text file but looks like {what}", path=path)
    if b"\x00" in head[:4096]:
        raise DataError(
            "this is not a text file (it holds zero bytes); expected UTF-8 text, plain, gzip or "
            "Zstandard",
            path=path,
        )


def check_kind(path: Path, head: bytes, *, expected: str, accepted: frozenset[str]) -> str:
    """Find out what kind of text a file begins like; refuse the wrong ones.

    Args:
        path: The file, for the message.
        head: Its first bytes, decompressed; a few KiB are enough.
        expected: What the reader reads, for the message.
        accepted: The kinds that the reader goes on with.

    Returns:
        The kind, one of ``accepted``.

    Raises:
        DataError: The file looks like another kind.
    """
    kind = kind_of(head.decode("utf-8", errors="ignore").lstrip("\ufeff"))
    if kind in accepted:
        return kind
    advice = f"; did you mean {_CONFIG_KEYS[kind]}?" if kind in _CONFIG_KEYS else ""
    if kind == UNKNOWN:
        start = head[:40].decode("utf-8", errors="replace").strip()
        raise DataError(f"found text that begins {start!r}, expected {expected}", path=path)
    raise DataError(f"this looks like {kind}, expected {expected}{advice}", path=path)


def kind_of(head: str) -> str:
    """The kind of text that a file begins like."""
    text = head.lstrip()
    first_line = text.split("\n", 1)[0]
    if "\t" not in first_line.strip() and _JSON_START.match(text):
        return _json_kind(text)
    cells = [cell.strip().strip('"').lower() for cell in first_line.split("\t")]
    if is_passages_header(cells):
        return PASSAGES_TSV
    if {"query-id", "corpus-id"} <= set(cells):
        return QRELS
    if len(cells) == 2 and (cells[1].startswith(("[", "(")) or cells[1] == "answers"):
        return QUESTIONS_CSV
    if len(cells) < 3:
        return UNKNOWN
    # A passage's text may begin with a bracket, so with more columns the whole cell is looked at.
    lists = [bool(_LITERAL_LIST.fullmatch(cell)) for cell in cells]
    if lists[1]:
        return QUESTIONS_CSV
    return PASSAGES_TSV if re.fullmatch(r"\S+", cells[0]) and not any(lists) else UNKNOWN


def _json_kind(text: str) -> str:
    if '_ctxs"' in text:
        return TRAINING_JSON
    if '"ctxs"' in text:
        return RETRIEVAL_RESULTS
    if '"question"' in text:
        return QUESTIONS_JSONL if text.startswith("{") else TRAINING_JSON
    return OTHER_JSON


def is_passages_header(cells: list[str]) -> bool:
    """Whether lower-case cells name the columns of a passages TSV."""
    return "text" in cells and not ID_NAMES.isdisjoint(cells)
