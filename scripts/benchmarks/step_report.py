"""What was measured of the variants of a training step: table, chart, differences, targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from charts import plot_bars
from step_variants import Counts

TOLERANCE, BF16_TOLERANCE = 1e-4, 5e-2  # relative; float32 and bfloat16 encoders
LEAST_SHARE = 0.70  # of the matrix-product rate, for ours
# name, a figure of Row, of this variant, relative to that one, at most
TARGETS = (
    ("time", "seconds", "ours", "padded_256_eager", 1 / 5),
    ("time", "seconds", "ours", "padded_256", 0.3),
    ("time", "seconds", "ours", "padded_longest", 0.58),
    ("time", "seconds", "ours", "sentence_transformers", 0.70),
    ("time", "seconds", "ours_unkept", "undivided", 0.70),
    ("time", "seconds", "ours", "undivided", 0.62),
    ("time", "seconds", "ours_bf16", "ours", 0.70),
    ("extra peak memory", "extra_peak_bytes", "ours", "undivided", 1 / 2),
)
HEADINGS = (
    "variant", "seconds", "x ours", "texts", "tokens/s", "padding", "forwards/text",
    "of matrix rate", "peak MiB", "x ours",
)  # fmt: skip


@dataclass
class Row:
    """What was measured of one variant."""

    variant: str
    extra_peak_bytes: int
    counts: Counts = field(default_factory=Counts)
    loss: float = 0.0
    loss_difference: float = 0.0  # relative to ours
    gradient_difference: float = 0.0
    rounds: list[float] = field(default_factory=list)  # seconds
    matrix_rate: float = 0.0  # operations per second, in the precision of the variant

    @property
    def seconds(self) -> float:
        """The fastest round: other work on the machine can only add to a time."""
        return min(self.rounds)

    @property
    def matrix_share(self) -> float:
        """Time that the matrix products alone would take / time taken."""
        return self.counts.flops / (self.seconds * self.matrix_rate)

    @property
    def tolerance(self) -> float:
        """How far loss and gradient may be from ours."""
        return BF16_TOLERANCE if self.variant == "ours_bf16" else TOLERANCE

    def cells(self, ours: Row) -> list[str]:
        """What the table says; ratios are multiples of ours."""
        return [
            self.variant,
            f"{self.seconds:.2f}",
            f"{self.seconds / ours.seconds:.2f}",
            f"{self.counts.texts:,}",
            f"{self.counts.tokens / self.seconds:,.0f}",
            f"{self.counts.padding:.1%}",
            f"{self.counts.forwards / self.counts.texts:.2f}",
            f"{self.matrix_share:.0%}",
            f"{self.extra_peak_bytes / 2**20:,.0f}",
            f"{self.extra_peak_bytes / ours.extra_peak_bytes:.2f}",
        ]


def format_table(rows: Sequence[Row], *, markdown: bool) -> str:
    """One line per variant, the first of which is ours; aligned, or as Markdown."""
    lines = [list(HEADINGS), *(row.cells(rows[0]) for row in rows)]
    if markdown:
        lines.insert(1, ["---", *["---:"] * (len(HEADINGS) - 1)])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def plot_seconds(rows: Sequence[Row], path: str, *, setting: str) -> None:
    """Draw the seconds of every variant."""
    plot_bars(
        {row.variant: row.seconds for row in rows},
        path,
        title="One training step, forward and backward",
        subtitle=setting,
        label="seconds, the fastest round",
        ours="ours",
    )


def are_equal(rows: Sequence[Row]) -> bool:
    """Print how far losses and gradients are from ours, and whether that is near enough."""
    equal = True
    for row in rows[1:]:
        same = max(row.loss_difference, row.gradient_difference) <= row.tolerance
        equal &= same
        print(
            f"{'equal' if same else 'DIFFERENT'}: {row.variant}, relative difference from ours "
            f"{row.loss_difference:.1e} in the loss, {row.gradient_difference:.1e} in the "
            f"gradient, at most {row.tolerance:g}"
        )
    return equal


def reach_targets(rows: Sequence[Row], *, bf16_products: bool) -> bool:
    """Print every target whose variants were measured, and whether all are met."""
    measured = {row.variant: row for row in rows}
    met = [_judge("share of the matrix rate, ours", -rows[0].matrix_share, -LEAST_SHARE)]
    for name, figure, of, against, limit in TARGETS:
        if of not in measured or against not in measured:
            continue
        ratio = getattr(measured[of], figure) / getattr(measured[against], figure)
        if of == "ours_bf16" and not bf16_products:
            print(f"not held: {name} of {of} / {against} = {ratio:.3f}, no bf16 in this hardware")
            continue
        met.append(_judge(f"{name} of {of} / {against}", ratio, limit))
    return all(met)


def _judge(what: str, value: float, limit: float) -> bool:
    """Both below zero: a figure that must be at least so much."""
    word = "at least" if limit < 0 else "at most"
    verdict = "met" if value <= limit else "MISSED"
    print(f"{verdict}: {what} = {abs(value):.3f}, {word} {abs(limit):g}")
    return value <= limit
