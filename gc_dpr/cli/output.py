"""A command's output folder: claimed before the work, emptied only when the inputs are known good.

A slip in a path must not cost the results of an earlier run: with ``overwrite=true`` nothing is
removed before everything that can be checked has been checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gc_dpr.artifacts import prepare_output_dir
from gc_dpr.config import CommandConfig
from gc_dpr.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Where a command writes; made by `claim_output`.

    Attributes:
        path: Absolute.
        overwrite: Whether results of an earlier run may be there.
        owned: Glob patterns of the names that the command writes.
        device: Where several processes talk to each other.
    """

    path: Path
    overwrite: bool
    owned: tuple[str, ...]
    device: torch.device | str = "cpu"

    def clear(self) -> Path:
        """Remove what an earlier run left there; the last step before the first file is written."""
        self._on_main(self.owned)
        return self.path

    def _on_main(self, owned: Sequence[str]) -> None:
        path, overwrite = self.path, self.overwrite
        on_main(lambda: prepare_output_dir(path, overwrite=overwrite, owned=owned), self.device)


def claim_output(
    settings: CommandConfig,
    *,
    owned: Sequence[str],
    inputs: Sequence[Any],
    device: torch.device | str = "cpu",
) -> OutputFolder:
    """Create the output folder, or make sure that it may be written to. Removes nothing.

    Args:
        settings: Of the command.
        owned: Glob patterns of the names that the command writes.
        inputs: What it reads: paths, lists or dictionaries of them, hub names, ``None``.
        device: Of this process; every process must call it.

    Raises:
        ConfigError: The folder is a file, is not empty without ``overwrite``, or holds an input.
    """
    path = Path(str(settings.output_dir)).expanduser().absolute()
    folder = OutputFolder(path, settings.overwrite, tuple(owned), device)
    if settings.overwrite:
        _refuse_inputs_inside(path, inputs)
    folder._on_main(())
    return folder


def _refuse_inputs_inside(folder: Path, inputs: Sequence[Any]) -> None:
    """What is replaced cannot be read from at the same time."""
    real = Path(os.path.realpath(folder))
    for entry in _flat(inputs):
        place = Path(os.path.realpath(Path(entry).expanduser()))
        if real in (place, *place.parents) and (place.exists() or "*" in entry):
            raise ConfigError(
                f"output_dir={folder} holds {entry}, which this command reads, and "
                "overwrite=true would write there; choose another output_dir"
            )


def _flat(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)


def on_main(action: Callable[[], object], device: torch.device | str) -> None:
    """Run something on rank 0. When it fails there, the other processes end too, and silently.

    Raises:
        ConfigError: On the other processes; only rank 0 prints a fault in the settings.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":  # the usual case needs no torch
        action()
        return
    from gc_dpr.distributed import gather_counts, is_main

    try:
        if is_main():
            action()
    except BaseException:
        gather_counts(1, device)
        raise
    if any(gather_counts(0, device)):
        raise ConfigError("rank 0 has ended")
