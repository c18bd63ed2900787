"""Does a passage hold an answer? DPR's rules, which decide every published top-k accuracy.

Three modes, never guessed:

* ``"string"`` (Natural Questions, TriviaQA, SQuAD): NFD on both sides, tokens as `tokenize` cuts
  them, lower case; an answer matches where its tokens stand next to each other in the passage.
* ``"regex"`` (CuratedTREC): the answer is a pattern of the ``regex`` module, searched in the NFD
  text with IGNORECASE, UNICODE and MULTILINE.
* ``"kilt"``: lower case, ASCII punctuation and a/an/the removed, white space collapsed; an answer
  matches as a plain substring, also within a word.

Each mode turns a passage into one *prepared* string (`prepare_passage`) that does not depend on
the answers, so a passage retrieved for many questions is prepared once.

*Source:* DPR's ``qa_validation``, checked against values recorded from it (tests/golden).
"""

from __future__ import annotations

import difflib
import functools
import logging
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import regex

logger = logging.getLogger(__name__)

MATCH_MODES = ("string", "regex", "kilt")
EMPTY_ANSWER_RULES = ("match", "ignore")

_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
# The same rule where every character is ASCII and lower case; the standard module is faster there.
_ASCII_TOKEN = re.compile(r"[a-z0-9]+|[!-/:-@\[-`{-~]")
_ARTICLE = regex.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PATTERN_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
_TIMEOUTS_BEFORE_GIVING_UP = 3


class Token(NamedTuple):
    """A token with its place in the text: ``text[start:end]``."""

    text: str
    start: int
    end: int


def tokenize(text: str) -> list[Token]:
    """Cut a text as DPR's SimpleTokenizer does.

    A token is a run of letters, numbers and combining marks, or any other single character that
    is neither a separator nor a control character. The text is taken as it is: no normalisation,
    no change of case.

    >>> [token.text for token in tokenize("Jay-Z's 99 problems")]
    ['Jay', '-', 'Z', "'", 's', '99', 'problems']
    """
    return [Token(m.group(), *m.span()) for m in _TOKEN.finditer(text)]


def matching_words(text: str) -> list[str]:
    """The tokens that string matching compares: after NFD, in lower case.

    >>> matching_words("São Paulo") == matching_words("SÃO  PAULO")
    True
    """
    if text.isascii():
        return _ASCII_TOKEN.findall(text.lower())
    text = unicodedata.normalize("NFD", text)
    if "Σ" in text:  # the only letter whose lower case depends on its neighbours: go token by token
        return [match.group().lower() for match in _TOKEN.finditer(text)]
    words: list[str] = _TOKEN.findall(text.lower())
    return words


def _string_form(text: str) -> str:
    # A token holds no blank, so "consecutive tokens" is "substring that begins and ends at blanks".
    return f" {' '.join(matching_words(text))} "


def _regex_form(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def _kilt_form(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


_FORMS: dict[str, Callable[[str], str]] = {
    "string": _string_form,
    "regex": _regex_form,
    "kilt": _kilt_form,
}


def check_choice(value: str, choices: Sequence[str], *, name: str) -> None:
    """Raise a ValueError that names the nearest choice when ``value`` is none of them."""
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.4)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    listed = ", ".join(f'"{choice}"' for choice in choices)
    raise ValueError(f"{name}={value!r} is unknown{hint} Choose one of {listed}")


def check_answers(answers: Sequence[str], *, name: str = "answers") -> tuple[str, ...]:
    """Return the answers of one question as a tuple.

    Raises:
        TypeError: They are not a sequence of strings. A bare string is refused, since it would be
            read as one answer per character.
    """
    if isinstance(answers, str):
        raise TypeError(
            f"{name} is the string {answers!r}, expected a list of strings (it would be read "
            f"letter by letter); write [{answers!r}]"
        )
    if not isinstance(answers, Sequence) or isinstance(answers, bytes):
        raise TypeError(f"{name} is {answers!r}, expected a list of strings")
    for position, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise TypeError(
                f"{name}[{position}] is {answer!r} ({type(answer).__name__}), expected a string; "
                f"write {str(answer)!r} if that is the answer"
            )
    return tuple(answers)


def prepare_passage(text: str, *, match: str) -> str:
    """The form of a passage that `AnswerMatcher.matches_prepared` searches in the mode ``match``.

    Raises:
        ValueError: ``match`` is not a mode.
        TypeError: ``text`` is not a string.
    """
    check_choice(match, MATCH_MODES, name="match")
    if not isinstance(text, str):
        raise TypeError(f"the passage text is {text!r}, expected a string or None")
    return _FORMS[match](text)


class AnswerMatcher:
    """The accepted answers of one question, made ready once and matched against many passages.

    Args:
        answers: Accepted answers; with none, nothing matches.
        match: ``"string"``, ``"regex"`` or ``"kilt"``.
        empty_answers: What an answer does of which nothing is left to look for (no token; in
            regex mode a blank pattern). ``"match"``: it matches every passage, as in DPR, whose
            published numbers contain it. ``"ignore"``: it matches none.
        time_limit: Seconds that one search of a pattern may take. Running out of time is a miss;
            a pattern that ran out three times is not tried again by this matcher.

    Attributes:
        empty: How many answers are empty in that sense.
        usable: How many answers can be looked for: neither empty nor an invalid pattern.
        invalid_patterns: Pattern → what is wrong with it. Such a pattern is a miss, as in DPR.
        timeouts: Pattern → passages that it was not searched through for lack of time.

    Raises:
        TypeError: ``answers`` is not a sequence of strings.
        ValueError: ``match`` or ``empty_answers`` is unknown.
    """

    def __init__(
        self,
        answers: Sequence[str],
        *,
        match: str = "string",
        empty_answers: str = "match",
        time_limit: float = 1.0,
    ) -> None:
        check_choice(match, MATCH_MODES, name="match")
        check_choice(empty_answers, EMPTY_ANSWER_RULES, name="empty_answers")
        distinct = dict.fromkeys(check_answers(answers))
        self.match = match
        self.invalid_patterns: dict[str, str] = {}
        self.timeouts: Counter[str] = Counter()
        self._time_limit = time_limit
        self._substrings: list[str] = []
        self._patterns: list[tuple[str, regex.Pattern[str]]] = []

        filled = [answer for answer in distinct if not _is_empty(answer, match=match)]
        kept = list(distinct) if empty_answers == "match" else filled
        if match == "regex":
            self._compile(kept)
        else:
            self._substrings = [_FORMS[match](answer) for answer in kept]
        self._matches_all = match != "regex" and len(kept) > len(filled)
        self.empty = len(distinct) - len(filled)
        self.usable = len(filled) - len(self.invalid_patterns)

    def _compile(self, answers: Sequence[str]) -> None:
        for answer in answers:
            try:
                pattern = regex.compile(unicodedata.normalize("NFD", answer), _PATTERN_FLAGS)
            except Exception as error:  # a data file's pattern: the module fails in several ways
                self.invalid_patterns[answer] = str(error) or type(error).__name__
            else:
                self._patterns.append((answer, pattern))

    def matches(self, text: str | None) -> bool:
        """Whether the passage holds an answer; a missing text (None) never does."""
        return text is not None and self.matches_prepared(prepare_passage(text, match=self.match))

    def matches_prepared(self, prepared: str) -> bool:
        """The same for a passage that `prepare_passage` has made ready in this matcher's mode."""
        if self._matches_all:
            return True
        for substring in self._substrings:
            if substring in prepared:
                return True
        return any(self._finds(answer, pattern, prepared) for answer, pattern in self._patterns)

    def _finds(self, answer: str, pattern: regex.Pattern[str], text: str) -> bool:
        if self.timeouts[answer] < _TIMEOUTS_BEFORE_GIVING_UP:
            try:
                return pattern.search(text, timeout=self._time_limit) is not None
            except TimeoutError:
                pass
        self.timeouts[answer] += 1
        return False


def _is_empty(answer: str, *, match: str) -> bool:
    return not (answer if match == "regex" else _FORMS[match](answer)).strip()


def has_answer(
    answers: Sequence[str],
    text: str | None,
    *,
    match: str = "string",
    empty_answers: str = "match",
) -> bool:
    """Whether a passage's text holds at least one of the answers, by DPR's rules.

    For one question and many passages `AnswerMatcher` is faster, and `top_k_accuracy` faster yet.

    An answer with at least one token always matches a text in which it stands between blanks
    (``has_answer([a], f"x {a} y")``), since both sides are cut alike. Glued to other characters
    it may not: ``"10"`` is no token of ``"1910"``, an answer that begins with a combining mark
    joins the letter before it, and a word of a script without blanks is lost in its sentence.
    Regular expressions give no such promise (``C++``, ``$5``).

    Args:
        answers: Accepted answers; with none the result is False.
        text: The passage; None (no text known) never matches. The title is not looked at.
        match: ``"string"``, ``"regex"`` or ``"kilt"``, see the module's description.
        empty_answers: ``"match"`` (as DPR: an answer without tokens matches every text) or
            ``"ignore"`` (it matches none).

    Raises:
        TypeError: ``answers`` is a bare string or holds something that is not a string.
        ValueError: An unknown ``match`` or ``empty_answers``.

    >>> has_answer(["New York"], "He moved to new york, then back."), has_answer(["no"], "nobody")
    (True, False)
    >>> has_answer(["19[0-9]{2}"], "in 1987", match="regex")
    True
    """
    matcher = AnswerMatcher(answers, match=match, empty_answers=empty_answers)
    found = matcher.matches(text)
    for pattern, fault in matcher.invalid_patterns.items():
        _warn_once(f"answer {pattern!r} is no valid regular expression ({fault}); it never matches")
    for pattern in matcher.timeouts:
        _warn_once(f"answer pattern {pattern!r} ran out of time; that counts as no match")
    return found


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
