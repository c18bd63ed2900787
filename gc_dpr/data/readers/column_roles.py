"""What each column of a table of texts is, and how a row becomes a training example.

As in sentence-transformers the order decides unless the columns are named: first the question
(their "anchor"), then its positive, then any number of negatives. A cell is a text or a list of
texts (several positives or negatives).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

ColumnNames = str | Sequence[str]

ROLES = ("question", "positive", "negatives", "title", "answers", "id")
IGNORED_NAMES = frozenset({"dataset_name", "prompt"})
LABEL_NAMES = frozenset({"label", "labels", "score", "scores"})
# Never a text to train on; most often the first column, where it would be taken for the question.
_ID_NAME = re.compile(r"(.*_)?(id|idx|qid|pid|docid)|__index_level_\d+__")
# Names that say which role a column has; by order alone it could get another.
_POSITIVE_NAME = re.compile(r"pos(itives?)?([ _-]?\d+)?")
_NEGATIVE_NAME = re.compile(r"(hard[ _-]?)?neg(atives?)?([ _-]?\d+)?")
_LONGEST_NAME = 100

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """Which columns are read as what; the others are ignored.

    Attributes:
        question: Column of the question.
        positive: Columns of positive passages, best first.
        negatives: Columns of hard negatives.
        title: Columns of the positives' titles, one title for each positive; may be empty.
        answers: Columns of answers; may be empty.
        id: Column of the example's id; None when there is none.
    """

    question: str
    positive: tuple[str, ...]
    negatives: tuple[str, ...] = ()
    title: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    id: str | None = None

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that are read."""
        own_id = () if self.id is None else (self.id,)
        return (
            self.question,
            *self.positive,
            *self.negatives,
            *self.title,
            *self.answers,
            *own_id,
        )


def find_roles(
    names: Sequence[str],
    path: Path,
    *,
    columns: Mapping[str, ColumnNames] | None = None,
    line: int | None = None,
) -> ColumnRoles:
    """Give every column its role, by ``columns`` or else by the order; logs the result.

    Args:
        names: The names of the file's columns, in order.
        path: The file, for messages.
        columns: Column names by role (``question``, ``positive``, ``negatives``, ``title``,
            ``answers``, ``id``). None: the order decides.
        line: Where the names stand, for messages.

    Raises:
        DataError: A name is missing, empty or there twice; or the order would give a column a role
            that its name contradicts.
        ValueError: ``columns`` has an unknown role, lacks one, or names a column twice.
    """
    for i, name in enumerate(names):
        if not name.strip():
            raise DataError(
                f"column {i + 1} has no name (pandas writes its index so: use index=False); "
                "expected a header that names every column",
                path=path,
                line=line,
            )
        if name in names[:i]:
            raise DataError(
                f"two columns are named {name!r}; every column needs its own name",
                path=path,
                line=line,
            )
    roles = (
        _by_order(names, path, line) if columns is None else _by_name(names, columns, path, line)
    )
    ignored = [name for name in names if name not in roles.used]
    if ignored:
        _logger.info("%s: columns ignored: %s", path, ", ".join(ignored))
    _logger.info(
        "%s: question = %s, positive = %s, negatives = %s",
        path,
        roles.question,
        ", ".join(roles.positive),
        ", ".join(roles.negatives) or "none",
    )
    return roles


def _by_order(names: Sequence[str], path: Path, line: int | None) -> ColumnRoles:
    texts = [name for name in names if name.strip().lower() not in IGNORED_NAMES]
    for position, name in enumerate(texts):
        problem = _contradiction(position, name.strip().lower())
        if problem:
            raise DataError(
                f"column {name!r} {problem}. Without column names the order decides: question, "
                "positive, negatives. Remove or move the column, or say which column is which "
                "with columns={'question': ..., 'positive': ..., 'negatives': [...]}",
                path=path,
                line=line,
            )
    if len(texts) < 2:
        raise DataError(
            f"found {len(texts)} column of text ({', '.join(texts)[:60]}), expected at least two: "
            "question, positive and then any negatives",
            path=path,
            line=line,
        )
    return ColumnRoles(texts[0], (texts[1],), tuple(texts[2:]))


def _contradiction(position: int, name: str) -> str:
    """Why a column cannot have the role of its place; "" if it can."""
    if len(name) > _LONGEST_NAME or name.endswith(("?", ".", "!")):
        return "looks like a text and not like a name; the first row must name the columns"
    if name in LABEL_NAMES:
        return (
            "cannot be ignored: a label or score says how far the second text is a positive, and "
            "training would take every row for a positive pair"
        )
    if _ID_NAME.fullmatch(name):
        return "holds ids by its name, not texts"
    if position != 1 and _POSITIVE_NAME.fullmatch(name):
        return f"is called a positive and would be read as a {_role(position)}"
    if position < 2 and _NEGATIVE_NAME.fullmatch(name):
        return f"is called a negative and would be read as a {_role(position)}"
    return ""


def _role(position: int) -> str:
    return ("question", "positive")[position] if position < 2 else "negative"


def _by_name(
    names: Sequence[str], columns: Mapping[str, ColumnNames], path: Path, line: int | None
) -> ColumnRoles:
    unknown = [role for role in columns if role not in ROLES]
    if unknown or not {"question", "positive"} <= set(columns):
        raise ValueError(
            f"columns has the roles {', '.join(columns) or 'none'}; expected question, positive "
            f"and, if there are such columns, {', '.join(ROLES[2:])}"
        )
    by_role = {
        role: (value,) if isinstance(value, str) else tuple(value)
        for role, value in columns.items()
    }
    for role in ("question", "id"):
        if len(by_role.get(role, ("",))) != 1:
            raise ValueError(f"columns[{role!r}] is {columns[role]!r}; expected one column name")
    if not by_role["positive"]:
        raise ValueError("columns['positive'] names no column; expected at least one")
    used = [name for role in ROLES for name in by_role.get(role, ())]
    for i, name in enumerate(used):
        if name in used[:i]:
            raise ValueError(f"columns names {name!r} twice; every column has one role")
        if name not in names:
            raise DataError(
                f"there is no column {name!r}; the file has: {', '.join(names)}",
                path=path,
                line=line,
            )
    return ColumnRoles(
        question=by_role["question"][0],
        positive=by_role["positive"],
        negatives=by_role.get("negatives", ()),
        title=by_role.get("title", ()),
        answers=by_role.get("answers", ()),
        id=by_role["id"][0] if "id" in by_role else None,
    )


def row_example(
    row: Mapping[str, Any], roles: ColumnRoles, path: Path, *, line: int, default_id: str
) -> TrainingExample:
    """Make a training example of one row.

    Args:
        row: Cells by column name: a string, or a list of strings where several are allowed.
        roles: What the columns are.
        path: The file, for messages.
        line: The row's place, for messages.
        default_id: The id when no column holds ids.

    Raises:
        DataError: A cell is null, empty or of another type; names the place and the column.
    """
    question = row[roles.question]
    if type(question) is not str or not question.strip():
        raise _wrong(roles.question, question, "a text (the question)", path, line)
    positives = _texts(row, roles.positive, path, line)
    titles = _texts(row, roles.title, path, line, empty=True)
    if roles.title and len(titles) != len(positives):
        raise DataError(
            f"column {', '.join(roles.title)}: found {len(titles)} titles for {len(positives)} "
            "positives, expected one for each (an empty one where there is none)",
            path=path,
            line=line,
        )
    return TrainingExample(
        id=default_id if roles.id is None else _id(roles.id, row[roles.id], path, line),
        question=question,
        answers=_texts(row, roles.answers, path, line),
        positives=tuple(
            Passage("", title, text)
            for title, text in zip(titles or ("",) * len(positives), positives, strict=True)
        ),
        hard_negatives=tuple(
            Passage("", "", text) for text in _texts(row, roles.negatives, path, line)
        ),
    )


def _texts(
    row: Mapping[str, Any], names: Sequence[str], path: Path, line: int, *, empty: bool = False
) -> tuple[str, ...]:
    """The texts of several columns in order; ``empty``: they may be empty."""
    found: list[str] = []
    for name in names:
        cell = row[name]
        for i, text in enumerate(cell if type(cell) is list else (cell,)):
            if type(text) is not str or not (empty or text.strip()):
                key = f"{name}[{i}]" if type(cell) is list else name
                raise _wrong(key, text, "a text or a list of texts, none empty", path, line)
            found.append(text)
    return tuple(found)


def _id(name: str, cell: Any, path: Path, line: int) -> str:
    if type(cell) is int:
        return str(cell)
    if type(cell) is not str or not cell.strip():
        raise _wrong(name, cell, "a string or a whole number (the id)", path, line)
    return cell


def _wrong(key: str, cell: Any, expected: str, path: Path, line: int) -> DataError:
    if cell is None:
        found = "nothing (null)"
    elif type(cell) is str:
        found = f"the empty text {cell!r:.20}"
    else:
        found = f"{cell!r:.40} ({type(cell).__name__})"
    return DataError(f"column {key}: found {found}, expected {expected}", path=path, line=line)
