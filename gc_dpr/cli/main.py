"""Choose the command and turn every foreseeable fault into one clear line and an exit status."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence

from gc_dpr import __version__
from gc_dpr.errors import ConfigError, GcDprError

COMMANDS = {
    "train_dense_encoder": "train a question and a passage encoder with the gradient cache",
    "check_gradients": "compare the cached gradients with those of the undivided batch",
    "generate_embeddings": "embed every passage of a corpus with a trained encoder",
    "build_index": "build a FAISS index over the embeddings",
    "retrieve": "retrieve the best passages for every question of a file",
    "evaluate_retrieval": "measure top-k accuracy of one or several runs",
    "search": "show the passages for one typed question",
}


# Faults of a disk or of a path: the system's own words say it all.
_MENDABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.EISDIR, errno.ENAMETOOLONG, errno.EIO,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and leave with its exit status.

    Args:
        arguments: The command's name and its settings; ``None`` takes them from the shell.

    Exit status: 0 = the whole job was done, 1 = a fault in data or files, 2 = a fault in the
    settings, 130 = interrupted, 141 = nobody reads the output any more (``… | head``).
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        sys.exit(0 if arguments else 2)
    if arguments[0] in ("-V", "--version"):
        print(f"gc-dpr {__version__}")
        sys.exit(0)
    name = arguments[0].replace("-", "_")
    if name not in COMMANDS:
        _fail("gc-dpr", f"unknown command {arguments[0]!r}{_nearest(name)}", status=2)
    sys.exit(_run(name, arguments[1:]))


def _run(name: str, arguments: list[str]) -> int:
    try:
        launch = importlib.import_module("gc_dpr.cli.launch")
        launch.launch(name, arguments)
    except GcDprError as error:
        _fail(f"gc-dpr {name}", str(error), status=2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        _fail(f"gc-dpr {name}", "interrupted; what was finished before is kept", status=130)
    except BrokenPipeError:
        # what is left in the buffer would raise once more at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        _fail(f"gc-dpr {name}", f"{error.strerror}: {error.filename or 'a file'}", status=1)
    return 0


def _fail(command: str, message: str, *, status: int) -> None:
    rank = os.environ.get("RANK")
    # faults in the settings are the same in every process: once is enough
    if status != 2 or rank in (None, "0"):
        where = f" [rank {rank}]" if rank is not None else ""
        print(f"{command}{where}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(COMMANDS)}"


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in COMMANDS.items()]
    return "\n".join(
        [
            "gc-dpr: dense passage retrieval training with a gradient cache",
            "",
            "usage: gc-dpr COMMAND [key=value …]",
            "",
            "commands, in the order of the flow:",
            *lines,
            "",
            "gc-dpr COMMAND --help shows every setting with its meaning and value.",
        ]
    )
