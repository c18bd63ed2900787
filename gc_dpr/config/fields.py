"""How a setting is written down: default, meaning, and the checks that several groups share."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from gc_dpr.errors import ConfigError


def option(default: Any, meaning: str) -> Any:
    """A dataclass field with its default and the meaning that ``--help`` prints."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": meaning})
    return field(default=default, metadata={"help": meaning})


def group(cls: type, meaning: str) -> Any:
    """A dataclass field that holds a whole group."""
    return field(default_factory=cls, metadata={"help": meaning})


def one_of(key: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among a few."""
    if value not in allowed:
        raise ConfigError(f"{key}={value!r}: expected one of {', '.join(allowed)}")


def at_least(key: str, value: float | None, low: float) -> None:
    """Refuse a number below the lowest; None stands for no limit."""
    if value is not None and not value >= low:
        raise ConfigError(f"{key}={value}: expected {low} or more")


def auto_or_at_least(key: str, value: int | str, low: int) -> None:
    """Refuse what is neither ``auto`` nor a large enough whole number."""
    if value != "auto" and not (isinstance(value, int) and value >= low):
        raise ConfigError(f"{key}={value!r}: expected auto or a whole number, {low} or more")


def paths(key: str, value: Any) -> None:
    """Paths are a string, or a list of strings; anything else is a slip."""
    if value is None or (isinstance(value, str) and value):
        return
    if isinstance(value, list) and value and all(isinstance(v, str) and v for v in value):
        return
    raise ConfigError(
        f"{key}={value!r}: expected a path, a glob or a list of them, such as "
        f"{key}=data/train.json or '{key}=[a.json,b.json]'"
    )
