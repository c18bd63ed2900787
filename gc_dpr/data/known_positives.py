"""Which passages of a batch are no negatives of a question, asked for block by block.

Letters: Q questions of this process, P passages of all processes, S known positives of these
questions that are in the batch; q and p the sizes of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KnownPositives:
    """The columns that answer a row's question though they are not its label.

    Such a column is another copy of the row's positive, or another of its positives that came
    with another question. Counting it as a negative would train against the truth. What is held
    grows with P and S, never with Q times P.

    Args:
        known_positive_keys: (sum of counts,) int64, keys of all positives, row by row.
        known_positive_counts: (Q,) int64, how many belong to each row.
        passage_keys: (P,) int64, keys of the columns.
        positive_columns: (Q,) int64, the label column of each row; never excluded.

    Raises:
        ValueError: The counts do not add up to the keys, or there is not one label per row.

    Example:
        Question 0 has the positives 7 and 8, question 1 the positive 8.

        >>> excluded = KnownPositives(
        ...     torch.tensor([7, 8, 8]), torch.tensor([2, 1]), torch.tensor([7, 8]),
        ...     torch.tensor([0, 1]),
        ... )
        >>> excluded(slice(0, 2), slice(0, 2)).tolist()
        [[False, True], [False, False]]
        >>> excluded(slice(0, 2), slice(1, 2)).tolist()
        [[True], [False]]
    """

    def __init__(
        self,
        known_positive_keys: Tensor,
        known_positive_counts: Tensor,
        passage_keys: Tensor,
        positive_columns: Tensor,
    ) -> None:
        rows, width = len(known_positive_counts), len(passage_keys)
        if int(known_positive_counts.sum()) != len(known_positive_keys):
            raise ValueError(
                f"known_positive_counts must add up to the {len(known_positive_keys)} keys, found "
                f"{int(known_positive_counts.sum())}"
            )
        if positive_columns.shape != known_positive_counts.shape:
            raise ValueError(
                f"positive_columns must have one column for each of the {rows} rows, found shape "
                f"{tuple(positive_columns.shape)}"
            )
        self._labels = positive_columns
        self._width = width
        # Columns of the same key stand together and in order, so that those of a block are a run:
        # they are numbered group * P + column.
        ordered, columns = torch.sort(passage_keys, stable=True)  # (P,)
        keys, groups = torch.unique_consecutive(ordered, return_inverse=True)
        self._places = groups * width + columns  # (P,) ascending
        present = torch.isin(known_positive_keys, keys)
        row_of_key = torch.arange(rows, device=keys.device).repeat_interleave(known_positive_counts)
        self._rows = row_of_key[present]  # (S,) ascending
        self._first_places = torch.searchsorted(keys, known_positive_keys[present]) * width  # (S,)
        counts = torch.bincount(self._rows, minlength=rows).tolist()
        self._starts = [0]  # (Q + 1,) where each row begins in the two above
        for count in counts:
            self._starts.append(self._starts[-1] + count)

    def __call__(self, rows: slice, columns: slice) -> Tensor:
        """Return a block, (q, p) bool: True where the column must not count as a negative."""
        top, bottom, _ = rows.indices(len(self._labels))
        left, right, _ = columns.indices(self._width)
        height, width = max(bottom - top, 0), max(right - left, 0)
        block = torch.zeros(height, width, dtype=torch.bool, device=self._places.device)
        mine = slice(self._starts[top], self._starts[top + height])
        low = torch.searchsorted(self._places, self._first_places[mine] + left)
        high = torch.searchsorted(self._places, self._first_places[mine] + left + width)
        matches = high - low  # columns of the block that hold each known positive
        row_of_match = (self._rows[mine] - top).repeat_interleave(matches)  # (M,)
        # Counts up from `low` within the run of every known positive.
        runs = (low - (matches.cumsum(0) - matches)).repeat_interleave(matches)  # (M,)
        places = self._places[runs + torch.arange(len(runs), device=runs.device)]  # (M,)
        block[row_of_match, places % self._width - left] = True

        labels = self._labels[top : top + height]
        own = ((labels >= left) & (labels < left + width)).nonzero().squeeze(1)
        block[own, labels[own] - left] = False
        return block
