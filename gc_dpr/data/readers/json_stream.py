"""The objects of a JSON list or of JSON Lines, one at a time, with the line each begins on.

The text goes through a window that grows only until the object at its start is complete, so the
memory needed is that of the largest object, not of the file.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gc_dpr.errors import DataError

_BLOCK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# An error this near to the end of the window may only mean that the window ends too early (the
# longest token that can be cut is a pair of escaped surrogates).
_CUT_MARGIN = 32
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")


def iter_objects(
    handle: io.BufferedReader[Any], path: Path, *, block_bytes: int = _BLOCK_BYTES
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (1-based line, object) for every object of a list (``[``) or of lines (``{``).

    Args:
        handle: UTF-8 bytes, after any byte order mark.
        path: The file, for messages.
        block_bytes: How much is read at a time; changes speed, never the result.

    Raises:
        DataError: Broken or cut JSON (names line and byte), or something that is not an object.
    """
    window = _Window(handle, path, block_bytes)
    if window.peek() == "[":
        window.advance(1)
        yield from _list_objects(window)
    else:
        while window.peek():
            yield window.take_object()


def _list_objects(window: _Window) -> Iterator[tuple[int, dict[str, Any]]]:
    records = 0
    if window.peek() != "]":
        while True:
            yield window.take_object(in_list=True)
            records += 1
            following = window.peek()
            if following == "]":
                break
            if following != ",":
                raise _after_object(window, records)
            window.advance(1)
            if window.peek() == "":
                raise window.truncated(f"after record {records} of the list")
    window.advance(1)
    if window.peek():
        raise window.error("more text follows after the end of the JSON list")


def _after_object(window: _Window, records: int) -> DataError:
    if window.peek() == "":
        return window.truncated(f"after record {records} of the list, which is not closed by ]")
    return window.error(
        f"broken JSON: found {window.peek()!r} after record {records} of the list, expected , or ]"
    )


def refuse_lone_surrogates(value: Any, source: str, path: Path, line: int) -> None:
    r"""Refuse half a character, such as ``"\ud800"``: JSON can spell it, no tokenizer can read it.

    Args:
        value: What was decoded.
        source: What it was decoded from; a quick look there spares nearly all records the check.
        path: The file, for the message.
        line: The line the record begins on.
    """
    if "\\ud" not in source and "\\uD" not in source:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the record holds {error.object[error.start]!r}, half of a character that is written "
            "as two escapes; remove it or write the character itself",
            path=path,
            line=line,
        ) from None


class _Window:
    """A piece of the file as text, and the place in the file where it stands."""

    def __init__(self, handle: io.BufferedReader[Any], path: Path, block_bytes: int) -> None:
        self._handle = handle
        self._path = path
        self._block_bytes = block_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._line = 1
        self._bytes_dropped = 0
        self._bytes_read = 0
        self._ended = False

    def peek(self) -> str:
        """Skip white space; the next character, or "" at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None  # the pattern matches the empty string
            self.advance(match.end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def advance(self, characters: int) -> None:
        end = self._at + characters
        self._line += self._text.count("\n", self._at, end)
        self._at = end

    def take_object(self, *, in_list: bool = False) -> tuple[int, dict[str, Any]]:
        """The line and value of the object at the window's start; moves behind it."""
        if self.peek() != "{":
            raise self._not_an_object(in_list)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                if self._ended or not self._may_be_cut(error):
                    raise self._broken(error) from None
                self._fill()
            except (RecursionError, ValueError) as limit:  # nesting, or digits of a number
                raise self.error(f"JSON that cannot be read: {limit}") from None
        line = self._line
        refuse_lone_surrogates(value, self._text[self._at : end], self._path, line)
        self.advance(end - self._at)
        return line, value

    def _fill(self) -> None:
        """Drop what was consumed and read on; at least as much again, so retries stay linear."""
        self._bytes_dropped += len(self._text[: self._at].encode())
        rest = self._text[self._at :]
        block = self._handle.read(max(self._block_bytes, len(rest)))
        self._ended = not block
        pending = len(self._decode.getstate()[0])
        try:
            text = self._decode.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise self._not_utf8(error, rest, pending) from None
        self._bytes_read += len(block)
        self._text, self._at = rest + text, 0

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        unterminated = error.msg.startswith("Unterminated string")
        return unterminated or error.pos >= len(self._text) - _CUT_MARGIN

    def _broken(self, error: json.JSONDecodeError) -> DataError:
        rest = self._text[error.pos :].strip()
        cut_word = any(word.startswith(rest) for word in _WORDS)
        cut_escape = rest.startswith("\\") and '"' not in rest
        if error.msg.startswith("Unterminated string") or cut_word or cut_escape:
            return self.truncated("inside the record that begins here")
        return self.error(f"broken JSON: {error.msg}", at=error.pos)

    def truncated(self, where: str) -> DataError:
        total = self._bytes_dropped + len(self._text.encode())
        return DataError(
            f"the file ends at byte {total} {where}: it is cut off; copy or write it again",
            path=self._path,
            line=self._line,
        )

    def error(self, message: str, *, at: int | None = None) -> DataError:
        """A fault at an index of the window (default: its start), with line and byte."""
        at = self._at if at is None else at
        line = self._line + self._text.count("\n", self._at, at)
        byte = self._bytes_dropped + len(self._text[:at].encode()) + 1
        return DataError(f"{message} (byte {byte} of the text)", path=self._path, line=line)

    def _not_an_object(self, in_list: bool) -> DataError:
        names = {'"': "a string", "[": "a list", "t": "true", "f": "false", "n": "null"}
        found = self.peek()
        what = "a number" if found in "-0123456789" else names.get(found, repr(found))
        place = "in the list" if in_list else "where the next line's object should begin"
        if found == "":
            return self.truncated("inside the list, which is not closed by ]")
        if found == "]":
            return self.error("broken JSON: a comma stands before the closing ]")
        return self.error(f"found {what} {place}, expected an object with the key question")

    def _not_utf8(self, error: UnicodeDecodeError, rest: str, pending: int) -> DataError:
        before = error.object[: error.start]
        byte = self._bytes_read - pending + error.start + 1
        return DataError(
            f"byte {byte} of the text (0x{error.object[error.start]:02x}) is not UTF-8; convert "
            "the file to UTF-8, for example with iconv",
            path=self._path,
            line=self._line + rest.count("\n") + before.count(b"\n"),
        )
