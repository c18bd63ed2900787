"""Two text encoders, one per side, or one for both. No loss and no process group in here.

On disk a bi-encoder is a folder::

    biencoder_config.json     what is not in the encoders: see BiEncoder.save_pretrained
    question_encoder/         a sentence-transformers model and a Hugging Face model at once
    passage_encoder/          the same; absent when the two sides share one encoder
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from gc_dpr.errors import ConfigError
from gc_dpr.models.checkpoint_folder import (
    PASSAGE_FOLDER,
    QUESTION_FOLDER,
    find_towers,
    write_checkpoint_config,
)
from gc_dpr.models.encoder import TextEncoder
from gc_dpr.models.encoding import DEFAULT_BATCH_TOKENS, encode_tokens, report_truncated
from gc_dpr.models.tokenization import PassageTokenizer, QuestionTokenizer, TokenizedTexts

if TYPE_CHECKING:
    from gc_dpr.data.records import Passage

logger = logging.getLogger(__name__)


class BiEncoder(nn.Module):
    """A question encoder and a passage encoder with the conventions of their input.

    Args:
        question_encoder: Encodes questions.
        passage_encoder: Encodes passages; the same object when the two sides share one encoder.
        title_format: How a passage's title is fed: ``"pair"`` (DPR) or ``"space"`` (Tevatron,
            BEIR); see :class:`~gc_dpr.models.tokenization.PassageTokenizer`.
        max_question_length: In tokens; the default is the question encoder's.
        max_passage_length: In tokens; the default is the passage encoder's.

    Attributes:
        question_tokenizer: Callable from questions to ``TokenizedTexts``; without weights,
            picklable, for the workers of a data loader.
        passage_tokenizer: The same from passages.

    Raises:
        ConfigError: The two sides have different dimensions, or a setting does not fit the models.
    """

    def __init__(
        self,
        question_encoder: TextEncoder,
        passage_encoder: TextEncoder,
        *,
        title_format: str = "pair",
        max_question_length: int | None = None,
        max_passage_length: int | None = None,
    ) -> None:
        super().__init__()
        dims = question_encoder.embedding_dim, passage_encoder.embedding_dim
        if dims[0] != dims[1]:
            raise ConfigError(
                f"the question encoder has {dims[0]} dimensions, the passage encoder {dims[1]}; "
                "inner products need two models of the same size"
            )
        self.question_encoder = question_encoder
        self.passage_encoder = passage_encoder
        length = question_encoder.choose_length(max_question_length, name="max_question_length")
        self.question_tokenizer = QuestionTokenizer(question_encoder.tokenizer, max_length=length)
        length = passage_encoder.choose_length(max_passage_length, name="max_passage_length")
        self.passage_tokenizer = PassageTokenizer(
            passage_encoder.tokenizer, max_length=length, title_format=title_format
        )

    @classmethod
    def initialise(
        cls,
        name_or_path: str | Path,
        *,
        passage_name_or_path: str | Path | None = None,
        shared: bool = False,
        title_format: str | None = None,
        max_question_length: int | None = None,
        max_passage_length: int | None = None,
        expected_sha256: str | None = None,
        **encoder_settings: Any,
    ) -> BiEncoder:
        """Make a bi-encoder to start training from.

        Args:
            name_or_path: A Hugging Face or sentence-transformers model (folder or hub name), or a
                bi-encoder checkpoint to go on from.
            passage_name_or_path: Another model for the passage side; the default starts both sides
                from the same weights.
            shared: One encoder for both sides; otherwise they are separate from the first step.
            title_format: The default is the checkpoint's, else ``"pair"``.
            max_question_length: In tokens; the default is the checkpoint's, else the model's.
            max_passage_length: The same.
            expected_sha256: Checked against ``model.safetensors`` of the question side.
            **encoder_settings: ``pooling``, ``normalize``, ``dropout`` and ``num_layers`` of
                :meth:`TextEncoder.from_pretrained`, for both sides.

        Raises:
            ConfigError: Settings that contradict each other or the model.
            ArtifactError: A model is missing or damaged.
        """
        towers = find_towers(name_or_path)
        passage_start = towers.passage
        if passage_name_or_path is not None:
            passage_start = find_towers(passage_name_or_path).passage
        if shared and passage_start != towers.question:
            raise ConfigError(
                "shared=true means one encoder for both sides, but two models are given: "
                f"{towers.question} and {passage_start}; choose shared=false"
            )
        question_encoder = TextEncoder.from_pretrained(
            towers.question, expected_sha256=expected_sha256, **encoder_settings
        )
        if shared:
            passage_encoder = question_encoder
        elif passage_start == towers.question:
            passage_encoder = copy.deepcopy(question_encoder)
        else:
            passage_encoder = TextEncoder.from_pretrained(passage_start, **encoder_settings)
        return cls(
            question_encoder,
            passage_encoder,
            **towers.input_settings(title_format, max_question_length, max_passage_length),
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_name: str | Path,
        *,
        title_format: str | None = None,
        max_question_length: int | None = None,
        max_passage_length: int | None = None,
    ) -> BiEncoder:
        """Load a bi-encoder to encode with, in evaluation mode.

        Args:
            folder_or_name: A checkpoint of this toolkit; or any Hugging Face or
                sentence-transformers model (folder or hub name), which then encodes both sides.
            title_format: The default is the checkpoint's; for other models the convention of their
                kind: ``"space"`` for sentence-transformers, ``"pair"`` for plain Hugging Face.
            max_question_length: In tokens; the default is the checkpoint's, else the model's.
            max_passage_length: The same.

        Raises:
            ArtifactError: The folder is neither; the message says what is missing.
            ConfigError: A setting does not fit the model.
        """
        towers = find_towers(folder_or_name)
        question_encoder = TextEncoder.from_pretrained(towers.question)
        passage_encoder = question_encoder
        if towers.passage != towers.question:
            passage_encoder = TextEncoder.from_pretrained(towers.passage)
        if title_format is None and not towers.is_checkpoint:
            title_format = towers.usual_title_format
            logger.info("%s: a shared encoder, title_format=%s", folder_or_name, title_format)
        elif towers.is_checkpoint and title_format not in (None, towers.title_format):
            logger.warning("title_format=%s instead of the checkpoint's", title_format)
        model = cls(
            question_encoder,
            passage_encoder,
            **towers.input_settings(title_format, max_question_length, max_passage_length),
        )
        return model.eval()

    @property
    def shared(self) -> bool:
        """Whether both sides are one encoder."""
        return self.question_encoder is self.passage_encoder

    @property
    def embedding_dim(self) -> int:
        """D, the length of a representation of either side."""
        return self.question_encoder.embedding_dim

    @property
    def title_format(self) -> str:
        """How a passage's title is fed: ``"pair"`` or ``"space"``."""
        return self.passage_tokenizer.title_format

    @property
    def max_question_length(self) -> int:
        """Longest question in tokens, special tokens included."""
        return self.question_tokenizer.max_length

    @property
    def max_passage_length(self) -> int:
        """Longest passage in tokens, title and special tokens included."""
        return self.passage_tokenizer.max_length

    def tokenize_questions(self, texts: Sequence[str]) -> TokenizedTexts:
        """Turn questions into token ids; the same as ``question_tokenizer(texts)``."""
        return self.question_tokenizer(texts)

    def tokenize_passages(
        self, passages: Sequence[Passage | tuple[str, str] | str]
    ) -> TokenizedTexts:
        """Turn passages into token ids; the same as ``passage_tokenizer(passages)``."""
        return self.passage_tokenizer(passages)

    def encode_questions(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        progress: bool = False,
        precision: str = "fp32",
    ) -> NDArray[np.float32]:
        """Embed questions; see :func:`~gc_dpr.models.encoding.encode_tokens`.

        Returns:
            (N, D) float32 in the order of ``texts``.
        """
        tokenized = self.tokenize_questions(texts)
        report_truncated(tokenized, what="questions", max_length=self.max_question_length)
        return encode_tokens(
            self.question_encoder,
            tokenized.tokens,
            batch_tokens=batch_tokens,
            progress=progress,
            precision=precision,
        ).numpy()

    def encode_passages(
        self,
        passages: Sequence[Passage | tuple[str, str] | str],
        *,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        progress: bool = False,
        precision: str = "fp32",
    ) -> NDArray[np.float32]:
        """Embed passages: records, (title, text) tuples, or texts without a title."""
        tokenized = self.tokenize_passages(passages)
        report_truncated(tokenized, what="passages", max_length=self.max_passage_length)
        return encode_tokens(
            self.passage_encoder,
            tokenized.tokens,
            batch_tokens=batch_tokens,
            progress=progress,
            precision=precision,
        ).numpy()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint: both encoders and ``biencoder_config.json``.

        Each encoder's folder also loads with ``SentenceTransformer`` and with ``AutoModel``; it
        cuts at its side's maximum length, or at the greater of the two when it is shared.

        Args:
            folder: Created when missing. Files are written straight into it: wrap the call into
                :func:`gc_dpr.artifacts.atomic_folder` to have all of it or nothing.
        """
        folder = Path(folder)
        lengths = self.max_question_length, self.max_passage_length
        self.question_encoder.save_pretrained(
            folder / QUESTION_FOLDER, max_length=max(lengths) if self.shared else lengths[0]
        )
        if not self.shared:
            self.passage_encoder.save_pretrained(folder / PASSAGE_FOLDER, max_length=lengths[1])
        write_checkpoint_config(
            folder,
            shared=self.shared,
            title_format=self.title_format,
            max_question_length=lengths[0],
            max_passage_length=lengths[1],
        )

    def fingerprint(self) -> str:
        """Fingerprint of everything that changes embeddings of either side.

        Weights (as float32), pooling, scaling, vocabulary, title format and maximum lengths; not
        dropout, and not whether two equal encoders are one object. Reads all weights: call it once.

        Returns:
            64 hexadecimal digits (SHA-256), the same after saving and loading.
        """
        question = self.question_encoder.digest()
        passage = question if self.shared else self.passage_encoder.digest()
        settings = [self.title_format, self.max_question_length, self.max_passage_length]
        content = json.dumps([question, passage, *settings])
        return hashlib.sha256(content.encode()).hexdigest()
