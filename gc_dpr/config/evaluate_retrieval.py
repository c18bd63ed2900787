"""Settings of evaluate_retrieval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gc_dpr.config.command import CommandConfig
from gc_dpr.config.fields import at_least, group, one_of, option
from gc_dpr.config.groups import DataConfig
from gc_dpr.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class EvaluateRetrievalConfig(CommandConfig):
    """Measure top-k accuracy of one or several runs, side by side."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("output_dir", "runs")

    runs: Any = option(
        None,
        "Run file that retrieve wrote (DPR JSON, or TREC with data.questions_file and "
        "data.passages_file), a list of them, or names with files: '{BM25: a.json, ours: b.json}'",
    )
    top_ks: list[int] = option([1, 5, 20, 100], "The k of the table")
    use_title: bool = option(False, "Look for answers in the title too (DPR: false)")
    empty_answers: str = option(
        "match", "Answers without any token: match = every passage counts, as DPR does; ignore"
    )
    workers: int = option(0, "Processes that match answers; 0 = this one")
    data: DataConfig = group(DataConfig, "the data set")

    def check(self) -> None:
        """Refuse impossible values."""
        one_of("empty_answers", self.empty_answers, ("match", "ignore"))
        at_least("workers", self.workers, 0)
        if not self.top_ks or any(k < 1 for k in self.top_ks):
            raise ConfigError(f"top_ks={self.top_ks}: expected whole numbers of 1 or more")
