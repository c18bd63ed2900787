"""Where the two encoders of a bi-encoder are: in a checkpoint of ours, or in one foreign model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gc_dpr import __version__
from gc_dpr.artifacts import read_json, write_json
from gc_dpr.errors import ArtifactError
from gc_dpr.models.pretrained import find_folder

CONFIG_NAME: Final = "biencoder_config.json"
FORMAT_VERSION: Final = 1
QUESTION_FOLDER: Final = "question_encoder"
PASSAGE_FOLDER: Final = "passage_encoder"


@dataclass(frozen=True, slots=True)
class Towers:
    """The folders of the two encoders and what is known about their input.

    Attributes:
        question: Folder of the question encoder.
        passage: Folder of the passage encoder; the same one when shared.
        is_checkpoint: Whether it is a checkpoint of this toolkit.
        usual_title_format: What a model of this kind is used with when nothing says otherwise.
        title_format: As the checkpoint says; None for other models.
        max_question_length: As the checkpoint says, in tokens; None for other models.
        max_passage_length: The same.
    """

    question: Path
    passage: Path
    is_checkpoint: bool
    usual_title_format: str
    title_format: str | None = None
    max_question_length: int | None = None
    max_passage_length: int | None = None

    def input_settings(
        self,
        title_format: str | None,
        max_question_length: int | None,
        max_passage_length: int | None,
    ) -> dict[str, Any]:
        """The keyword arguments of ``BiEncoder``: what is given, else what the checkpoint says."""
        given = {
            "title_format": title_format,
            "max_question_length": max_question_length,
            "max_passage_length": max_passage_length,
        }
        # 0 is a value: it is refused later, not replaced here.
        chosen = {k: getattr(self, k) if value is None else value for k, value in given.items()}
        return chosen | {"title_format": chosen["title_format"] or "pair"}


def find_towers(name_or_path: str | Path) -> Towers:
    """Look into a folder, or a model of the hub, for the encoders of both sides.

    Raises:
        ArtifactError: It is missing, or neither a checkpoint nor a model.
    """
    folder = find_folder(name_or_path)
    if (folder / CONFIG_NAME).is_file():
        return _read_checkpoint(folder)
    is_sentence_transformer = (folder / "modules.json").is_file()
    if not is_sentence_transformer and not (folder / "config.json").is_file():
        raise ArtifactError(_describe_stranger(folder))
    usual = "space" if is_sentence_transformer else "pair"
    return Towers(folder, folder, is_checkpoint=False, usual_title_format=usual)


def write_checkpoint_config(
    folder: Path,
    *,
    shared: bool,
    title_format: str,
    max_question_length: int,
    max_passage_length: int,
) -> None:
    """Write ``biencoder_config.json``."""
    write_json(
        folder / CONFIG_NAME,
        {
            "format_version": FORMAT_VERSION,
            "gc_dpr_version": __version__,
            "shared": shared,
            "title_format": title_format,
            "max_question_length": max_question_length,
            "max_passage_length": max_passage_length,
        },
    )


def _read_checkpoint(folder: Path) -> Towers:
    path = folder / CONFIG_NAME
    config: dict[str, Any] = read_json(path, what="the settings of a bi-encoder")
    version = config.get("format_version")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has format_version {version}, this version of the toolkit ({__version__}) "
            f"reads {FORMAT_VERSION}; it was written by gc_dpr {config.get('gc_dpr_version')}"
        )
    try:
        question = folder / QUESTION_FOLDER
        return Towers(
            question,
            question if config["shared"] else folder / PASSAGE_FOLDER,
            is_checkpoint=True,
            usual_title_format=config["title_format"],
            title_format=config["title_format"],
            max_question_length=config["max_question_length"],
            max_passage_length=config["max_passage_length"],
        )
    except KeyError as error:
        raise ArtifactError(f"{path} lacks {error}; write the checkpoint again") from None


def _describe_stranger(folder: Path) -> str:
    """Say what a folder lacks to be a model, and where the model may be."""
    found = sorted(entry.name for entry in folder.iterdir())
    holds = f"it holds {', '.join(found[:6])}" if found else "it is empty"
    advice = "give the checkpoint folder that training wrote, or the folder of a model"
    if (folder / "checkpoint" / CONFIG_NAME).is_file():
        advice = f"did you mean {folder / 'checkpoint'}?"
    return (
        f"{folder} is not a model: it has neither {CONFIG_NAME} (a checkpoint of this toolkit) "
        f"nor config.json or modules.json (any other model); {holds}; {advice}"
    )
