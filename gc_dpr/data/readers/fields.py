"""The fields of a JSON record, each checked when it is asked for.

Every fault names the file, the line the record begins on and the path of the key
(``positive_passages[2].text``), what was found and what was expected. Keys that a reader has no
use for are counted and logged once per file.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gc_dpr.data.readers.json_stream import iter_objects
from gc_dpr.data.readers.paths import open_bytes
from gc_dpr.errors import DataError

_logger = logging.getLogger(__name__)

# Some files use data as keys; neither the memory nor the log line may grow with them.
_LISTED_KEYS = 30
_FURTHER_KEYS = "further keys"


class Fields:
    """One JSON object, with its place in the file.

    Args:
        values: The decoded object.
        path: The file, for messages.
        line: The 1-based line the record begins on, for messages.
        prefix: Where the object stands inside its record, such as ``"positive_passages[2]."``.
        others: Shared count of the keys that are not kept.
    """

    __slots__ = ("_line", "_others", "_path", "_prefix", "_values")

    def __init__(
        self,
        values: dict[str, Any],
        path: Path,
        line: int,
        *,
        prefix: str = "",
        others: Counter[str] | None = None,
    ) -> None:
        self._values = values
        self._path = path
        self._line = line
        self._prefix = prefix
        self._others: Counter[str] = Counter() if others is None else others

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def count_others(self, known: frozenset[str]) -> None:
        """Count the keys outside ``known``; ``numbered_fields`` logs them after the file."""
        extra = self._values.keys() - known
        prefix = re.sub(r"\[\d+\]", "[]", self._prefix) if extra else ""
        for key in extra:
            name = prefix + key
            listed = name in self._others or len(self._others) < _LISTED_KEYS
            self._others[name if listed else _FURTHER_KEYS] += 1

    def string(self, key: str) -> str:
        """The string under a key that must be there."""
        value = self._values.get(key)
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def optional_string(self, key: str) -> str:
        """The string under a key; "" when it is missing or null."""
        value = self._values.get(key)
        if value is not None and type(value) is not str:
            raise self.wrong(key, "a string or null")
        return value or ""

    def optional_flag(self, key: str) -> bool:
        """The truth value under a key; False when it is missing or null."""
        value = self._values.get(key)
        if value is not None and type(value) is not bool:
            raise self.wrong(key, "true, false or null")
        return bool(value)

    def identity(self, *keys: str) -> str:
        """The first of several id keys that is present and not null; "" if none is."""
        for key in keys:
            value = self._values.get(key)
            if value is not None:
                text = _id_text(value)
                if text is None:
                    raise self.wrong(key, "a string or a whole number")
                return text
        return ""

    def strings(self, key: str) -> tuple[str, ...]:
        """The list of strings under a key that must be there."""
        values = self._list(key, "a list of strings")
        for i, value in enumerate(values):
            if type(value) is not str:
                raise self.wrong_item(key, i, value, "a string")
        return tuple(values)

    def optional_strings(self, key: str) -> tuple[str, ...]:
        """The list of strings under a key; empty when it is missing or null."""
        return () if self._values.get(key) is None else self.strings(key)

    def optional_identities(self, key: str) -> tuple[str, ...] | None:
        """The list of ids under a key, null ones as ""; None when it is missing or null."""
        if self._values.get(key) is None:
            return None
        values = self._list(key, "a list of ids")
        texts = ["" if value is None else _id_text(value) for value in values]
        for i, text in enumerate(texts):
            if text is None:
                raise self.wrong_item(key, i, values[i], "a string or a whole number")
        return tuple(text or "" for text in texts)

    def optional_numbers(self, key: str) -> tuple[float, ...] | None:
        """The list of finite numbers under a key; None when it is missing or null."""
        if self._values.get(key) is None:
            return None
        values = self._list(key, "a list of numbers")
        for i, value in enumerate(values):
            finite = type(value) is int or (type(value) is float and abs(value) < float("inf"))
            if not finite:
                raise self.wrong_item(key, i, value, "a finite number")
        return tuple(values)

    def objects(self, key: str, expected_item: str) -> Iterator[Fields]:
        """Go through the list of objects under a key that must be there.

        Args:
            key: The key.
            expected_item: What each should be, for messages ("an object with title and text").
        """
        for i, value in enumerate(self._list(key, f"a list, each {expected_item}")):
            if type(value) is not dict:
                raise self.wrong_item(key, i, value, expected_item)
            prefix = f"{self._prefix}{key}[{i}]."
            yield Fields(value, self._path, self._line, prefix=prefix, others=self._others)

    def optional_objects(self, key: str, expected_item: str) -> Iterator[Fields]:
        """Like ``objects``; nothing when the key is missing or null."""
        return iter(()) if self._values.get(key) is None else self.objects(key, expected_item)

    def wrong(self, key: str, expected: str) -> DataError:
        """The fault of a value that is missing or of the wrong type."""
        if key in self._values:
            return self._wrong_value(key, self._values[key], expected)
        known = ", ".join(list(self._values)[:6]) or "nothing"
        return self.fault(
            f"{self._prefix}{key}: it is missing (the object has: {known}), expected {expected}"
        )

    def wrong_item(self, key: str, index: int, value: Any, expected: str) -> DataError:
        """The fault of one value in a list."""
        return self._wrong_value(f"{key}[{index}]", value, expected)

    def fault(self, message: str) -> DataError:
        """A fault of this record, with file and line."""
        return DataError(message, path=self._path, line=self._line)

    def key_path(self, key: str) -> str:
        """Where a key stands inside the record, for messages."""
        return f"{self._prefix}{key}"

    def _wrong_value(self, key: str, value: Any, expected: str) -> DataError:
        found = f"found {value!r:.40} ({type(value).__name__})"
        return self.fault(f"{self._prefix}{key}: {found}, expected {expected}")

    def _list(self, key: str, expected: str) -> list[Any]:
        value = self._values.get(key)
        if type(value) is not list:
            raise self.wrong(key, expected)
        return value


def _id_text(value: Any) -> str | None:
    """An id as a string; None if it cannot be one."""
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    # Tables that were exported with missing ids turn whole numbers into 12.0.
    if type(value) is float and value.is_integer():
        return str(int(value))
    return None


def numbered_fields(path: Path) -> Iterator[tuple[int, Fields]]:
    """Yield (line on which it begins, record) for a file of JSON lines or one JSON list.

    When reading ends, the keys that ``Fields.count_others`` found are logged.

    Raises:
        DataError: Broken or cut JSON, something that is not an object, or an unreadable file.
    """
    others: Counter[str] = Counter()
    with _logged(others, path), open_bytes(path) as handle:
        for line, values in iter_objects(handle, path):
            yield line, Fields(values, path, line, others=others)


@contextlib.contextmanager
def _logged(others: Counter[str], path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        if others:
            counts = ", ".join(f"{key} ({count})" for key, count in sorted(others.items()))
            _logger.info("%s: keys read over and not kept: %s", path, counts)
