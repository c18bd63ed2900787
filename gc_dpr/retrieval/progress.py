"""Progress of a long loop: a bar on a terminal, a log line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import time
from types import TracebackType

from tqdm import tqdm

logger = logging.getLogger(__name__)


class Progress:
    """Reports how far a loop is; use as a context manager.

    Args:
        total: Items of the whole loop.
        what: What is being done ("encoding").
        unit: What is counted ("passages").
        enabled: False reports nothing: every process but the main one passes it.
        log_seconds: Seconds between two log lines when the output is not a terminal.
    """

    def __init__(
        self, total: int, *, what: str, unit: str, enabled: bool, log_seconds: float = 10.0
    ) -> None:
        self._total = total
        self._what = what
        self._unit = unit
        self._bar = tqdm(
            total=total, desc=what, unit=f" {unit}", disable=None if enabled else True, leave=False
        )
        self._logs = enabled and self._bar.disable
        self._log_seconds = log_seconds
        self._done = 0
        self._started = self._logged = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def update(self, items: int) -> None:
        """Count items as done."""
        self._done += items
        self._bar.update(items)
        now = time.monotonic()
        if self._logs and now - self._logged >= self._log_seconds and self._done < self._total:
            self._logged = now
            rate = self._done / (now - self._started)
            logger.info(
                "%s: %s of %s %s (%.0f %%), %.0f a second, about %.0f s left",
                self._what,
                f"{self._done:,}",
                f"{self._total:,}",
                self._unit,
                100 * self._done / self._total,
                rate,
                (self._total - self._done) / rate if rate else float("inf"),
            )
