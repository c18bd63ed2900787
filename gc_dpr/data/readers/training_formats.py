"""Which training format a file has, by its extension and first record, and its reader.

The formats stand in one table. Text in JSON is told apart by the keys of the first record, so the
name of such a file does not matter; Parquet is known by its first bytes, CSV and TSV by the name's
end, and both must have columns named like those of training texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.compression import BUFFER_BYTES
from gc_dpr.data.readers.dpr_json import numbered_dpr_json, numbered_retrieval_results
from gc_dpr.data.readers.flag_embedding_jsonl import numbered_flag_embedding
from gc_dpr.data.readers.parquet_rows import open_parquet
from gc_dpr.data.readers.paths import Paths, expand_paths, open_bytes
from gc_dpr.data.readers.squad_json import numbered_squad
from gc_dpr.data.readers.tevatron_jsonl import numbered_tevatron
from gc_dpr.data.readers.text_columns import looks_like_text_columns, numbered_text_columns
from gc_dpr.data.records import TrainingExample
from gc_dpr.errors import DataError

_PARQUET_MAGIC = b"PAR1"
_CONTEXT_KEYS = frozenset({"positive_ctxs", "hard_negative_ctxs", "negative_ctxs"})
# A record with these keys alone is a DPR example whose lists of passages are all missing.
_DPR_KEYS = frozenset({"question", "answers", "dataset", "id", "question_id", "qid", "query_id"})
_JSON_KINDS = frozenset(
    {kinds.TRAINING_JSON, kinds.RETRIEVAL_RESULTS, kinds.QUESTIONS_JSONL, kinds.OTHER_JSON}
)
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,"]|[^\s{}\[\]:,"]+', re.DOTALL)

Keys = Mapping[str, str]


class TrainingFormat(NamedTuple):
    """One format that training examples are read from.

    Attributes:
        name: How messages and the documentation call it.
        numbered: Its reader: a file to (1-based line or row, example) pairs.
        fits: Whether the first record of a JSON file is of this format: from its keys, each with
            the first character of its value (and of its first item, when that is a list). None:
            the reader's own module is asked.
    """

    name: str
    numbered: Callable[[Path], Iterator[tuple[int, TrainingExample]]]
    fits: Callable[[Keys], bool] | None


def _fits_dpr_json(keys: Keys) -> bool:
    # Without a key the JSON is empty or broken, which DPR's parser says best.
    return bool(_CONTEXT_KEYS & keys.keys()) or keys.keys() <= _DPR_KEYS


def _fits_retrieval_results(keys: Keys) -> bool:
    return "ctxs" in keys


def _fits_tevatron(keys: Keys) -> bool:
    # Rows that name ids of a corpus are refused by that reader, which tells what to do.
    return "positive_passages" in keys or "positive_document_ids" in keys


def _fits_flag_embedding(keys: Keys) -> bool:
    return "query" in keys and "pos" in keys and not keys["pos"].startswith('"')


def _fits_squad(keys: Keys) -> bool:
    return keys.get("data", "").startswith("[")


_TEXT_COLUMNS = TrainingFormat(
    "text columns (the first called anchor, query, question, sentence1, …; then positive and "
    "negatives) as CSV, TSV, JSON Lines or Parquet",
    numbered_text_columns,
    None,
)
_TABLE = (
    TrainingFormat("DPR training JSON or JSON Lines", numbered_dpr_json, _fits_dpr_json),
    TrainingFormat(
        "DPR retrieval results (question, answers, ctxs)",
        numbered_retrieval_results,
        _fits_retrieval_results,
    ),
    TrainingFormat("Tevatron JSON Lines with passages", numbered_tevatron, _fits_tevatron),
    TrainingFormat(
        "FlagEmbedding JSON Lines (query, pos, neg)", numbered_flag_embedding, _fits_flag_embedding
    ),
    TrainingFormat("SQuAD JSON", numbered_squad, _fits_squad),
    _TEXT_COLUMNS,
)

FORMATS = tuple(entry.name for entry in _TABLE)


def read_training_examples(paths: Paths) -> Iterator[TrainingExample]:
    """Read training examples one by one from files of any format in ``FORMATS``.

    Args:
        paths: A file, a glob or a list of them; see ``expand_paths``. Plain, gzip or Zstandard.
            Each file may have a format of its own.

    Returns:
        A lazy iterator in file order. Examples without positives are among them: the training
        set counts and drops those. An id is the record's own, otherwise
        ``<file name>#<0-based position in the file>``.

    Raises:
        DataError: At once: a file is missing. While reading: a file has none of the formats, is
            broken or cut, or a value is of the wrong type (names the file, the line and the key).

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> one, two = (pathlib.Path(folder.name, name) for name in ("dpr.json", "flag.jsonl"))
        >>> _ = one.write_text('[{"question": "who?", "positive_ctxs": [{"text": "Ada."}]}]')
        >>> _ = two.write_text('{"query": "where?", "pos": ["Ulm."], "neg": []}')
        >>> for example in read_training_examples([one, two]):
        ...     print(example.id, example.question, example.positives[0].text)
        dpr.json#0 who? Ada.
        flag.jsonl#0 where? Ulm.
        >>> folder.cleanup()
    """
    files = expand_paths(paths)
    return (example for path in files for _, example in numbered_training_examples(path))


def numbered_training_examples(path: Path) -> Iterator[tuple[int, TrainingExample]]:
    """Yield (line on which the record begins, or Parquet's 1-based row; example) of one file."""
    yield from find_training_format(path).numbered(path)


def find_training_format(path: Path) -> TrainingFormat:
    """The format of one file, from its extension and the beginning of its first record.

    Raises:
        DataError: The file has none of the formats (says what was found and lists them), is
            empty or cannot be opened.
    """
    if path.exists() and not path.is_file():
        raise DataError(
            "this is a pipe or a device, which can be read only once, but training files are "
            "looked at first; write it to a file and name that",
            path=path,
        )
    if path.suffix.lower() == ".parquet" or _begins_like_parquet(path):
        return _parquet_format(path)
    with open_bytes(path) as handle:
        head = handle.read(BUFFER_BYTES)
    start = head.lstrip()
    if not start.startswith((b"[", b"{")):
        if looks_like_text_columns(path, start):
            return _TEXT_COLUMNS
        kinds.check_kind(path, head, expected=_expected(), accepted=frozenset())
    kinds.check_kind(path, head, expected=_expected(), accepted=_JSON_KINDS | {kinds.UNKNOWN})
    return _json_format(path, start, line=head[: len(head) - len(start)].count(b"\n") + 1)


def _parquet_format(path: Path) -> TrainingFormat:
    if looks_like_text_columns(path, _PARQUET_MAGIC):
        return _TEXT_COLUMNS
    with open_parquet(path) as file:
        names = ", ".join(file.schema_arrow.names)
    raise DataError(
        f"found a Parquet file with the columns {names[:100]}, expected {_expected()}", path=path
    )


def _json_format(path: Path, start: bytes, *, line: int) -> TrainingFormat:
    keys = _first_keys(start.decode("utf-8", errors="ignore"))
    for entry in _TABLE:
        if entry.fits is not None and entry.fits(keys):
            return entry
    if looks_like_text_columns(path, start.removeprefix(b"[").lstrip()):
        return _TEXT_COLUMNS
    raise DataError(
        f"found a first record with the keys {', '.join(keys)[:100]}, expected {_expected()}",
        path=path,
        line=line,
    )


def _expected() -> str:
    return "; ".join(FORMATS[:-1]) + f"; or {FORMATS[-1]}"


def _begins_like_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            return handle.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror or error})", path=path) from None


def _first_keys(text: str) -> dict[str, str]:
    """The keys of the first JSON object, as far as the text goes; see ``TrainingFormat.fits``."""
    start = text.find("{")
    keys: dict[str, str] = {}
    depth, before, key = 0, "", ""
    for token in _TOKEN.findall(text, start) if start >= 0 else ():
        if depth == 1 and before in ("{", ",") and len(token) > 1 and token.startswith('"'):
            key = _unescaped(token)
        elif (depth == 1 and before == ":") or (depth == 2 and before == "[" and keys[key] == "["):
            keys[key] = keys.get(key, "") + token[0]
        depth += (token in "{[") - (token in "}]")
        if depth == 0 or token == '"':  # the end of the object, or of the text in a string
            break
        before = token
    return keys


def _unescaped(token: str) -> str:
    try:
        return str(json.loads(token, strict=False))
    except json.JSONDecodeError:  # the parser names the place
        return token
