"""The same step with sentence-transformers' cached loss, an optional peer.

CachedMultipleNegativesRankingLoss (Source: sentence-transformers 6.2.0) embeds each column of the
batch in mini-batches, twice. What can be set:

    mini_batch_size        texts of a mini-batch, 32 by default; also the rows of a block of scores
    mini_batch_num_tokens  instead of it, the tokens without padding of a mini-batch

Texts stay in the order of the batch; a mini-batch is trimmed to its longest text. Packing without
any padding needs flash attention on a GPU in half precision. It encodes every candidate, keeps no
graph and knows no mask of known positives.

Letters: N rows, L tokens, Q questions, P passages.
"""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

import torch
from step_variants import Step, Workload
from torch import Tensor

from gc_dpr.errors import ConfigError
from gc_dpr.models import TextEncoder
from gc_dpr.models.pretrained import quiet_transformers
from gc_dpr.ragged import RaggedTokens

PEER = "sentence_transformers"


class PeerSetting(NamedTuple):
    """Mini-batches by number of texts, or by tokens where ``tokens`` is given."""

    rows: int = 32
    tokens: int | None = None

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"mini_batch_num_tokens={self.tokens}"
        return f"mini_batch_size={self.rows}"


def reason_against_peer() -> str | None:
    """Why the peer cannot be measured; None if it can."""
    try:
        import sentence_transformers.sentence_transformer.losses  # noqa: F401
    except ImportError as error:
        return str(error)
    return None


def by_peer(work: Workload, setting: PeerSetting) -> Step:
    """Its loss on the columns question, positive, negative, and the backward of it.

    The features are made beforehand, as its collator would: every column padded to its longest.

    Raises:
        ConfigError: Two encoders, or a question without exactly one hard negative.
    """
    if not work.model.shared:
        raise ConfigError(f"{PEER} has one encoder for all columns, the model has two")
    return _step(_same_encoder(work.model.question_encoder, work.device), work, setting)


def fastest_setting(work: Workload, settings: list[PeerSetting]) -> tuple[PeerSetting, list[float]]:
    """Do one step with each setting, after one to warm up; return the fastest, and all seconds."""
    if len(settings) == 1:
        return settings[0], []
    peer = _same_encoder(work.model.question_encoder, work.device)
    _step(peer, work, settings[0])()
    seconds = [work.timed(_step(peer, work, setting)) for setting in settings]
    return settings[seconds.index(min(seconds))], seconds


def _step(peer: Any, work: Workload, setting: PeerSetting) -> Step:
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
    )
    from sentence_transformers.util import dot_score

    loss = CachedMultipleNegativesRankingLoss(
        peer,
        scale=1 / work.temperature,
        similarity_fct=dot_score,  # of representations that are of length 1 already
        mini_batch_size=setting.rows,
        mini_batch_num_tokens=setting.tokens,
    )
    features, labels = _columns(work), torch.empty(0, device=work.device)

    def step() -> Tensor:
        value: Tensor = loss([dict(column) for column in features], labels)
        torch.autograd.backward(value)
        return value.detach()

    return step


def _same_encoder(encoder: TextEncoder, device: torch.device) -> Any:
    """A SentenceTransformer around the very transformer of ours: same weights, same gradients."""
    from sentence_transformers import SentenceTransformer

    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)  # pooling and normalisation as ours, read from modules.json
        with quiet_transformers():
            peer = SentenceTransformer(folder, device=str(device))
    kind = type(encoder.transformer)
    (name,) = (name for name, child in peer[0].named_children() if isinstance(child, kind))
    setattr(peer[0], name, encoder.transformer)
    return peer.train()


def _columns(work: Workload) -> list[dict[str, Tensor]]:
    """Features of the three columns, (Q, L) each with its own L."""
    batch = work.batch
    is_negative = torch.ones(len(batch.passage_rows), dtype=torch.bool)
    is_negative[batch.positive_index] = False
    if int(is_negative.sum()) != len(batch.positive_index):
        raise ConfigError(
            f"{PEER} needs exactly one hard negative per question; the batch has "
            f"{int(is_negative.sum())} for {len(batch.positive_index)} questions"
        )
    pad = work.model.question_encoder.pad_token_id

    def column(texts: RaggedTokens, rows: Tensor) -> dict[str, Tensor]:
        return texts.pad(rows, pad_token_id=pad, device=work.device)

    return [
        column(batch.questions, batch.question_rows),
        column(batch.passages, batch.passage_rows[batch.positive_index]),
        column(batch.passages, batch.passage_rows[is_negative]),
    ]
