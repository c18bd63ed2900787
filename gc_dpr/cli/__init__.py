"""The command line: ``gc-dpr COMMAND key=value …`` or ``scripts/COMMAND.py key=value …``."""

from gc_dpr.cli.main import main

__all__ = ["main"]
