"""The two passes of the gradient cache over both towers, in the memory there is.

A chunk that does not fit is no reason to stop: fewer graphs are kept, then half of the tower's
budget is used. The first pass has no effect on other processes and is begun again. The second pass
comes after the collectives of the loss, so the processes agree whether all got through it; if not,
all of them do the step again.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gc_dpr.distributed import largest_over_processes, world_size
from gc_dpr.grad_cache.towers import (
    EncodedTower,
    Tower,
    backward_chunk,
    backward_order,
    encode_tower,
    graphs_to_keep,
)
from gc_dpr.ragged import padded_tokens
from gc_dpr.seeding import restore_rng_state, rng_state
from gc_dpr.training.chunk_budget import (
    ChunkBudget,
    chunks_within,
    free_cached_memory,
    halved,
    is_out_of_memory,
)
from gc_dpr.training.sides import Side, is_sharded, with_equal_counts

logger = logging.getLogger(__name__)

Autocast = Callable[[], AbstractContextManager[Any]]


class TwoPasses:
    """Both passes over the towers, with budgets that shrink when the memory is short.

    Args:
        sides: Question and passage side.
        budgets: Their chunk budgets.
        kept_tokens: Chunks of so many padded tokens together keep their graph, besides those that
            the budgets keep.
        autocast_dtype: Of the encoders; ``None`` = none.

    Attributes:
        budgets: What fitted so far.
        kept_tokens: The same.
        sharded: ``fully_shard`` was applied to the encoders.
    """

    def __init__(
        self,
        sides: list[Side],
        budgets: list[ChunkBudget],
        kept_tokens: int,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self.sides = sides
        self.budgets = budgets
        self.sharded = is_sharded(sides)
        # how much fits differs between processes, but sharded encoders must all do the same
        self.kept_tokens = 0 if self.sharded else kept_tokens
        self.device = sides[0].device
        self._keeps_free_ones = True
        self._autocast = _autocast_factory(self.device, autocast_dtype)

    def encode(self) -> list[EncodedTower]:
        """First pass; begun again with less wherever it did not fit."""
        random = rng_state()
        while True:
            chunks = self._cut()
            towers = self._towers(chunks)
            keep = self._graphs_to_keep(towers)
            encoded: list[EncodedTower] = []
            try:
                for tower, kept in zip(towers, keep, strict=True):
                    encoded.append(encode_tower(tower, self._autocast, kept_graphs=kept))
                return encoded
            except RuntimeError as error:
                self._check_is_recoverable(error)
            failed = len(encoded)
            del encoded  # graphs that were kept so far
            self.shrink(failed)
            restore_rng_state(random)

    def backward(self, encoded: list[EncodedTower], gradients: list[Tensor]) -> bool:
        """Second pass; False if any process ran out of memory, so that all start again."""
        failed: int | None = None
        for step in backward_order(encoded):
            tower, gradient = encoded[step.tower], gradients[step.tower]
            try:
                backward_chunk(tower, step, gradient, self._autocast)
                continue
            except RuntimeError as error:
                self._check_is_recoverable(error)
            failed = step.tower
            break
        if world_size() == 1 or self.sharded:
            someone_failed = failed is not None
        else:
            someone_failed = bool(largest_over_processes([failed is not None], self.device)[0])
        if failed is not None:
            self.shrink(failed)
        return not someone_failed

    def _cut(self) -> list[list[Tensor]]:
        pairs = zip(self.sides, self.budgets, strict=True)
        chunks = [side.chunks(budget) for side, budget in pairs]
        return with_equal_counts(chunks, self.device) if self.sharded else chunks

    def _graphs_to_keep(self, towers: list[Tower]) -> list[int]:
        if self._keeps_free_ones:
            return graphs_to_keep(towers)
        return [tower.kept_graphs for tower in towers]

    def _towers(self, chunks: list[list[Tensor]]) -> list[Tower]:
        """Towers; what may be kept goes to the passages first, which are encoded last."""
        left, towers = self.kept_tokens, []
        for side, rows, budget in reversed([*zip(self.sides, chunks, self.budgets, strict=True)]):
            count, used = chunks_within(rows, side.tokens.lengths, left)
            left -= used
            towers.append(side.tower(rows, max(count, budget.kept)))
        return towers[::-1]

    @property
    def keeps_graphs(self) -> bool:
        """Whether less could be kept."""
        return self.kept_tokens > 0 or any(budget.kept for budget in self.budgets)

    def keep_less(self) -> None:
        """Halve what is kept, on both sides: kept graphs are a convenience, chunks are not."""
        pairs = zip(self.sides, self.budgets, strict=True)
        chunks = [side.chunks(budget) for side, budget in pairs]
        sizes = [
            padded_tokens(rows, side.tokens.lengths)
            for side, cut in zip(self.sides, chunks, strict=True)
            for rows in cut
        ]
        # half of what was really kept, else nothing would change for a few rounds
        self.kept_tokens = min(self.kept_tokens, sum(sizes)) // 2
        if self.kept_tokens < min(sizes, default=0):
            self.kept_tokens = 0
        self.budgets = [
            replace(budget, kept=min(budget.kept, len(cut)) // 2)
            for budget, cut in zip(self.budgets, chunks, strict=True)
        ]
        logger.warning(
            "out of memory: fewer chunks keep their graph from now on (%s), and the step is done "
            "again; its result does not depend on that (hardware.kept_chunks sets it)",
            f"up to {self.kept_tokens} tokens" if self.kept_tokens
            else " and ".join(f"{budget.kept} of {side.name}s" for side, budget
                              in zip(self.sides, self.budgets, strict=True)),
        )  # fmt: skip

    def shrink(self, side: int) -> None:
        """Take less memory: keep fewer graphs, then make the side's chunks smaller.

        Raises:
            TextDoesNotFitError: There is nothing left to save.
        """
        free_cached_memory(self.device)
        chunks = self.sides[side].chunks(self.budgets[side])
        single = all(len(rows) <= 1 for rows in chunks)
        if self.keeps_graphs:
            self.keep_less()
        elif single and self._keeps_free_ones:
            self._keeps_free_ones = False  # of towers that are a single chunk
        else:
            lengths = self.sides[side].tokens.lengths
            self.budgets[side] = halved(self.budgets[side], chunks, lengths, self.sides[side].name)

    def _check_is_recoverable(self, error: RuntimeError) -> None:
        """Raise what is no lack of memory, or what other processes could not follow."""
        if not is_out_of_memory(error) or (self.sharded and world_size() > 1):
            raise error


def _autocast_factory(device: torch.device, dtype: torch.dtype | None) -> Autocast:
    if dtype is None:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=dtype)
