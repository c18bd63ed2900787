"""Run a command in this process as a user would type it; keep what it says and how it ends."""

import contextlib
import io
import logging
import warnings
from dataclasses import dataclass

import torch

from gc_dpr.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind on the screen."""

    status: int
    out: str
    err: str

    @property
    def error(self):
        """The one line that says what is wrong, and that nothing else says so."""
        lines = [line for line in self.err.splitlines() if ": error: " in line]
        assert len(lines) == 1, f"expected one error line, found:\n{self.err}"
        assert self.err.endswith(lines[0] + "\n"), f"something follows the error:\n{self.err}"
        assert "Traceback" not in self.err + self.out
        return lines[0]


def run_command(*arguments):
    """``gc-dpr ARGUMENT …``; logging, warnings and threads are afterwards as they were."""
    out, err = io.StringIO(), io.StringIO()
    with _restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
            status = 0
        except SystemExit as ending:
            status = ending.code or 0
    return Outcome(status, out.getvalue(), err.getvalue())


def succeed(*arguments):
    """The same for a command that must do its whole job."""
    outcome = run_command(*arguments)
    assert outcome.status == 0, outcome.err
    return outcome


@contextlib.contextmanager
def _restored():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    known = {name: logging.getLogger(name).level for name in list(root.manager.loggerDict)}
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in list(root.manager.loggerDict):
            if logging.getLogger(name).level != known.get(name, logging.NOTSET):
                logging.getLogger(name).setLevel(known.get(name, logging.NOTSET))
        logging.captureWarnings(False)
        torch.set_num_threads(threads)
