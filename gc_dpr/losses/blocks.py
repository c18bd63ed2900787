"""A (Q, P) matrix of pairs in blocks on both axes, and the pairs of it that do not count.

Letters: Q questions, P passages; q and p those of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

ExcludedPairs: TypeAlias = Tensor | Callable[[slice, slice], Tensor]

# On a CPU, small blocks are as fast as any and stay near the cache: 8 MiB in float32. Elsewhere
# each of the twenty or so operations of a block costs a launch, so they are larger: 64 MiB.
CPU_BLOCK: Final = (1024, 2048)
ACCELERATOR_BLOCK: Final = (2048, 8192)


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the pairs are cut, and which of them are excluded.

    Args:
        questions: Q.
        passages: P.
        question_block: Most questions of a block.
        passage_block: Most passages of a block.
        excluded: A (Q, P) bool tensor, or a function that gives the block of two slices.

    Raises:
        ValueError: A block size below 1, or a tensor that is not bool or of another shape.
    """

    questions: int
    passages: int
    question_block: int
    passage_block: int
    excluded: ExcludedPairs | None

    @classmethod
    def cut(
        cls,
        questions: Tensor,
        passages: Tensor,
        *,
        question_block: int | None,
        passage_block: int | None,
        excluded: ExcludedPairs | None,
    ) -> Blocks:
        """Cut (Q, D) against (P, D); ``None`` is the default for their device."""
        default = CPU_BLOCK if questions.device.type == "cpu" else ACCELERATOR_BLOCK
        return cls(
            questions=len(questions),
            passages=len(passages),
            question_block=default[0] if question_block is None else question_block,
            passage_block=default[1] if passage_block is None else passage_block,
            excluded=excluded,
        )

    def __post_init__(self) -> None:
        for name in ("question_block", "passage_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if isinstance(self.excluded, Tensor):
            _check_excluded(self.excluded, (self.questions, self.passages))

    @property
    def single(self) -> bool:
        """Whether there is no more than one block."""
        return self.questions <= self.question_block and self.passages <= self.passage_block

    def rows(self) -> Iterator[slice]:
        """Yield the blocks of questions."""
        return _slices(self.questions, self.question_block)

    def columns(self) -> Iterator[slice]:
        """Yield the blocks of passages."""
        return _slices(self.passages, self.passage_block)

    def new_buffer(self, like: Tensor) -> Tensor:
        """Memory for the scores of any block, so that it is asked for once a pass."""
        rows = min(self.questions, self.question_block)
        return like.new_empty(rows * min(self.passages, self.passage_block))

    def excluded_block(self, rows: slice, columns: slice, device: torch.device) -> Tensor | None:
        """Return which pairs of a block are excluded, (q, p) bool.

        Raises:
            TypeError: The function returns something that is not a tensor.
            ValueError: It returns a tensor that is not bool or of another shape.
        """
        if self.excluded is None:
            return None
        if isinstance(self.excluded, Tensor):
            return self.excluded[rows, columns].to(device)
        block = self.excluded(rows, columns)
        _check_excluded(block, (rows.stop - rows.start, columns.stop - columns.start))
        return block.to(device)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _check_excluded(excluded: Any, shape: tuple[int, int]) -> None:
    if not isinstance(excluded, Tensor):
        raise TypeError(f"excluded must return a tensor, found {type(excluded).__name__}")
    if excluded.dtype != torch.bool or excluded.shape != shape:
        raise ValueError(
            f"excluded must be bool of shape {shape}, questions of this process by passages of "
            f"all (of a function: the block it is asked for); found {excluded.dtype} of shape "
            f"{tuple(excluded.shape)}"
        )
