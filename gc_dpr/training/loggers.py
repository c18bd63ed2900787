"""Where the numbers of a run go: a JSONL file, a progress bar, or lines without a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class StepLogger:
    """Takes one record per optimizer step.

    Args:
        path: JSONL file, one record a line, flushed at once so that it can be followed; ``None``
            (every process but rank 0) records nothing.
        total_steps: Optimizer steps of the whole run, for the progress bar and the estimate.
    """

    def __init__(self, path: str | Path | None, *, total_steps: int) -> None:
        self.total_steps = total_steps
        self.started = self.last_line = time.monotonic()
        self.file: IO[str] | None = None
        self.bar: tqdm[Any] | None = None
        if path is not None:
            self.file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by close()
            on_terminal = sys.stderr.isatty()
            self.bar = tqdm(
                total=total_steps, desc="training", unit="step", disable=not on_terminal
            )

    def log(self, record: dict[str, Any]) -> None:
        """Write one step's record."""
        if self.file is None or self.bar is None:
            return
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        self.bar.set_postfix_str(
            f"loss {record['loss']:.4f}, in-batch accuracy {record['in_batch_accuracy']:.1%} "
            f"of {record['candidates']}",
            refresh=False,
        )
        self.bar.update()
        if self.bar.disable:
            self._line(record)

    def _line(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        step = record["step"]
        due = now - self.last_line >= SECONDS_BETWEEN_LINES
        if not (due or step in (1, self.total_steps)):
            return
        self.last_line = now
        left = (now - self.started) / step * (self.total_steps - step)
        logger.info(
            "step %d of %d: loss %.4f, in-batch accuracy %.1f %% (%d candidates), "
            "%.1f questions/s, about %d s left",
            step, self.total_steps, record["loss"], 100 * record["in_batch_accuracy"],
            record["candidates"], record["questions_per_second"], left,
        )  # fmt: skip

    def close(self) -> None:
        """End the bar and the file."""
        if self.bar is not None:
            self.bar.close()
        if self.file is not None:
            self.file.close()

    def __enter__(self) -> StepLogger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
