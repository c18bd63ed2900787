"""One text encoder: transformer, tokenizer, pooling and, if wanted, scaling to length 1.

Letters: N rows, L tokens, D dims.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gc_dpr.artifacts import read_json, write_json
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.models.cpu_attention import cpu_attention
from gc_dpr.models.pooling import POOLING_MODES, pool
from gc_dpr.models.pretrained import (
    check_weights_checksum,
    find_folder,
    load_tokenizer,
    load_transformer,
    position_limit,
    quiet_transformers,
)
from gc_dpr.models.sentence_transformers_format import (
    FolderSettings,
    read_folder_settings,
    write_folder_settings,
)
from gc_dpr.models.tokenization import TextTokenizer, TokenizedTexts, tokenizer_digest

logger = logging.getLogger(__name__)

DEFAULT_MAX_LENGTH: Final = 256  # tokens; DPR's
_MODEL_INPUTS: Final = ["input_ids", "attention_mask"]


class TextEncoder(nn.Module):
    """Turns token ids into representations.

    Segment ids are never passed: models that have them then use zeros everywhere, also for
    (title, text) pairs, as DPR does. Rows may be padded on either side only if the transformer
    itself allows it; the toolkit pads on the right.

    Args:
        transformer: A Hugging Face model whose output has ``last_hidden_state``.
        tokenizer: Its fast tokenizer, with a pad token.
        pooling: ``"first_token"`` or ``"mean"``.
        normalize: Scale every representation to length 1.
        max_length: Longest input in tokens, special tokens included.

    Raises:
        ConfigError: A setting that the model cannot follow.
        ArtifactError: The tokenizer has ids that the transformer has no embedding for.
    """

    def __init__(
        self,
        transformer: Any,
        tokenizer: Any,
        *,
        pooling: str = "first_token",
        normalize: bool = False,
        max_length: int = DEFAULT_MAX_LENGTH,
    ) -> None:
        super().__init__()
        if pooling not in POOLING_MODES:
            raise ConfigError(
                f"pooling must be one of {', '.join(POOLING_MODES)}; found {pooling!r}"
            )
        if tokenizer.pad_token_id is None:
            raise ConfigError("the tokenizer has no pad token; set tokenizer.pad_token")
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.normalize = normalize
        self._text_tokenizer = TextTokenizer(tokenizer, max_length=self.choose_length(max_length))
        rows = transformer.get_input_embeddings().num_embeddings
        highest = max(tokenizer.get_vocab().values())
        if highest >= rows:
            raise ArtifactError(
                f"the tokenizer has token id {highest}, the model only {rows} token embeddings; "
                "they do not belong together"
            )

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        dropout: float | None = None,
        num_layers: int | None = None,
        expected_sha256: str | None = None,
    ) -> TextEncoder:
        """Load a Hugging Face or sentence-transformers model, in float32 and evaluation mode.

        Args:
            name_or_path: A folder or a name on the hub.
            pooling: The default takes it from the folder's ``modules.json``; without one it is
                ``"first_token"``.
            normalize: The default takes it from ``modules.json``; without one it is False.
            max_length: In tokens. The default takes it from ``modules.json`` and its companions;
                without them it is 256, or less if the model has fewer positions.
            dropout: Probability for every dropout of the transformer, 0 included. The default
                keeps the model's.
            num_layers: Keep only the first so many layers; the default keeps all.
            expected_sha256: Hex digest of ``model.safetensors``, or its beginning; checked before
                anything is loaded.

        Raises:
            ArtifactError: The model is missing, damaged, or has a part that cannot be used here.
            ConfigError: A setting does not fit the model.
        """
        root = find_folder(name_or_path)
        settings = read_folder_settings(root)
        folder = root / settings.transformer if settings else root
        _check_is_model(folder)
        if expected_sha256 is not None:
            check_weights_checksum(folder, expected_sha256)
        tokenizer = load_tokenizer(folder)
        transformer = load_transformer(folder, dropout=dropout, num_layers=num_layers)
        if settings and settings.lower_case:
            _check_lower_cases(tokenizer, root)
        if max_length is None:
            max_length = _default_max_length(settings, tokenizer, position_limit(transformer))
        if pooling is None:
            pooling = settings.pooling if settings else "first_token"
        if normalize is None:
            normalize = settings.normalize if settings else False
        encoder = cls(
            transformer, tokenizer, pooling=pooling, normalize=normalize, max_length=max_length
        )
        return encoder.eval()

    @property
    def embedding_dim(self) -> int:
        """D, the length of a representation."""
        return int(self.transformer.config.hidden_size)

    @property
    def pad_token_id(self) -> int:
        """The id that fills short rows."""
        return int(self.tokenizer.pad_token_id)

    @property
    def max_length(self) -> int:
        """Longest input in tokens, special tokens included."""
        return self._text_tokenizer.max_length

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters())).device

    def choose_length(self, wanted: int | None, *, name: str = "max_length") -> int:
        """Return the wanted maximum length in tokens; the encoder's own for None.

        Raises:
            ConfigError: The transformer has fewer positions; ``name`` is the setting to blame.
        """
        limit = position_limit(self.transformer)
        if wanted is not None and limit is not None and wanted > limit:
            raise ConfigError(
                f"{name}={wanted} is more than the {limit} tokens that the model has positions "
                f"for; choose at most {limit}"
            )
        return self.max_length if wanted is None else wanted

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Encode a chunk.

        Args:
            input_ids: (N, L) int64.
            attention_mask: (N, L); 1 = token, 0 = padding.

        Returns:
            (N, D) float32, also under autocast; float64 if the weights are.
        """
        with cpu_attention(input_ids.device):
            output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
        reps = pool(output.last_hidden_state, attention_mask, self.pooling)  # (N, D)
        return F.normalize(reps, dim=-1) if self.normalize else reps

    def tokenize(
        self, texts: Sequence[str | tuple[str, str]], *, max_length: int | None = None
    ) -> TokenizedTexts:
        """Turn texts or pairs of texts into token ids, exactly as they are given.

        Args:
            texts: Strings, or (first, second) tuples for the tokenizer's pair; "" is legal.
            max_length: In tokens; the default is the encoder's.

        Returns:
            The ids without padding, and how many texts were cut.
        """
        if max_length is None:
            return self._text_tokenizer(texts)
        return TextTokenizer(self.tokenizer, max_length=self.choose_length(max_length))(texts)

    def save_pretrained(self, folder: str | Path, *, max_length: int | None = None) -> None:
        """Write a folder that is a sentence-transformers model and a Hugging Face model at once.

        It loads without this toolkit and then gives the same embeddings: its tokenizer is set not
        to make segment ids, to pad on the right and to cut at ``max_length``.

        Args:
            folder: Created when missing.
            max_length: What the folder shall say; the default is the encoder's.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        max_length = self.max_length if max_length is None else max_length
        with quiet_transformers():
            # One file, whatever its size: its checksum names the weights.
            self.transformer.save_pretrained(str(folder), max_shard_size="1000GB")
            self.tokenizer.save_pretrained(str(folder))
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path, what="a tokenizer's settings")
        for name in ("name_or_path", "is_local", "local_files_only"):  # where it came from here
            config.pop(name, None)
        config |= {
            "model_input_names": _MODEL_INPUTS,
            "model_max_length": max_length,
            "padding_side": "right",
        }
        write_json(config_path, config)
        write_folder_settings(
            folder,
            pooling=self.pooling,
            normalize=self.normalize,
            max_length=max_length,
            embedding_dim=self.embedding_dim,
        )

    def digest(self) -> str:
        """Fingerprint of what makes the embeddings: weights, pooling, scaling, tokenizer.

        The maximum length is left out; :class:`~gc_dpr.models.BiEncoder` has one per side.

        Returns:
            64 hexadecimal digits (SHA-256), the same after saving and loading.
        """
        digest = hashlib.sha256()
        for name, tensor in sorted(self.transformer.state_dict().items()):
            digest.update(json.dumps([name, list(tensor.shape)]).encode())
            digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        settings = [self.pooling, self.normalize, tokenizer_digest(self.tokenizer)]
        digest.update(json.dumps(settings).encode())
        return digest.hexdigest()


def _check_is_model(folder: Path) -> None:
    """Say in one line what is wrong with a folder that is no model."""
    if (folder / "config.json").is_file():
        return
    found = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    holds = f"it holds {', '.join(found[:6])}" if found else "it is empty or missing"
    advice = "give the folder of a Hugging Face or sentence-transformers model"
    for inner in ("checkpoint", "question_encoder"):
        if inner in found:
            advice = f"did you mean {folder / inner}?"
    raise ArtifactError(f"{folder} has no config.json ({holds}); {advice}")


def _check_lower_cases(tokenizer: Any, folder: Path) -> None:
    """Refuse a folder that wants lower-casing added to a tokenizer that keeps the case."""
    if tokenizer("A")["input_ids"] != tokenizer("a")["input_ids"]:
        raise ArtifactError(
            f"{folder} sets do_lower_case beside a tokenizer that keeps the case; this version "
            "cannot add it. Lower-case the texts and set do_lower_case to false there"
        )


def _default_max_length(settings: FolderSettings | None, tokenizer: Any, limit: int | None) -> int:
    """Choose the maximum length as sentence-transformers does, or ours for a plain model."""
    # A tokenizer without a maximum reports a number of 31 digits.
    longest = min(limit or int(tokenizer.model_max_length), int(tokenizer.model_max_length))
    if settings is None:
        return min(DEFAULT_MAX_LENGTH, longest)
    wanted = settings.max_length or (longest if longest < 1_000_000 else DEFAULT_MAX_LENGTH)
    if limit is not None and wanted > limit:
        logger.warning(
            "max_seq_length=%d of the folder is more than its %d positions", wanted, limit
        )
        return limit
    return wanted
