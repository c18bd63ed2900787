"""Which passages of a batch contain one of a question's answers, and so are no negatives of it.

Letters: Q questions and P candidate passages of this process, N its distinct passages, A answers,
T words, M matches; q and p the sizes of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from gc_dpr.data.answer_words import MULTIPLIER, hash_answers, hash_passages
from gc_dpr.distributed import gather_integers, gather_rows, rank

PairFunction: TypeAlias = Callable[[slice, slice], Tensor]

_TABLE: Final = 2**16


class KnownAnswers:
    """The columns that contain an answer of a row's question though they are not its label.

    Such a passage may well answer the question. What is held grows with the matches, not with Q
    times the columns.

    Args:
        rows: (M,) int64, row of each match, in any order.
        columns: (M,) int64, its column.
        positive_columns: (Q,) int64, the label column of each row; never excluded.
        width: Number of columns.

    Attributes:
        count: How many pairs are excluded.

    Raises:
        ValueError: ``rows`` and ``columns`` differ in shape, or name a pair outside of the matrix.

    Example:
        >>> excluded = KnownAnswers(
        ...     torch.tensor([0, 0, 1]), torch.tensor([0, 2, 0]), torch.tensor([0, 1]), width=3
        ... )
        >>> excluded(slice(0, 2), slice(0, 3)).tolist(), excluded.count
        ([[False, False, True], [True, False, False]], 2)
    """

    def __init__(
        self, rows: Tensor, columns: Tensor, positive_columns: Tensor, *, width: int
    ) -> None:
        if rows.shape != columns.shape or rows.dim() != 1:
            raise ValueError(
                f"rows and columns must be two lists of the same length, found shapes "
                f"{tuple(rows.shape)} and {tuple(columns.shape)}"
            )
        self._height, self._width = len(positive_columns), width
        for name, numbers, end in (("rows", rows, self._height), ("columns", columns, width)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
                raise ValueError(
                    f"{name} must lie in 0..{end - 1}, found values from {int(numbers.min())} to "
                    f"{int(numbers.max())}"
                )
        matches = columns != positive_columns[rows]
        self._places = torch.unique(rows[matches] * width + columns[matches])  # ascending
        self.count = len(self._places)

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        """Return a block, (q, p) bool: True where the column must not count as a negative."""
        top, bottom, _ = rows.indices(self._height)
        left, right, _ = columns.indices(self._width)
        height, width = max(bottom - top, 0), max(right - left, 0)
        device = self._places.device
        block = torch.zeros(height, width, dtype=torch.bool, device=device)
        first = torch.arange(top, top + height, device=device) * self._width + left  # (q,)
        low = torch.searchsorted(self._places, first)
        matches = torch.searchsorted(self._places, first + width) - low  # (q,)
        row_of_match = torch.arange(height, device=device).repeat_interleave(matches)
        places = self._places[_runs(low, matches)]
        block[row_of_match, places % max(self._width, 1) - left] = True
        return block


def known_answers(
    answers: Tensor,
    words: Tensor,
    word_counts: Tensor,
    passage_rows: Tensor,
    positive_index: Tensor,
) -> KnownAnswers:
    """Which of all processes' passages contain an answer of this process's questions.

    Every process must call it. Answers are small and passages are not, so the answers go to all
    processes (32 bytes each), every process searches its own passages for them, and the matches
    come back (8 bytes each). The result does not depend on how the batch is shared out.

    Args:
        answers: (A, 4) int64, of this process's questions; see ``HashedAnswers.answers``.
        words: (T,) int64, of this process's distinct passages; see ``HashedWords.words``.
        word_counts: (N,) int64, see ``HashedWords.counts``.
        passage_rows: (P,) int64, which distinct passage each candidate is.
        positive_index: (Q,) int64, which of the P candidates is the label of each question.

    Returns:
        The excluded pairs of this process's Q rows and all processes' columns.

    Raises:
        ValueError: The words do not add up to the counts.
    """
    shares = gather_integers([len(positive_index), len(passage_rows)], answers.device)
    width = sum(columns for _, columns in shares)
    first_row = sum(rows for rows, _ in shares[: rank()])
    first_column = sum(columns for _, columns in shares[: rank()])

    # rows are numbered over all processes from here on
    everyones = gather_rows(answers + answers.new_tensor([first_row, 0, 0, 0]))
    rows, passages = find_answers(everyones, words, word_counts)  # (M,), (M,)
    by_passage = torch.argsort(passage_rows, stable=True)  # candidates, those of a passage together
    copies = torch.bincount(passage_rows, minlength=len(word_counts))  # (N,)
    candidates = by_passage[_runs((copies.cumsum(0) - copies)[passages], copies[passages])]
    found = rows.repeat_interleave(copies[passages]) * width + candidates + first_column

    places = gather_rows(found)
    mine = (places >= first_row * width) & (places < (first_row + len(positive_index)) * width)
    places = places[mine] - first_row * width
    return KnownAnswers(
        places // max(width, 1), places % max(width, 1), positive_index + first_column, width=width
    )


def contained_answers(
    answers: Sequence[Sequence[str]],
    passages: Sequence[tuple[str, str]],
    *,
    min_letters: int = 3,
) -> tuple[Tensor, Tensor]:
    """Find the answers of some questions in the texts of some passages, by DPR's string match.

    Args:
        answers: The accepted answers of each question.
        passages: (title, text) pairs; the title is not searched.
        min_letters: Shorter answers are ignored; see :func:`gc_dpr.data.answer_words.hash_answers`.

    Returns:
        Two (M,) int64 tensors, the question and the passage of each match: sorted, without
        repetition. Words are compared by 64-bit hashes; in a batch of a thousand questions and
        two thousand passages the chance of one match too many is about 1e-10.

    Example:
        >>> rows, passages = contained_answers(
        ...     [["New York"], ["Lisbon"]], [("", "In new york."), ("Lisbon", "The harbour.")]
        ... )
        >>> rows.tolist(), passages.tolist()
        ([0], [0])
    """
    hashed = hash_passages([text for _, text in passages])
    found = hash_answers(answers, min_letters=min_letters)
    return find_answers(found.answers, hashed.words, hashed.counts)


def find_answers(answers: Tensor, words: Tensor, word_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Find hashed answers in hashed passages; on any device.

    Args:
        answers: (A, 4) int64, see ``HashedAnswers.answers``; the rows may be any numbers from 0.
        words: (T,) int64, see ``HashedWords.words``.
        word_counts: (N,) int64, see ``HashedWords.counts``.

    Returns:
        Two (M,) int64 tensors, row and passage of each match: sorted, without repetition.

    Raises:
        ValueError: The words do not add up to the counts.
    """
    if int(word_counts.sum()) != len(words):
        raise ValueError(
            f"word_counts must add up to the {len(words)} words, found {int(word_counts.sum())}"
        )
    passages = len(word_counts)
    if not len(answers) or not len(words):
        return words.new_empty(0), words.new_empty(0)
    starts, reach = _starts(answers, words, word_counts)
    hashes = words[starts]  # of the `length` words from each start on
    passage_of = torch.arange(passages, device=words.device).repeat_interleave(word_counts)  # (T,)
    found = [words.new_empty(0)]
    lengths = torch.unique(answers[:, 1]).tolist()
    for length in range(1, lengths[-1] + 1):
        if length > 1:
            kept = reach >= length
            starts, reach = starts[kept], reach[kept]
            hashes = hashes[kept] * MULTIPLIER + words[starts + (length - 1)]
        if length in lengths:
            of_length = answers[answers[:, 1] == length]
            found.append(_pairs(of_length, hashes, passage_of[starts], passages))
        if not len(starts):
            break
    places = torch.unique(torch.cat(found))  # row * N + passage
    return places // passages, places % passages


def _starts(answers: Tensor, words: Tensor, word_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where an answer's first word stands, and how many words from there on are worth a look."""
    firsts, number = torch.unique(answers[:, 3], return_inverse=True)
    longest = torch.zeros_like(firsts).scatter_reduce_(0, number, answers[:, 1], "amax")
    # Most words begin no answer. A table of their last bits says so faster than a search.
    table = torch.zeros(_TABLE, dtype=torch.bool, device=words.device)
    table[firsts % _TABLE] = True
    starts = table[words % _TABLE].nonzero().squeeze(1)
    nearest = torch.searchsorted(firsts, words[starts]).clamp_(max=len(firsts) - 1)
    hit = firsts[nearest] == words[starts]
    starts, nearest = starts[hit], nearest[hit]
    ends = word_counts.cumsum(0)
    words_left = ends[torch.searchsorted(ends, starts, right=True)] - starts
    return starts, torch.minimum(longest[nearest], words_left)


def _pairs(answers: Tensor, hashes: Tensor, passage_of: Tensor, passages: int) -> Tensor:
    """Row * N + passage wherever a hash is that of an answer; answers are all of one length."""
    by_hash = torch.argsort(answers[:, 2])
    rows = answers[by_hash, 0]
    wanted, copies = torch.unique_consecutive(answers[by_hash, 2], return_counts=True)
    nearest = torch.searchsorted(wanted, hashes).clamp_(max=len(wanted) - 1)
    hit = wanted[nearest] == hashes
    # An answer of many questions that a passage repeats: first once per passage, then per question.
    met = torch.unique(nearest[hit] * passages + passage_of[hit])
    answer, passage = met // passages, met % passages
    asking = rows[_runs((copies.cumsum(0) - copies)[answer], copies[answer])]
    places: Tensor = asking * passages + passage.repeat_interleave(copies[answer])
    return places


def _runs(first: Tensor, counts: Tensor) -> Tensor:
    """Count up from every ``first``: first[0], first[0] + 1, ... ``counts[0]`` of them, and on."""
    offsets = (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return offsets + torch.arange(len(offsets), device=offsets.device)


def either(*functions: PairFunction | None) -> PairFunction | None:
    """Join functions that give blocks of excluded pairs: a pair is excluded if any says so.

    Args:
        functions: Such as ``KnownPositives`` and ``KnownAnswers``; None stands for "nothing".

    Returns:
        A function of (rows, columns) as the losses take it; None if there is none to join.

    Example:
        >>> nothing = lambda rows, columns: torch.zeros(2, 2, dtype=torch.bool)
        >>> either(nothing, None) is nothing, either(None)
        (True, None)
    """
    present = [function for function in functions if function is not None]
    if len(present) < 2:
        return present[0] if present else None
    return functools.partial(_either_block, tuple(present))


def _either_block(functions: Sequence[PairFunction], rows: slice, columns: slice) -> Tensor:
    block = functions[0](rows, columns)
    for function in functions[1:]:
        block = torch.logical_or(block, function(rows, columns))
    return block
