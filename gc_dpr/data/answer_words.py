"""Answers and passages as hashed words, made in the loader's workers.

An answer is in a passage where its words stand next to each other in the passage's text, words
being what DPR's string match compares. A word becomes 64 bits and an answer its number of words
and twice 64 bits: what a comparison needs, in tensors that are small and of a fixed width.

Letters: A answers, N passages, T words of all passages.
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import regex
import torch
from numpy.typing import NDArray
from torch import Tensor

# A run of letters, numbers and marks, or any other visible character; the second pattern is the
# same rule for lower-case ASCII, where the standard module is faster.
_WORD = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
_ASCII_WORD = re.compile(r"[a-z0-9]+|[!-/:-@\[-`{-~]")

# Joins the words of an answer: hash(words + [w]) = hash(words) * this + w, modulo 2**64. Odd, so
# that answers which differ in one word never share a hash.
MULTIPLIER: Final = 0x5851F42D4C957F2D

_CACHED_WORDS = 262_144  # about 30 MB in each worker
_CACHED_PASSAGES = 16_384  # about 25 MB in each worker with passages of 100 words

# English words that are in almost every passage.
_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a about all also an and any are as at be been both but by can did do does for from had has
    have he her him his how i if in into is it its may more most no nor not of off on one only
    or other our out over she so some such than that the their them then there these they this
    those to too up very was we were what when where which who whom whose why will with would
    yes you your
        """,
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class HashedAnswers:
    """The answers of a batch's questions.

    Attributes:
        answers: (A, 4) int64: row of the question, number of words, hash of all words, hash of
            the first word. Equal answers of one question stand once.
        ignored: Answers left out because they would match by chance, or have no word.
        questions_without: Questions without any answer that can be looked for.
    """

    answers: Tensor
    ignored: int
    questions_without: int


@dataclass(frozen=True, slots=True, eq=False)
class HashedWords:
    """The words of some passages' texts.

    Attributes:
        words: (T,) int64, one passage after the other.
        counts: (N,) int64, words of each passage.
    """

    words: Tensor
    counts: Tensor


def hash_answers(answers: Sequence[Sequence[str]], *, min_letters: int = 3) -> HashedAnswers:
    """Hash the answers of every question.

    A short answer is in many passages that do not answer the question ("7", "US", "to be"), and
    masking those would leave the question without negatives. So only answers with at least
    ``min_letters`` letters and digits are looked for. Function words ("the", "of") do not
    count; Chinese, Japanese and other characters from U+2E80 on stand for a syllable or a word and
    count twice.

    Args:
        answers: The accepted answers of each question; may be empty.
        min_letters: 0 looks for every answer that has a word. One without (blanks only), which
            DPR's match finds in every passage, is always ignored.

    Raises:
        TypeError: The answers of a question are a bare string.
        ValueError: ``min_letters`` is negative.

    Example:
        >>> hashed = hash_answers([["New York", "new  york", "NY"], ["7"]])
        >>> hashed.answers[:, :2].tolist(), hashed.ignored, hashed.questions_without
        ([[0, 2]], 2, 1)
    """
    if min_letters < 0:
        raise ValueError(f"min_letters={min_letters}: expected 0 or more")
    found: list[tuple[int, int, int, int]] = []
    ignored = questions_without = 0
    for row, accepted in enumerate(answers):
        if isinstance(accepted, str):
            raise TypeError(
                f"answers[{row}] is the string {accepted!r}, expected a list of strings (it would "
                f"be read letter by letter); write [{accepted!r}]"
            )
        hashes = [_answer_hash(answer, min_letters) for answer in dict.fromkeys(accepted)]
        usable = dict.fromkeys(hashed for hashed in hashes if hashed is not None)
        found += [(row, *hashed) for hashed in usable]
        ignored += hashes.count(None)
        questions_without += not usable
    tensor = torch.tensor(found, dtype=torch.int64).view(-1, 4)
    return HashedAnswers(tensor, ignored, questions_without)


def hash_passages(texts: Sequence[str]) -> HashedWords:
    """Hash the words of every text; titles are not searched, as in DPR.

    Texts met lately are remembered by each process.

    Example:
        >>> hashed = hash_passages(["Lisbon, Lisbon", ""])
        >>> hashed.counts.tolist(), bool(hashed.words[0] == hashed.words[2])
        ([3, 0], True)
    """
    arrays = [_hashed_words(text) for text in texts]
    return HashedWords(
        torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays])),
        torch.tensor([len(array) for array in arrays], dtype=torch.int64),
    )


def matching_words(text: str) -> list[str]:
    """The words that DPR's string match compares: of the NFD text, in lower case.

    Example:
        >>> matching_words("Jay-Z's 99")
        ['jay', '-', 'z', "'", 's', '99']
    """
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    text = unicodedata.normalize("NFD", text)
    if "Σ" in text:  # the only letter whose lower case depends on its neighbours: word by word
        return [match.group().lower() for match in _WORD.finditer(text)]
    words: list[str] = _WORD.findall(text.lower())
    return words


@functools.lru_cache(maxsize=_CACHED_PASSAGES)
def _hashed_words(text: str) -> NDArray[np.int64]:
    words = matching_words(text)
    return np.fromiter(map(_word_hash, words), np.int64, len(words))


@functools.lru_cache(maxsize=_CACHED_WORDS)
def _word_hash(word: str) -> int:
    """64 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(word.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def _answer_hash(answer: str, min_letters: int) -> tuple[int, int, int] | None:
    """Number of words, their hash and the first one's; None for an answer that is ignored."""
    words = matching_words(answer)
    if not words or (min_letters and _letters(words) < min_letters):
        return None
    value = 0
    for word in words:
        value = (value * MULTIPLIER + _word_hash(word)) % 2**64
    return len(words), value - 2**64 if value >= 2**63 else value, _word_hash(words[0])


def _letters(words: Sequence[str]) -> int:
    """Letters and digits outside function words."""
    return sum(
        2 if letter >= "\u2e80" else 1
        for word in words
        if word not in _FUNCTION_WORDS
        for letter in word
        if letter.isalnum()
    )
