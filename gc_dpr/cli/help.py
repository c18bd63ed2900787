"""The text of ``gc-dpr COMMAND --help``: every setting with its value and its meaning."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gc_dpr import config as schema
from gc_dpr.cli.settings import groups_of, presets, settings_of


def help_text(command: str, folder: Path, composed: DictConfig | None) -> str:
    """Usage, presets and settings of a command.

    Args:
        command: Its name.
        folder: Where the YAML groups are.
        composed: The config with the overrides given so far, whose values are shown.
    """
    cls = schema.COMMANDS[command]
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    question = ' "question"' if command == "search" else ""
    lines = [
        f"usage: gc-dpr {command}{question} [key=value …]",
        "",
        *textwrap.wrap((cls.__doc__ or "").strip(), width),
        f"Required: {', '.join(cls.REQUIRED)}",
        "",
        *_preset_lines(command, cls, folder, width),
        "settings (key=value now, then what it means):",
    ]
    for setting in settings_of(cls):
        lines.append(f"  {setting.key}={_shown(composed, setting.key)}  [{setting.type}]")
        lines += textwrap.wrap(
            setting.meaning, width, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    lines += [
        "",
        "Hydra's flags work too: --cfg job prints the settings as YAML, -m runs several values,",
        "--config-dir adds a folder with your own presets, --hydra-help shows the rest.",
        "Quote values with special characters: 'key=\"a b=c\"'. Lists: 'key=[a,b]'.",
    ]
    return "\n".join(lines)


def _preset_lines(command: str, cls: type, folder: Path, width: int) -> list[str]:
    groups = dict(groups_of(cls))
    if issubclass(cls, schema.TrainDenseEncoderConfig):
        groups["experiment"] = "a whole recipe: sets all of the above"
    lines = ["presets (GROUP=NAME):"] if groups else []
    for name, meaning in groups.items():
        lines += textwrap.wrap(
            f"{name}={'|'.join(presets(folder, name))}  ({meaning})",
            width,
            initial_indent="  ",
            subsequent_indent="      ",
        )
    return [*lines, ""] if groups else []


def _shown(composed: DictConfig | None, key: str) -> str:
    if composed is None:
        return "…"
    value: Any = OmegaConf.select(composed, key)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)
