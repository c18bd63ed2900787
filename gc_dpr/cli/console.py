"""What a command says: results on standard output, progress and log lines on standard error."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm


def is_main() -> bool:
    """Whether this process speaks for all; true before and without a process group too."""
    return os.environ.get("RANK", "0") == "0"


class _ThroughProgressBar(logging.Handler):
    """Writes log lines without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        tqdm.write(f"[{clock}] {level}{record.getMessage()}", file=sys.stderr)


def set_up_logging() -> None:
    """Show the toolkit's log: everything from rank 0, only warnings from the others.

    Libraries keep to warnings, since their chatter hides what the user needs to see.
    """
    root = logging.getLogger()
    root.handlers[:] = [_ThroughProgressBar()]
    root.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # torch tells its callers here about names that newer versions prefer
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    logging.getLogger("gc_dpr").setLevel(logging.INFO if is_main() else logging.WARNING)
    for noisy in ("transformers", "huggingface_hub", "httpx", "bm25s", "faiss"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def say(text: str) -> None:
    """Print a result, from rank 0 only."""
    if is_main():
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()


def say_read(path: str | Path, detail: str = "") -> None:
    """Name what was read, by its absolute path or its hub name, and what was found in it."""
    local = Path(path).expanduser()
    name = local.absolute() if local.exists() else path
    say(f"read   {name}" + (f"  ({detail})" if detail else ""))


def say_read_all(paths: Sequence[Path], detail: str) -> None:
    """Name every one of several files; what was found in all of them stands beside the last."""
    for path in paths:
        together = f"{detail} in {len(paths)} files" if len(paths) > 1 else detail
        say_read(path, together if path == paths[-1] else "")


def say_wrote(path: str | Path, detail: str = "") -> None:
    """Name a file or folder that was written."""
    say(f"wrote  {Path(path).absolute()}" + (f"  ({detail})" if detail else ""))
