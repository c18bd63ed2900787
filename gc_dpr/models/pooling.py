"""From one vector per token to one per text.

Letters: N rows, L tokens, D dims.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

POOLING_MODES: Final = ("first_token", "mean")


def pool(hidden: Tensor, attention_mask: Tensor, mode: str) -> Tensor:
    """Reduce the last layer's token vectors to one vector per text.

    ``first_token`` takes the first token that is not padding: position 0 of right-padded rows
    (BERT's ``[CLS]``, what DPR uses), and the first real token, not a pad, of left-padded rows. It
    is the hidden state itself, never BERT's pooler output. ``mean`` averages the visible tokens,
    special tokens included (as sentence-transformers does), and adds up in float32 at least.

    Args:
        hidden: (N, L, D) hidden states of the last layer.
        attention_mask: (N, L); 1 = a token of the text, 0 = padding.
        mode: ``"first_token"`` or ``"mean"``.

    Returns:
        (N, D), float32; float64 stays float64. A row without any visible token gives zeros under
        ``mean`` and its first vector under ``first_token``.

    Raises:
        ValueError: Unknown mode.

    Example:
        >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
        >>> pool(hidden, torch.tensor([[1, 1, 0]]), "mean").item()
        2.0
        >>> pool(hidden, torch.tensor([[0, 1, 1]]), "first_token").item()
        3.0
    """
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if mode == "first_token":
        first = attention_mask.ne(0).int().argmax(dim=1)  # (N,)
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, first].to(accumulate)  # (N, D)
    if mode == "mean":
        mask = attention_mask.ne(0).unsqueeze(-1)  # (N, L, 1)
        total = (hidden * mask).sum(dim=1, dtype=accumulate)  # (N, D)
        return total / mask.sum(dim=1).clamp(min=1)
    raise ValueError(f"pooling must be one of {', '.join(POOLING_MODES)}; found {mode!r}")
