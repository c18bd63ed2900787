"""The types of a run and of a result file that also carries the texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gc_dpr.data.records import Passage, Question

Run = dict[str, list[tuple[str, float]]]
"""Question id → (passage id, score), best first."""


class RetrievedPassage(NamedTuple):
    """A passage in a result list.

    Attributes:
        passage: The passage, as far as the file tells.
        score: None when the file gives none.
        has_answer: None when the file does not say.
    """

    passage: Passage
    score: float | None
    has_answer: bool | None


@dataclass(frozen=True, slots=True)
class ResultEntry:
    """A question with its retrieved passages, best first."""

    question: Question
    passages: list[RetrievedPassage]
