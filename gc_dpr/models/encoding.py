"""Token ids to embeddings, without gradients: the one way that all of the toolkit encodes.

Letters: N rows, L tokens, D dims, C chunk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gc_dpr.models.encoder import TextEncoder
from gc_dpr.models.tokenization import TokenizedTexts
from gc_dpr.precision import autocast
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks

logger = logging.getLogger(__name__)

DEFAULT_BATCH_TOKENS = 16384


def encode_tokens(
    encoder: TextEncoder,
    tokens: RaggedTokens,
    *,
    batch_tokens: int = DEFAULT_BATCH_TOKENS,
    progress: bool = False,
    precision: str = "fp32",
) -> Tensor:
    """Encode texts in evaluation mode; each embedding depends on its own text only.

    Rows are sorted by length and cut into chunks of at most ``batch_tokens`` padded tokens. How
    they are cut changes an embedding by rounding only (about 1e-6 in float32).

    Args:
        encoder: Stays on its device; its training mode is put back at the end.
        tokens: N texts.
        batch_tokens: Padded tokens in memory at once; a longer text gets a chunk of its own.
        progress: Show a bar on standard error.
        precision: ``"fp32"`` computes in the weights' own precision, ``"bf16"`` and ``"fp16"`` run
            the transformer under autocast.

    Returns:
        (N, D) float32 in main memory, in the order of ``tokens``.
    """
    chunks = length_sorted_chunks(tokens.lengths, max_tokens=batch_tokens)
    embeddings = torch.empty(len(tokens), encoder.embedding_dim)  # (N, D)
    device = encoder.device
    bar = tqdm(total=len(tokens), unit=" texts", desc="encoding", disable=not progress)
    casting = autocast(device, precision)
    with bar, _evaluation_mode(encoder), torch.inference_mode(), casting:
        for rows in chunks:
            chunk = tokens.pad(rows, pad_token_id=encoder.pad_token_id, device=device)  # (C, L)
            embeddings[rows] = encoder(**chunk).float().cpu()  # (C, D)
            bar.update(len(rows))
    return embeddings


@contextlib.contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule is as it was."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training


def report_truncated(tokenized: TokenizedTexts, *, what: str, max_length: int) -> None:
    """Log how many of the texts, called ``what``, were cut to ``max_length`` tokens."""
    if tokenized.truncated:
        count, total = tokenized.truncated, len(tokenized.tokens)
        logger.warning("%d of %d %s were cut to %d tokens", count, total, what, max_length)
