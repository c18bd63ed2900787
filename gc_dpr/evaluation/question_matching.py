"""Match the answers of many questions against their passages, in this process or in several.

Only the retrieved texts travel to a worker process, never the corpus, and each passage is made
ready once per process although it may be retrieved for many questions.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from gc_dpr.evaluation.answer_matching import AnswerMatcher, prepare_passage

logger = logging.getLogger(__name__)

_CACHED_PASSAGES = 65_536  # prepared passages kept by one process: about 50 MB of 100-word texts
_BLOCKS_PER_WORKER = 4  # small enough that no worker waits long for the last block
_PATTERNS_LOGGED = 20

Texts = Sequence[Sequence[str | None]]


@dataclass
class Block:
    """Questions that one process matches; holds nothing but what it needs, to travel light."""

    first: int  # position of its first question
    answers: list[tuple[str, ...]]
    texts: Texts
    titles: Texts | None
    match: str
    empty_answers: str

    def split(self, size: int) -> list[Block]:
        """Blocks of at most ``size`` questions, in order."""
        return [
            Block(
                self.first + start,
                self.answers[start : start + size],
                self.texts[start : start + size],
                None if self.titles is None else self.titles[start : start + size],
                self.match,
                self.empty_answers,
            )
            for start in range(0, len(self.answers), size)
        ]


@dataclass
class Report:
    """What matching a block found; reports of blocks add up."""

    flags: list[list[bool]] = field(default_factory=list)
    without_usable_answer: int = 0
    with_empty_answer: int = 0
    invalid: dict[str, tuple[str, int]] = field(default_factory=dict)  # fault, first question
    invalid_uses: Counter[str] = field(default_factory=Counter)
    timeouts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Append the report of the block that follows."""
        self.flags += other.flags
        self.without_usable_answer += other.without_usable_answer
        self.with_empty_answer += other.with_empty_answer
        self.invalid = other.invalid | self.invalid
        self.invalid_uses += other.invalid_uses
        self.timeouts += other.timeouts


def match_questions(whole: Block, *, workers: int, progress: bool) -> Report:
    """Match a block, split over ``workers`` processes unless that is 0.

    Raises:
        RuntimeError: A worker process died. What a worker raises arrives here as it is.
    """
    if workers == 0:
        return _match_block(whole, progress=progress)
    blocks = whole.split(max(1, -(-len(whole.answers) // (workers * _BLOCKS_PER_WORKER))))
    total = Report()
    # A forked child could inherit locks held by this process's other threads; a spawned one cannot.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(workers, len(blocks)), mp_context=context) as pool:
            for report in _bar(pool.map(_match_block, blocks), len(blocks), progress=progress):
                total.add(report)
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker process died while matching answers (workers={workers}); out of memory, or "
            'a script without `if __name__ == "__main__":`? workers=0 works without processes'
        ) from error
    return total


def _match_block(block: Block, *, progress: bool = False) -> Report:
    prepare = functools.lru_cache(maxsize=_CACHED_PASSAGES)(
        functools.partial(prepare_passage, match=block.match)
    )
    report = Report()
    for row, answers in enumerate(_bar(block.answers, len(block.answers), progress=progress)):
        matcher = AnswerMatcher(answers, match=block.match, empty_answers=block.empty_answers)
        texts: Iterable[str | None] = block.texts[row]
        if block.titles is not None:
            pairs = zip(block.titles[row], block.texts[row], strict=True)
            texts = (None if text is None else f"{title or ''} . {text}" for title, text in pairs)
        report.flags.append(
            [text is not None and matcher.matches_prepared(prepare(text)) for text in texts]
        )
        report.without_usable_answer += matcher.usable == 0
        report.with_empty_answer += matcher.empty > 0
        for pattern, fault in matcher.invalid_patterns.items():
            report.invalid.setdefault(pattern, (fault, block.first + row))
            report.invalid_uses[pattern] += 1
        report.timeouts += matcher.timeouts
    return report


def _bar(items: Iterable[Any], total: int, *, progress: bool) -> Iterable[Any]:
    # disable=None: only where the error stream is a terminal
    bar: Iterable[Any] = tqdm(
        items, total=total, desc="matching answers", disable=None if progress else True
    )
    return bar


def log_report(report: Report, *, empty_answers: str) -> None:
    """Warn, once each, about what makes the numbers mean something else than they seem to."""
    if report.without_usable_answer:
        logger.warning(
            "%d of %d questions have no usable answer; they stay in the denominator",
            *(report.without_usable_answer, len(report.flags)),
        )
    if report.with_empty_answer:
        effect = "matches every passage, as in DPR" if empty_answers == "match" else "is ignored"
        logger.warning(
            "%d questions have an empty answer, which %s", report.with_empty_answer, effect
        )
    for pattern, (fault, question) in list(report.invalid.items())[:_PATTERNS_LOGGED]:
        logger.warning(
            "answer %r is no valid regular expression (%s): a miss for %d question(s), first for "
            "question %d (counted from 0)",
            *(pattern, fault, report.invalid_uses[pattern], question),
        )
    if len(report.invalid) > _PATTERNS_LOGGED:
        logger.warning("%d more invalid patterns", len(report.invalid) - _PATTERNS_LOGGED)
    for pattern, count in report.timeouts.most_common(_PATTERNS_LOGGED):
        logger.warning(
            "answer pattern %r took too long on %d passage(s), which count as misses; simplify it",
            *(pattern, count),
        )
