"""The settings that a sentence-transformers folder keeps beside the transformer.

A folder holds ``modules.json`` (the chain transformer, pooling, perhaps normalisation), the
transformer in its root, ``sentence_bert_config.json`` (maximum length), ``1_Pooling/config.json``
and ``config_sentence_transformers.json``. Folders of versions 2 to 6 are read. What is written
keeps to the older keys, which all of them read. *Source:* sentence-transformers 6.2,
``base/modules`` and ``sentence_transformer/modules/pooling.py``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gc_dpr.artifacts import read_json, write_json
from gc_dpr.errors import ArtifactError

logger = logging.getLogger(__name__)

_OURS: Final = {"cls": "first_token", "mean": "mean"}
_THEIRS: Final = {ours: theirs for theirs, ours in _OURS.items()}

# Order and names of the version 2-5 switches; "mean" is what none of them means.
_SWITCHES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

# Options of their transformer module that change embeddings and that we do not have, with the
# values under which they do nothing.
_NEUTRAL_OPTIONS: Final[dict[str, tuple[Any, ...]]] = {
    "transformer_task": ("feature-extraction",),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": (None, {}),
    "query_expansion": (None,),
    "query_length": (None,),
    "document_length": (None,),
}


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """What turns the transformer of a folder into an encoder.

    Attributes:
        pooling: ``"first_token"`` or ``"mean"``.
        normalize: Whether embeddings are scaled to length 1.
        max_length: Longest input in tokens; None when the folder leaves it to the tokenizer.
        lower_case: Whether texts must be lower-cased before tokenising.
        transformer: Subfolder of the transformer; empty for the folder itself.
    """

    pooling: str
    normalize: bool
    max_length: int | None
    lower_case: bool
    transformer: str


def read_folder_settings(folder: Path) -> FolderSettings | None:
    """Read a sentence-transformers folder's settings; None when it has no ``modules.json``.

    Raises:
        ArtifactError: A module, a pooling mode or an option that the toolkit does not have.
    """
    if not (folder / "modules.json").is_file():
        return None
    chain = _read_chain(folder / "modules.json")
    transformer = chain[0][1]
    options = _read_options(folder / transformer)
    if len(chain) == 3:
        _check_normalize(folder / chain[2][1] / "config.json")
    _report_prompts(folder / "config_sentence_transformers.json")
    return FolderSettings(
        pooling=_read_pooling(folder / chain[1][1] / "config.json"),
        normalize=len(chain) == 3,
        max_length=options.get("max_seq_length"),
        lower_case=bool(options.get("do_lower_case", False)),
        transformer=transformer,
    )


def _read_chain(path: Path) -> list[tuple[str, str]]:
    """Class name and subfolder of each module; refuses what we cannot compute."""
    modules = read_json(path, what="a list of sentence-transformers modules")
    try:
        types = [str(module["type"]) for module in modules]
        folders = [str(module["path"]) for module in modules]
    except (TypeError, KeyError):
        raise ArtifactError(
            f"{path} is damaged: expected a list of modules, each with type and path"
        ) from None
    names = [name.rsplit(".", 1)[-1] for name in types]
    expected = ["Transformer", "Pooling", "Normalize"]
    if names not in (expected, expected[:2]):
        unknown = [t for t, name in zip(types, names, strict=True) if name not in expected]
        found = f"the module {unknown[0]}" if unknown else f"the modules {', '.join(names)}"
        raise ArtifactError(
            f"{path} has {found}, which this version cannot use; "
            "expected Transformer, Pooling and optionally Normalize, in this order"
        )
    for folder in folders:
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ArtifactError(f"{path} points outside its folder: {folder!r}")
    return list(zip(names, folders, strict=True))


def _read_options(folder: Path) -> dict[str, Any]:
    """Options of the transformer module; the file's name carries the model type in old folders."""
    files = sorted(folder.glob("sentence_*_config.json"))
    options = read_json(files[0], what="transformer options") if files else {}
    for name, neutral in _NEUTRAL_OPTIONS.items():
        if name in options and options[name] not in neutral:
            raise ArtifactError(
                f"{files[0]} sets {name}={options[name]!r}, which this version cannot use"
            )
    return dict(options)


def _read_pooling(path: Path) -> str:
    config = read_json(path, what="the settings of the pooling module")
    if "pooling_mode" in config:
        mode = config["pooling_mode"]
        modes = [mode] if isinstance(mode, str) else list(mode)
    else:
        modes = [mode for switch, mode in _SWITCHES.items() if config.get(switch)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _OURS:
        raise ArtifactError(
            f"{path} asks for pooling {' + '.join(modes)}; expected one of {', '.join(_OURS)}"
        )
    return _OURS[modes[0]]


def _check_normalize(path: Path) -> None:
    """Refuse a normalisation of something else than the pooled vector."""
    config = read_json(path, what="normalisation options") if path.is_file() else {}
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ArtifactError(f"{path} sets {key}={config[key]!r}; expected 'sentence_embedding'")


def _report_prompts(path: Path) -> None:
    """Say that prompts are not applied: the user must put them into the texts."""
    config = read_json(path, what="model options") if path.is_file() else {}
    prompts = {name: text for name, text in (config.get("prompts") or {}).items() if text}
    if prompts:
        logger.warning(
            "%s names prompts (%s); they are not applied: put them in front of the texts yourself",
            path,
            ", ".join(f"{name}={text!r}" for name, text in prompts.items()),
        )


def write_folder_settings(
    folder: Path, *, pooling: str, normalize: bool, max_length: int, embedding_dim: int
) -> None:
    """Make a sentence-transformers model of a folder that holds a transformer and a tokenizer."""
    modules = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    paths = ["", "1_Pooling", "2_Normalize"]
    write_json(
        folder / "modules.json",
        [
            {
                "idx": i,
                "name": str(i),
                "path": paths[i],
                "type": f"sentence_transformers.models.{m}",
            }
            for i, m in enumerate(modules)
        ],
    )
    write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    switches = {switch: mode == _THEIRS[pooling] for switch, mode in _SWITCHES.items()}
    write_json(
        folder / "1_Pooling" / "config.json",
        # No "pooling_mode" beside the switches: versions before 6 refuse a key they do not know.
        {"word_embedding_dimension": embedding_dim, **switches, "include_prompt": True},
    )
    if normalize:
        # Empty, as versions before 6 write it.
        (folder / "2_Normalize").mkdir(exist_ok=True)
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "dot"},
    )
