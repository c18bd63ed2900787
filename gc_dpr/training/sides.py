"""One side of a batch as a tower of the gradient cache.

Letters: N rows, L tokens, D dims, C chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gc_dpr.distributed import is_fully_sharded, largest_over_processes, world_size
from gc_dpr.grad_cache.towers import Tower
from gc_dpr.models import TextEncoder
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks
from gc_dpr.training.chunk_budget import ChunkBudget


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The distinct texts of one side of this process's share of a batch, and their encoder.

    Attributes:
        name: ``"question"`` or ``"passage"``.
        encoder: Encodes them, on ``device``.
        tokens: N texts.
        device: Where they are encoded.
    """

    name: str
    encoder: TextEncoder
    tokens: RaggedTokens
    device: torch.device

    def chunks(self, budget: ChunkBudget) -> list[Tensor]:
        """Row numbers (C,) of each chunk, longest texts first."""
        return length_sorted_chunks(
            self.tokens.lengths, max_tokens=budget.tokens, max_rows=budget.rows
        )

    def tower(self, chunks: list[Tensor], kept: int) -> Tower:
        """Make the tower for chunks of this side; ``kept`` of them keep their graph."""
        weights = next(self.encoder.parameters()).dtype
        return Tower(
            encode=lambda inputs: self.encoder(**inputs),
            chunks=chunks,
            pad=self._pad,
            num_rows=len(self.tokens),
            embedding_dim=self.encoder.embedding_dim,
            devices=[self.device],
            trainable=any(parameter.requires_grad for parameter in self.encoder.parameters()),
            kept_graphs=kept,
            dtype=torch.float64 if weights == torch.float64 else torch.float32,
            module=self.encoder if is_fully_sharded(self.encoder) else None,
        )

    def _pad(self, rows: Tensor) -> dict[str, Tensor]:
        pad_token_id = self.encoder.pad_token_id
        if not len(rows):  # an empty chunk still has to go through a sharded encoder
            ids = torch.full((1, 1), pad_token_id, device=self.device)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.tokens.pad(rows, pad_token_id=pad_token_id, device=self.device)


def is_sharded(sides: list[Side]) -> bool:
    """Whether ``fully_shard`` was applied to the encoders; their gradients are then averaged.

    Raises:
        ValueError: To one of them only.
    """
    sharded = [is_fully_sharded(side.encoder) for side in sides]
    if any(sharded) and not all(sharded):
        raise ValueError(
            "fully_shard was applied to one encoder only: gradients of one tower would be averaged "
            "over processes and those of the other added up; shard both or none"
        )
    return all(sharded)


def with_equal_counts(chunks: list[list[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Add empty chunks, so that each side has as many chunks on every process.

    The forward of a sharded encoder is a collective: a process with fewer chunks would leave the
    others waiting.
    """
    if world_size() == 1:
        return chunks
    most = largest_over_processes([len(side) for side in chunks], device)
    empty = torch.empty(0, dtype=torch.int64)
    return [side + [empty] * (count - len(side)) for side, count in zip(chunks, most, strict=True)]
