"""Files and folders that appear whole or not at all.

Everything the toolkit writes goes through here: it is written beside its place under a temporary
name, flushed to disk and then renamed, so a killed process never leaves a half-written result
under the final name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gc_dpr.errors import ArtifactError, ConfigError


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def _flush_folder(folder: Path) -> None:
    """Make a rename durable; needed on Linux, refused by some other file systems."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that replaces ``path`` only when the block ends without an exception.

    Args:
        path: Final place; its folder is created when missing.
        mode: ``"w"`` (UTF-8, line ends as given) or ``"wb"``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    try:
        with temporary.open(mode, **text) as handle:  # type: ignore[call-overload]
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to ``path`` when the block ends without an exception.

    Raises:
        ArtifactError: ``path`` already exists and is not an empty folder.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ArtifactError(f"{path.absolute()} already exists; remove it or write somewhere else")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        if path.exists():
            path.rmdir()
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(path.parent)


def prepare_output_dir(path: str | Path, *, overwrite: bool, owned: Sequence[str]) -> Path:
    """Create an output folder, or make sure that nothing in it is lost by accident.

    Args:
        path: The folder a command writes to.
        overwrite: Remove what an earlier run of the same command left there.
        owned: Glob patterns of the names the command writes; only these are ever removed.

    Returns:
        The absolute path.

    Raises:
        ConfigError: The folder is a file, or is not empty and ``overwrite`` is false.
    """
    folder = Path(path).absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={folder} is a file; give the name of a folder")
    if folder.is_dir():
        found = sorted(entry.name for entry in folder.iterdir())
        if found and not overwrite:
            shown = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
            raise ConfigError(
                f"output_dir={folder} is not empty (it holds {shown}); "
                "choose another folder, or add overwrite=true to replace what this command wrote"
            )
        for pattern in (*owned, *(f".{name}.tmp-*" for name in owned)):
            for entry in folder.glob(pattern):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_json(path: str | Path, value: Any) -> Path:
    """Write ``value`` as indented UTF-8 JSON, atomically; returns the absolute path."""
    with atomic_file(path) as handle:
        json.dump(value, handle, ensure_ascii=False, indent=2)
        handle.write("\n")
    return Path(path).absolute()


def read_json(path: str | Path, *, what: str) -> Any:
    """Read a JSON file that another command wrote.

    Args:
        path: The file.
        what: What it should be, for the error message ("an embedding folder's meta.json").

    Raises:
        ArtifactError: The file is missing or is not JSON.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8") as handle:
            return json.load(handle)
    except FileNotFoundError:
        raise ArtifactError(
            f"{path.absolute()} does not exist; expected {what}. "
            "Check the path, or run the command that writes it"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(
            f"{path.absolute()} is damaged ({error}); expected {what}. Write it again"
        ) from None


def file_checksum(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
