"""Check what the user set against the schema, and answer each slip in one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gc_dpr import config as schema
from gc_dpr.errors import ConfigError, GcDprError


@dataclasses.dataclass(frozen=True)
class Setting:
    """One leaf of a command's schema."""

    key: str
    type: str
    meaning: str


def settings_of(cls: type, prefix: str = "") -> Iterator[Setting]:
    """All leaves of a command's dataclass, in order, with dotted keys."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings_of(hints[field.name], f"{key}.")
        else:
            yield Setting(key, type_name(hints[field.name]), field.metadata["help"])


def groups_of(cls: type) -> dict[str, str]:
    """Group name → what it is about."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: field.metadata["help"]
        for field in dataclasses.fields(cls)
        if dataclasses.is_dataclass(hints[field.name])
    }


def type_name(kind: Any) -> str:
    """A type in the words of --help."""
    if kind is Any:
        return "path(s)"
    if isinstance(kind, types.UnionType):
        return " or ".join(
            "null" if part is type(None) else type_name(part) for part in kind.__args__
        )
    names = {bool: "true/false", int: "whole number", float: "number", str: "text"}
    return names.get(kind, str(kind).replace("list[int]", "list of whole numbers"))


def presets(folder: Path, group: str) -> list[str]:
    """Names of the YAML files of a group."""
    return sorted(file.stem for file in (folder / group).glob("*.yaml"))


def nearest(name: str, known: list[str]) -> str:
    """'; did you mean …?' or the list, to end a message with."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(known)}"


def check_keys(command: str, overrides: list[str], folder: Path, *, sweeps: bool = False) -> None:
    """Refuse unknown keys and presets before Hydra sees them, forced ones (``+key=``) too.

    Args:
        command: Its name.
        overrides: What the user typed.
        folder: Where the YAML groups are.
        sweeps: Allow several values for a key (``-m``).

    Raises:
        ConfigError: With the nearest right name (TRAPS: B96).
    """
    cls = schema.COMMANDS[command]
    groups = [name for name in (*groups_of(cls), "experiment") if (folder / name).is_dir()]
    if not issubclass(cls, schema.TrainDenseEncoderConfig):
        groups = [name for name in groups if name != "experiment"]
    settings = list(settings_of(cls))
    for text in overrides:
        override = parse_override(text)
        key = override.key_or_group.lstrip("/")
        if key in groups:
            _check_preset(text, override, sweeps=sweeps)
        elif key.split("/")[0].split(".")[0] == "hydra":
            _check_hydra_key(key)
        else:
            _check_key(command, key, settings, groups)
            _check_value(text, override, next(s for s in settings if s.key == key), sweeps=sweeps)


def _check_preset(text: str, override: Override, *, sweeps: bool) -> None:
    if override.is_delete():
        return
    if override.is_sweep_override():
        if not sweeps:
            raise ConfigError(f"{text!r} asks for several runs: add -m for that")
        return
    value: Any = override.value()
    for name in value if isinstance(value, list) else [value]:
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{text}: expected the name of a preset, found {name!r}")


def _check_hydra_key(key: str) -> None:
    kind: Any = HydraConf
    for name in key.split(".")[1:]:
        # below a dictionary, such as hydra.job.env_set, any name will do
        if not dataclasses.is_dataclass(kind):
            return
        known = typing.get_type_hints(kind)
        if name not in known:
            raise ConfigError(f"unknown setting {key!r} of Hydra{nearest(name, list(known))}")
        kind = known[name]


def _check_value(text: str, override: Override, setting: Setting, *, sweeps: bool) -> None:
    key, _, value = text.partition("=")
    if override.is_delete():
        raise ConfigError(f"{text}: a setting cannot be removed; leave it out for its default")
    if override.is_sweep_override() and not sweeps:
        hint = ""
        if "text" in setting.type:
            hint = f"; one text with a comma is written '{key}=\"{value}\"', quotes included"
        elif setting.type.startswith(("path", "list")):
            hint = f"; a list is written '{key}=[{value}]', quotes included"
        raise ConfigError(f"{text!r} asks for several runs: add -m for that{hint}")


def _check_key(command: str, key: str, settings: list[Setting], groups: list[str]) -> None:
    known = [setting.key for setting in settings]
    if key in known:
        return
    if any(name.startswith(f"{key}.") for name in known):
        raise ConfigError(
            f"{key} is a group of settings; set one of them ({key}.NAME=…) or choose a preset"
        )
    candidates = known + groups
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.6)
    leaf = key.rpartition(".")[2]
    close = close or [name for name in known if name.rpartition(".")[2] == leaf]
    close = close or difflib.get_close_matches(
        leaf, [name.rpartition(".")[2] for name in known], n=1, cutoff=0.7
    )
    advice = f"did you mean {close[0]}?" if close else f"see gc-dpr {command} --help"
    raise ConfigError(f"unknown setting {key!r}; {advice}")


def parse_override(text: str) -> Override:
    """Parse one ``key=value`` with Hydra's grammar.

    Raises:
        ConfigError: It does not parse; the message shows the quoted form (TRAPS: B95).
    """
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        key, equals, value = text.partition("=")
        if equals:
            hint = f"quote the value: '{key}={quoted(value)}'"
        else:
            hint = "settings are written key=value, without spaces around the equals sign"
        raise ConfigError(f"cannot read the setting {text!r}; {hint}") from None


def quoted(text: str) -> str:
    r"""A text as Hydra's grammar takes it literally.

    Only quotes and backslashes before them need a backslash; ``${…}`` keeps its meaning.

    Example:
        >>> print(quoted('C:\\temp "a=b"'))
        "C:\temp \"a=b\""
    """
    escaped = re.sub(r'(\\*)("|$)', r"\1\1\2", text).replace('"', '\\"')
    return f'"{escaped}"'


def describe_composition_error(command: str, error: Exception, folder: Path) -> ConfigError:
    """Turn what Hydra or OmegaConf raised while composing into one line."""
    ours = root_cause(error, GcDprError)
    if isinstance(ours, ConfigError):
        return ours
    preset = root_cause(error, MissingConfigException)
    if isinstance(preset, MissingConfigException) and preset.options:
        group, _, name = str(preset.missing_cfg_file).rpartition("/")
        return ConfigError(f"{group}={name}: no such preset{nearest(name, list(preset.options))}")
    cause = root_cause(error, OmegaConfBaseException)
    if cause is not None:
        return _describe_value_error(command, cause)
    return ConfigError(" ".join(str(error).split()))


def _describe_value_error(command: str, error: BaseException) -> ConfigError:
    key = str(getattr(error, "full_key", "") or "")
    found = str(getattr(error, "msg", "") or error).splitlines()[0]
    settings = list(settings_of(schema.COMMANDS[command]))
    if " not in '" in found:  # an unknown key in a preset of the user's own
        _check_key(command, key, settings, [])
    for setting in settings:
        if setting.key == key:
            return ConfigError(f"{key}: {found}; expected {setting.type}: {setting.meaning}")
    return ConfigError(f"{key}: {found}" if key else found)


def root_cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The first exception of a kind in a chain of causes, or ``None``."""
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


def to_settings(command: str, composed: DictConfig) -> Any:
    """Turn a composed config into the command's dataclass, with everything checked.

    Raises:
        ConfigError: An unknown key, a wrong type, a required key left out, or a failed check.
    """
    cls = schema.COMMANDS[command]
    known = list(settings_of(cls))
    groups = list(groups_of(cls))
    for key in _leaf_keys(composed, cls):
        _check_key(command, key, known, groups)
    try:
        settings = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        ours = root_cause(error, GcDprError)
        raise ours or _describe_value_error(command, error) from None
    _check_required(settings, {setting.key: setting for setting in known})
    for part in (*(getattr(settings, name) for name in groups), settings):
        if hasattr(part, "check"):
            part.check()
    return settings


def _leaf_keys(composed: DictConfig, cls: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for name in map(str, composed):
        kind = hints.get(name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _leaf_keys(composed[name], kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_required(settings: Any, known: dict[str, Setting]) -> None:
    for key in settings.REQUIRED:
        value = settings
        for name in key.split("."):
            value = getattr(value, name)
        if value is None or (isinstance(value, str) and not value.strip()):
            advice = ""
            if key.startswith("data."):
                advice = " (or choose a preset that has it, such as data=factbook)"
            elif key == "model.name_or_path":
                advice = " (or choose a preset, such as model=bert_base)"
            raise ConfigError(f"{key} is required: {known[key].meaning}{advice}")


def as_yaml(settings: Any) -> str:
    """The settings as YAML, every value resolved; what a command keeps beside its results."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(settings)))
