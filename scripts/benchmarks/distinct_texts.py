"""What encoding each distinct passage only once saves, where the questions of a batch share them.

    python scripts/benchmarks/distinct_texts.py                  all 600 questions of squad_sample
    python scripts/benchmarks/distinct_texts.py --data squad/train.json.gz       1,024 of SQuAD's
    python scripts/benchmarks/distinct_texts.py --batch-size 32 --layers 1       a quick look

The toolkit's step on a batch of which about 60 % of the candidates are distinct, and the same step
with one row for each candidate. The questions are drawn from the beginning of the file, where
questions on the same paragraph stand together, from as many as give that share (--distinct-share);
drawn from all of SQuAD's training file 94 % of a batch of 1,024 would be distinct, one after the
other 31 to 42 %.

Time must fall in proportion: its ratio within 10 % of the ratio of padded tokens. Exit status 1 if
it does not, or if loss or gradient differ.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, field

import torch
from batches import neighbouring_examples
from charts import plot_bars
from step_options import (
    add_step_options,
    describe,
    describe_chunks,
    new_parser,
    tell,
    workload,
)
from step_report import TOLERANCE
from step_variants import Counts, Step, Workload, by_token_budget, counting

from gc_dpr.artifacts import write_json
from gc_dpr.errors import GcDprError

FROM_PROPORTION = 0.10  # how far the ratio of times may be from that of padded tokens


@dataclass
class Way:
    """One of the two ways, and what was measured of it."""

    name: str
    work: Workload
    step: Step
    counts: Counts = field(default_factory=Counts)
    loss: float = 0.0
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The fastest round."""
        return min(self.rounds)


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    once, apart = two_ways(options)
    equal = warm_up_and_compare(once, apart)
    for number in range(1, options.repeats + 1):
        for way in (once, apart):
            way.rounds.append(way.work.timed(way.step))
            tell(f"round {number} of {options.repeats}, {way.name}: {way.rounds[-1]:.2f} s")
    print_table([once, apart], options)
    met, ratios = judge(once, apart)
    if options.plot:
        plot([once, apart], ratios["distinct_share"], options)
    if options.json:
        rows = [
            {"name": w.name, "rounds": w.rounds, "counts": asdict(w.counts)} for w in (once, apart)
        ]
        write_json(options.json, {"options": vars(options), "rows": rows, "ratios": ratios})
    return 0 if equal and (met or options.no_check) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_step_options(parser)
    add = parser.add_argument
    add(
        "--batch-size", type=int, default=1024,
        help="questions, each with one hard negative; all of the file if it has fewer",
    )  # fmt: skip
    add("--distinct-share", type=float, default=0.6, help="wanted, of the candidates")
    add("--repeats", type=int, default=2, help="rounds over both ways; the fastest counts")
    options = parser.parse_args(arguments)
    if min(options.batch_size, options.threads, options.repeats) < 1:
        parser.error("--batch-size, --threads and --repeats must be at least 1")
    return options


def two_ways(options: argparse.Namespace) -> tuple[Way, Way]:
    """The toolkit's step as it is, and with one row for each candidate."""
    examples = neighbouring_examples(
        options.data, options.batch_size, distinct_share=options.distinct_share
    )
    if len(examples) < options.batch_size:
        print(f"{options.data} has {len(examples)} questions: the batch is all of them")
    work = workload(options, examples)

    def way(name: str, work: Workload) -> Way:
        step = by_token_budget(
            work,
            question_tokens=options.question_chunk_tokens,
            passage_tokens=options.passage_chunk_tokens,
            kept=options.kept_chunks,
        )
        return Way(name, work, step)

    return way("distinct texts", work), way("every candidate", work.every_candidate_apart())


def warm_up_and_compare(once: Way, apart: Way) -> bool:
    """Count what both ways encode; print whether their losses and gradients are the same."""
    gradients = []
    for way in (once, apart):
        way.work.model.zero_grad(set_to_none=False)
        with counting(way.work.model) as way.counts:
            way.loss = float(way.step())
        gradients.append(way.work.flat_gradient())
        tell(f"warm-up, {way.name}: loss {way.loss:.6f}")
    in_loss = abs(once.loss / apart.loss - 1)
    in_gradient = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    equal = max(in_loss, in_gradient) <= TOLERANCE
    print(
        f"{'equal' if equal else 'DIFFERENT'}: relative difference {in_loss:.1e} in the loss, "
        f"{in_gradient:.1e} in the gradient, at most {TOLERANCE:g}"
    )
    return equal


def print_table(ways: list[Way], options: argparse.Namespace) -> None:
    """One line per way."""
    batch = ways[0].work.batch
    print(
        f"\n{len(batch.positive_index)} questions, {len(batch.passage_rows)} candidates, "
        f"{len(batch.passages)} distinct passages; {describe(options)}, fastest of "
        f"{options.repeats} rounds\n{describe_chunks(options)}\n"
    )
    print(f"{'encoded':<16}{'texts':>8}{'padded tokens':>15}{'padding':>9}{'seconds':>9}")
    for way in ways:
        counts = way.counts
        print(
            f"{way.name:<16}{counts.texts:>8,}{counts.padded_tokens:>15,}{counts.padding:>9.1%}"
            f"{way.seconds:>9.2f}"
        )


def judge(once: Way, apart: Way) -> tuple[bool, dict[str, float]]:
    """Print the ratios, and whether time falls in proportion; return both."""
    batch = once.work.batch
    share = len(batch.passages) / len(batch.passage_rows)
    tokens = once.counts.padded_tokens / apart.counts.padded_tokens
    time = once.seconds / apart.seconds
    met = abs(time / tokens - 1) <= FROM_PROPORTION
    print(
        f"\ndistinct passages / candidates {share:.3f}, padded tokens {tokens:.3f}, time {time:.3f}"
    )
    print(
        f"{'met' if met else 'MISSED'}: ratio of times / ratio of padded tokens = "
        f"{time / tokens:.3f}, within {FROM_PROPORTION:.2f} of 1"
    )
    return met, {"distinct_share": share, "padded_tokens": tokens, "time": time}


def plot(ways: list[Way], share: float, options: argparse.Namespace) -> None:
    """Draw the seconds of both ways."""
    questions = len(ways[0].work.batch.positive_index)
    plot_bars(
        {way.name: way.seconds for way in ways},
        options.plot,
        title="One training step where questions share passages",
        subtitle=f"{questions} questions, {share:.0%} of the candidates "
        f"distinct; {describe(options)}",
        label="seconds, the fastest round",
        ours="distinct",
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GcDprError as error:
        sys.exit(f"error: {error}")
