"""The faults a user can mend. The command line prints their message without a traceback.

    GcDprError
    ├── ConfigError    a setting is wrong: the message names the config key
    ├── DataError      a file's content is wrong: the message names the file and the line
    └── ArtifactError  something another command wrote is missing, incomplete or does not fit

Every message says what was found, what was expected and what to do.
"""

from __future__ import annotations

from pathlib import Path


class GcDprError(Exception):
    """Base of all errors that a user of the toolkit can mend."""


class ConfigError(GcDprError, ValueError):
    """A setting is missing, misspelt, of the wrong type, or has no effect where it stands."""


class DataError(GcDprError, ValueError):
    """A data file cannot be read as what it should be.

    Args:
        message: What was found, what was expected, what to do.
        path: The file; put in front of the message as an absolute path.
        line: The 1-based physical line, when there is one.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, line: int | None = None
    ) -> None:
        self.path = None if path is None else Path(path)
        self.line = line
        place = "" if path is None else f"{Path(path).absolute()}:"
        place += "" if line is None else f"{line}:"
        super().__init__(f"{place} {message}" if place else message)


class ArtifactError(GcDprError, ValueError):
    """A checkpoint, embedding folder, index or run is missing, incomplete or does not fit."""
