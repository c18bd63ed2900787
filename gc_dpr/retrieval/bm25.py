"""BM25, the word-matching baseline that a dense retriever has to be compared with.

P passages, Q questions, K top-k.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gc_dpr.data.records import Passage
from gc_dpr.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_WORD = re.compile(r"\b\w\w+\b")


class BM25Index:
    """A BM25 index over title and text, held in memory. Made by `build`.

    The words are runs of at least two letters, digits or underscores, in lower case, without stop
    words, stemmed. The score is Lucene's: for each word of the question (once per occurrence)
    ``ln(1 + (P - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b * length / mean length))``.
    """

    def __init__(self, scorer: Any, passage_ids: Sequence[str], words: _Words) -> None:
        self._scorer = scorer
        self._passage_ids = list(passage_ids)
        self._words = words

    def __len__(self) -> int:
        """Number of passages, P."""
        return len(self._passage_ids)

    @classmethod
    def build(
        cls,
        passages: Iterable[Passage],
        *,
        k1: float = 0.9,
        b: float = 0.4,
        stemmer: str | None = "english",
        stop_words: str | Sequence[str] | None = "en",
    ) -> BM25Index:
        """Index passages; only their word ids are kept, not their texts.

        Args:
            passages: Read once; ``title + " " + text`` is indexed.
            k1: How fast repetitions of a word stop counting. Default as in Anserini and the DPR
                paper's BM25.
            b: How much long passages are held back, 0 to 1.
            stemmer: A Snowball language; None leaves words as they are.
            stop_words: A language code that bm25s knows, the words themselves, or None.

        Raises:
            ConfigError: The packages are not installed, or a setting is out of range or unknown.
            DataError: There is no passage or no word, or a passage id occurs twice.
        """
        bm25s = _import_bm25s()
        if k1 < 0 or not 0 <= b <= 1:
            raise ConfigError(f"k1={k1}, b={b}: expected k1 of 0 or more and b from 0 to 1")
        words = _Words(stemmer=stemmer, stop_words=stop_words)
        passage_ids: list[str] = []
        rows: list[list[int]] = []
        for passage in passages:
            passage_ids.append(passage.id)
            rows.append(words.ids(f"{passage.title} {passage.text}", grow=True))
        if not rows:
            raise DataError("there is no passage to index; is the passages file empty?")
        repeats = len(passage_ids) - len(set(passage_ids))
        if repeats:
            raise DataError(f"{repeats} of {len(passage_ids)} passages repeat an earlier one's id")
        if not words.vocabulary:
            raise DataError(
                f"none of the {len(rows)} passages has a word to index: all are empty or hold only "
                "stop words and single characters"
            )
        scorer = bm25s.BM25(k1=k1, b=b, method="lucene")
        scorer.index((rows, words.vocabulary), create_empty_token=False, show_progress=False)
        return cls(scorer, passage_ids, words)

    def search(
        self, questions: Sequence[str], k: int
    ) -> tuple[npt.NDArray[np.float32], list[list[str]]]:
        """The k best passages of each question.

        Equal scores stand in the order of the corpus. A passage that shares no word with the
        question has the score 0 and comes, in that order, after all that do; so the lists always
        have the same length, and a caller who wants none of those drops the zeros.

        Args:
            questions: Texts, Q.
            k: How many passages; where the corpus has fewer, all of them.

        Returns:
            Scores (Q, K) float32, descending, and the passage ids, Q lists of K.

        Raises:
            TypeError: ``questions`` is a bare string.
            ValueError: k is below 1.
        """
        if isinstance(questions, str):
            raise TypeError("questions is a string, expected a list of strings; write [question]")
        if k < 1:
            raise ValueError(f"k={k}, expected 1 or more")
        k = min(k, len(self))
        scores = np.zeros((len(questions), k), dtype=np.float32)
        passage_ids: list[list[str]] = []
        for row, question in enumerate(questions):
            all_scores = self._scores(question)  # (P,)
            best = _top(all_scores, k)  # (K,)
            scores[row] = all_scores[best]
            passage_ids.append([self._passage_ids[position] for position in best])
        wordless = int((scores[:, 0] == 0).sum())
        if wordless:
            logger.warning(
                "%d of %d questions share no word with any passage; their passages are the first "
                "of the corpus, with score 0",
                wordless,
                len(questions),
            )
        return scores, passage_ids

    def _scores(self, question: str) -> npt.NDArray[np.float32]:
        word_ids = self._words.ids(question, grow=False)
        if not word_ids:
            return np.zeros(len(self), dtype=np.float32)
        scores: npt.NDArray[np.float32] = self._scorer.get_scores_from_ids(word_ids)
        return scores


class _Words:
    """Text → word ids. Each distinct word is stemmed once."""

    def __init__(self, *, stemmer: str | None, stop_words: str | Sequence[str] | None) -> None:
        self.vocabulary: dict[str, int] = {}  # stem → id
        self._stems: dict[str, str] = {}
        self._stop_words = _stop_words(stop_words)
        self._stem = _stemmer(stemmer)

    def ids(self, text: str, *, grow: bool) -> list[int]:
        """Ids of the words, in order; a new word gets an id if ``grow``, else it is left out."""
        found = []
        for word in _WORD.findall(text.lower()):
            if word in self._stop_words:
                continue
            stem = self._stems.get(word)
            if stem is None:
                stem = self._stem(word)
                if grow:  # questions do not fill the memory of a long-lived index
                    self._stems[word] = stem
            word_id = self.vocabulary.get(stem)
            if word_id is None and grow:
                word_id = self.vocabulary[stem] = len(self.vocabulary)
            if word_id is not None:
                found.append(word_id)
        return found


def _top(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Positions of the k highest scores, descending, equal ones by position."""
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    tied = np.flatnonzero(scores == least)[: k - len(above)]
    kept = np.concatenate([above, tied])  # each part ascending, so a stable sort keeps the order
    return kept[np.argsort(-scores[kept], kind="stable")]


def _import_bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise _missing_package("bm25s") from error
    # The library sets its own logger to DEBUG, which would fill every log file.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _missing_package(name: str) -> ConfigError:
    return ConfigError(f"BM25 needs the package {name}: pip install 'gc-dpr[bm25]'")


def _stop_words(choice: str | Sequence[str] | None) -> frozenset[str]:
    if choice is None:
        return frozenset()
    if not isinstance(choice, str):
        return frozenset(word.lower() for word in choice)
    from bm25s.tokenization import Tokenizer

    try:
        return frozenset(Tokenizer(stopwords=choice).stopwords)
    except ValueError as error:
        raise ConfigError(
            f'stop_words={choice!r} is no language that bm25s knows ("en", "de", …); give another '
            "one, a list of words, or null"
        ) from error


def _stemmer(language: str | None) -> Any:
    if language is None:
        return str
    try:
        import Stemmer
    except ImportError as error:
        raise _missing_package("PyStemmer") from error
    try:
        return Stemmer.Stemmer(language).stemWord
    except KeyError:
        raise ConfigError(
            f"stemmer={language!r} is unknown; choose one of {', '.join(Stemmer.algorithms())}, "
            "or null"
        ) from None
