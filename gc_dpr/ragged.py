"""Texts of different lengths as token ids without padding, and how they are cut into chunks.

Texts are sorted by length and cut by a budget of padded tokens, so that a chunk is padded only to
its own longest text. Training, embedding and the collator all hold their texts like this.

Letters: N rows, L tokens, C chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTokens:
    """Texts as token ids without padding: one flat tensor of ids and the length of each text.

    Args:
        ids: (sum of lengths,) int64; the ids of all texts, one after the other.
        lengths: (N,) int64; the number of tokens of each text.

    Raises:
        ValueError: Shapes, dtypes or the sum of the lengths do not fit.

    Example:
        >>> tokens = RaggedTokens.from_lists([[101, 7, 102], [101, 102]])
        >>> tokens.pad(torch.tensor([1, 0]), pad_token_id=0)["input_ids"].tolist()
        [[101, 102, 0], [101, 7, 102]]
    """

    ids: Tensor
    lengths: Tensor
    _starts: Tensor = field(init=False, repr=False)  # (N,) where each text begins in ids

    def __post_init__(self) -> None:
        for name, value in (("ids", self.ids), ("lengths", self.lengths)):
            if value.dim() != 1 or value.dtype != torch.int64:
                raise ValueError(
                    f"{name} must be a 1-D int64 tensor, "
                    f"found shape {tuple(value.shape)} and {value.dtype}"
                )
        total = int(self.lengths.sum())
        if total != len(self.ids) or (len(self.lengths) and int(self.lengths.min()) < 0):
            raise ValueError(
                f"lengths must be >= 0 and sum to the number of ids: "
                f"they sum to {total}, there are {len(self.ids)} ids"
            )
        object.__setattr__(self, "_starts", self.lengths.cumsum(0) - self.lengths)

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> RaggedTokens:
        """Make it from one sequence of token ids per text."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: Tensor) -> RaggedTokens:
        """Return the given rows, in the given order, as ragged tokens of their own.

        Args:
            rows: (C,) int64 row numbers; a row may occur several times.
        """
        lengths = self.lengths[rows]  # (C,)
        total = int(lengths.sum())
        # Each output position = the start of its text + how far it lies inside the text.
        shift = self._starts[rows] - (lengths.cumsum(0) - lengths)  # (C,)
        positions = torch.arange(total) + shift.repeat_interleave(lengths)  # (sum of lengths,)
        return RaggedTokens(self.ids[positions], lengths)

    def pad(
        self,
        rows: Tensor,
        *,
        pad_token_id: int,
        side: Literal["right", "left"] = "right",
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        """Return the given rows as a padded chunk, no wider than its longest text.

        The mask comes from the lengths: a text may hold the pad token itself and keep it visible.

        Args:
            rows: (C,) int64 row numbers.
            pad_token_id: What fills the rows that are shorter than the longest.
            side: Where the padding goes.
            device: Where the chunk goes; the default leaves it where the ids are.

        Returns:
            ``{"input_ids": (C, L) int64, "attention_mask": (C, L) int64}``.
        """
        if side not in ("right", "left"):
            raise ValueError(f"side must be 'right' or 'left', found {side!r}")
        lengths = self.lengths[rows].unsqueeze(1)  # (C, 1)
        longest = int(lengths.max()) if len(rows) else 0
        columns = torch.arange(longest, device=lengths.device).unsqueeze(0)  # (1, L)
        if side == "left":
            columns = columns - (longest - lengths)  # (C, L); negative = padding
        mask = (columns >= 0) & (columns < lengths)  # (C, L)
        positions = (self._starts[rows].unsqueeze(1) + columns)[mask]  # (sum of lengths,)
        input_ids = self.ids.new_full(mask.shape, pad_token_id)
        input_ids[mask] = self.ids[positions]
        chunk = {"input_ids": input_ids, "attention_mask": mask.to(torch.int64)}
        return {name: _to_device(value, device) for name, value in chunk.items()}


def _to_device(value: Tensor, device: torch.device | str | None) -> Tensor:
    """Move to the device; pinned and asynchronous for cuda, so that the copy hides behind work."""
    if device is None or torch.device(device) == value.device:
        return value
    if torch.device(device).type == "cuda":
        return value.pin_memory().to(device, non_blocking=True)
    return value.to(device)


def length_sorted_chunks(
    lengths: Tensor, *, max_tokens: int, max_rows: int | None = None
) -> list[Tensor]:
    """Cut the rows of a batch into chunks of similar length within a budget of padded tokens.

    A chunk of C rows padded to L tokens costs C * L. Longest first, so that a budget that is too
    large for the memory shows in the first chunk of the first step. A text longer than the budget
    is not cut: it gets a chunk of its own.

    Args:
        lengths: (N,) tokens of each row.
        max_tokens: Budget C * L of one chunk, in tokens.
        max_rows: Cap on C; the default sets none.

    Returns:
        Row numbers, (C,) int64 per chunk; every row exactly once. No chunk for no rows.

    Raises:
        ValueError: A budget below 1.

    Example:
        >>> [rows.tolist() for rows in length_sorted_chunks(torch.tensor([2, 9, 3]), max_tokens=6)]
        [[1], [2, 0]]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, found {max_tokens}")
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1 or None, found {max_rows}")
    longest_first = torch.sort(lengths, descending=True, stable=True)
    order, sorted_lengths = longest_first.indices.cpu(), longest_first.values.tolist()
    chunks, start = [], 0
    while start < len(sorted_lengths):
        size = max(1, max_tokens // max(1, sorted_lengths[start]))
        size = size if max_rows is None else min(size, max_rows)
        chunks.append(order[start : start + size])
        start += size
    return chunks


def padded_tokens(rows: Tensor, lengths: Tensor) -> int:
    """Tokens of one chunk, padding included.

    Args:
        rows: (C,) its row numbers.
        lengths: (N,) tokens of each row.
    """
    return len(rows) * int(lengths[rows].max()) if len(rows) else 0
