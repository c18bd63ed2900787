"""Finding a pretrained model's folder, and building its transformer and tokenizer.

A hub name is first brought into the local cache, so that everything else only reads a folder.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from gc_dpr.artifacts import file_checksum
from gc_dpr.errors import ArtifactError, ConfigError

# Everything but weights of other frameworks and of other formats.
_HUB_FILES: Final = ["*.json", "*.txt", "*.model", "*.safetensors"]
_HUB_SKIPPED: Final = ["onnx/*", "openvino/*", "*.onnx", "coreml/*"]

# Heads are not built, so the dropout of heads has no effect here.
_DROPOUT_NAME: Final = re.compile(r"(?!classif|seq_classif|qa_|summary|pooler).*(dropout|pdrop)")


def find_folder(name_or_path: str | Path) -> Path:
    """Return the folder of a model: a local one, or the hub's, downloaded into the local cache.

    Args:
        name_or_path: A folder, or a name on the hub such as ``google-bert/bert-base-uncased``.

    Raises:
        ArtifactError: There is neither such a folder nor, as far as can be seen, such a hub name.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if folder.exists():
        raise ArtifactError(f"{folder.absolute()} is a file; expected the folder of a model")
    name = str(name_or_path)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ArtifactError(f"{folder.absolute()} does not exist; expected the folder of a model")
    neither = f"found neither a folder {folder.absolute()} nor a model {name!r} on the hub"
    try:
        found = snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_SKIPPED)
        if not any(Path(found).rglob("*.safetensors")):  # an old model: PyTorch's own format
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
    except HFValidationError:
        raise ArtifactError(f"{neither} (not a legal hub name); check the path") from None
    except LocalEntryNotFoundError as error:
        raise ArtifactError(
            f"{neither}: it is not in the local cache and the hub cannot be reached "
            "(or HF_HUB_OFFLINE is set); check the name, or give the path of a downloaded model"
        ) from error
    except OSError as error:  # includes all HTTP errors: unknown name, no permission, no disk space
        raise ArtifactError(f"{neither} ({_first_line(error)}); check the name") from error
    return Path(found)


def check_weights_checksum(folder: Path, expected: str) -> None:
    """Compare the SHA-256 of ``model.safetensors`` with a digest or the beginning of one.

    Raises:
        ConfigError: ``expected`` is not a hexadecimal digest.
        ArtifactError: The file is missing or has another digest.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{8,64}", expected):
        raise ConfigError(
            f"expected_sha256={expected!r} is not a SHA-256; give its first 8 to 64 hex digits"
        )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ArtifactError(f"{path} does not exist; expected_sha256 is checked against this file")
    found = file_checksum(path)
    if not found.startswith(expected.lower()):
        raise ArtifactError(
            f"{path} has SHA-256 {found}, expected {expected.lower()}: these are other weights; "
            "download the model again, or correct expected_sha256"
        )


def load_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder.

    Raises:
        ArtifactError: The folder has none, or it cannot be loaded.
        ConfigError: It has no pad token.
    """
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:
        raise ArtifactError(
            f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}"
        ) from error
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no pad token; set one and save it there: "
            "tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(folder)"
        )
    return tokenizer


def load_transformer(
    folder: Path, *, dropout: float | None = None, num_layers: int | None = None
) -> Any:
    """Load the transformer of a folder in float32, without pooler where its class allows that.

    Args:
        folder: Holds ``config.json`` and weights.
        dropout: Probability for every dropout of the transformer; None leaves the folder's.
        num_layers: Keep only the first so many layers; None keeps all.

    Raises:
        ArtifactError: The folder cannot be loaded, or lacks some of the weights.
        ConfigError: ``dropout`` or ``num_layers`` cannot be applied to this model.
    """
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(str(folder))
            _set_dropout(config, dropout)
            _set_num_layers(config, num_layers)
            model, report = AutoModel.from_pretrained(
                str(folder),
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                **_without_pooler(config),
            )
    except ConfigError:
        raise
    except Exception as error:
        raise ArtifactError(
            f"the model in {folder} cannot be loaded: {_first_line(error)}"
        ) from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise ArtifactError(
            f"the weights in {folder} lack {len(missing)} tensors of a {type(model).__name__} "
            f"({', '.join(missing[:3])}, …); they would be random. Get the complete model"
        )
    _check_dropout(model, dropout)
    return model


def position_limit(transformer: Any) -> int | None:
    """Longest input, in tokens, that the transformer has positions for; None = no such limit.

    RoBERTa and its kin begin to count after the pad token's id: 514 positions hold 512 tokens.
    """
    for name, module in transformer.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    limit = getattr(transformer.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch the library's reports and progress bars off; faults are reported by the caller."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _without_pooler(config: Any) -> dict[str, bool]:
    """Return the keyword that leaves the unused pooler out, where the class has it."""
    model_class = AutoModel._model_mapping.get(type(config), None)
    parameters = inspect.signature(model_class.__init__).parameters if model_class else {}
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def _set_dropout(config: Any, dropout: float | None) -> None:
    if dropout is None:
        return
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout={dropout} must be at least 0 and below 1")
    names = [
        name
        for name, value in config.to_dict().items()
        if _DROPOUT_NAME.match(name) and isinstance(value, (int, float))
    ]
    if not names:
        raise ConfigError(
            f"dropout={dropout} cannot be applied: a {config.model_type} model has no dropout "
            "setting; leave it at null"
        )
    for name in names:
        setattr(config, name, float(dropout))


def _check_dropout(model: nn.Module, dropout: float | None) -> None:
    """Make sure that the setting has reached the modules: a config may be ignored by its model."""
    if dropout is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and "pooler" not in name and module.p != dropout:
            raise ConfigError(
                f"dropout={dropout} does not reach {name}, which has {module.p}, in a "
                f"{type(model).__name__}; leave it at null and edit the model's config.json"
            )


def _set_num_layers(config: Any, num_layers: int | None) -> None:
    if num_layers is None:
        return
    available = getattr(config, "num_hidden_layers", None)
    if available is None:
        raise ConfigError(f"num_layers cannot be applied to a {config.model_type} model")
    if not 1 <= num_layers <= available:
        raise ConfigError(f"num_layers={num_layers} must be from 1 to the model's {available}")
    config.num_hidden_layers = num_layers
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:num_layers]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
