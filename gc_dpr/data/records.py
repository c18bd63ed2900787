"""The plain records that data is made of. No framework is imported here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of a corpus.

    Attributes:
        id: Unique within the corpus; always a string, leading zeros kept. Empty when the source
            names none (passages written out inside a training example).
        title: Title of the page it comes from; empty when there is none.
        text: The passage itself.
    """

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question to retrieve for.

    Attributes:
        id: Unique within the file; the 0-based row number as a string when the file has no ids.
        text: The question.
        answers: Accepted answers; empty when unknown.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A question with passages that do and do not answer it.

    Attributes:
        id: Stable identity of the example: it does not change when other examples are dropped,
            since every random choice is derived from it.
        question: The question's text.
        answers: Accepted answers; may be empty.
        positives: Passages that answer the question, best first.
        hard_negatives: Passages that look right and are not (DPR's ``hard_negative_ctxs``).
        random_negatives: Other passages that do not answer it (DPR's ``negative_ctxs``).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    positives: tuple[Passage, ...]
    hard_negatives: tuple[Passage, ...] = ()
    random_negatives: tuple[Passage, ...] = ()
