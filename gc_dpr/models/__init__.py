"""Text encoders: one transformer with pooling, and the bi-encoder that is made of them."""

from gc_dpr.models.biencoder import BiEncoder
from gc_dpr.models.encoder import TextEncoder
from gc_dpr.models.encoding import encode_tokens
from gc_dpr.models.pooling import POOLING_MODES, pool
from gc_dpr.models.tokenization import (
    TITLE_FORMATS,
    PassageTokenizer,
    QuestionTokenizer,
    TokenizedTexts,
)

__all__ = [
    "POOLING_MODES",
    "TITLE_FORMATS",
    "BiEncoder",
    "PassageTokenizer",
    "QuestionTokenizer",
    "TextEncoder",
    "TokenizedTexts",
    "encode_tokens",
    "pool",
]
