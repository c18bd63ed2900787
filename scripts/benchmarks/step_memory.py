"""Does the memory of a step depend on the chunk or on the batch?

    python scripts/benchmarks/step_memory.py                        2 layers, minutes
    python scripts/benchmarks/step_memory.py --layers 0 --plot memory.png      the whole encoder
    python scripts/benchmarks/step_memory.py --batch-sizes 8 32 --layers 1     a quick look

Extra peak memory of one training step of the toolkit at several batch sizes, each in a process of
its own. What must grow with the batch are its representations and their gradients, 2 x texts x
dims x 4 bytes; everything beyond may be at most 10 % more for the largest batch than for the
smallest. Every question brings its positive and one hard negative.

The questions of the file are repeated as often as the batch needs. A running number stands in
front of every question and passage, so that all texts differ and none is shared: the dearest case.
No chunk keeps its graph from the first pass, unless --kept-chunks says so: kept graphs are memory
that the setting gives away, and a small batch has not enough chunks to keep.

Exit status 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass

import torch
from batches import numbered_examples
from charts import plot_bars
from peak_memory import extra_peak_bytes, extra_peak_in_subprocess
from step_options import add_step_options, describe, describe_chunks, new_parser, workload
from step_variants import Step, Workload, by_token_budget

from gc_dpr.artifacts import write_json
from gc_dpr.errors import GcDprError

MOST_GROWTH = 1.10  # of the memory beyond the representations, largest batch against smallest
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """What was measured of one batch size; all in bytes.

    Attributes:
        questions: Of the batch.
        texts: Encoded; questions and distinct passages.
        extra_peak: Of the step, beyond model, gradients and token ids, which were there before.
        reps: Representations and their gradients.
        token_ids: Of the batch, held during the step.
    """

    questions: int
    texts: int
    extra_peak: int
    reps: int
    token_ids: int

    @property
    def beyond_reps(self) -> int:
        """What the step needs besides representations and their gradients."""
        return self.extra_peak - self.reps


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measure_memory(options.memory_of, options))
        return 0
    rows = []
    for size in sorted(options.batch_sizes):
        of = ["--memory-of", str(size)]
        peak = extra_peak_in_subprocess(__file__, [*arguments, *of], of=f"a batch of {size}")
        rows.append(describe_size(make_workload(options, size), peak))
    print_table(rows, options)
    ratio = rows[-1].beyond_reps / rows[0].beyond_reps
    met = ratio <= MOST_GROWTH
    print(
        f"\n{'met' if met else 'MISSED'}: memory beyond the representations at a batch of "
        f"{rows[-1].questions} / {rows[0].questions} = {ratio:.3f}, at most {MOST_GROWTH:.2f}"
    )
    if options.plot:
        plot(rows, options)
    if options.json:
        figures = [{**asdict(row), "beyond_reps": row.beyond_reps} for row in rows]
        write_json(options.json, {"options": vars(options), "rows": figures, "ratio": ratio})
    return 0 if met or options.no_check else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_step_options(parser, layers=2, kept_chunks=0)
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=[256, 1024, 4096], metavar="QUESTIONS",
        help="the smallest and the largest are compared",
    )  # fmt: skip
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # how it calls itself
    options = parser.parse_args(arguments)
    if min(options.batch_sizes) < 1 or options.threads < 1:
        parser.error("--batch-sizes and --threads must be at least 1")
    return options


def make_workload(options: argparse.Namespace, size: int) -> Workload:
    """A batch of so many questions."""
    return workload(options, numbered_examples(options.data, size))


def make_step(work: Workload, options: argparse.Namespace) -> Step:
    """The toolkit's step."""
    return by_token_budget(
        work,
        question_tokens=options.question_chunk_tokens,
        passage_tokens=options.passage_chunk_tokens,
        kept=options.kept_chunks,
    )


def measure_memory(size: int, options: argparse.Namespace) -> int:
    """In the subprocess: extra peak memory of one step, after a small one that loads libraries."""
    small = make_workload(options, min(4, size))
    make_step(small, options)()
    del small
    work = make_workload(options, size)
    return extra_peak_bytes(make_step(work, options), work.device)


def describe_size(work: Workload, extra_peak: int) -> Row:
    """Put the measured peak beside what the batch itself holds."""
    sides = [work.batch.questions, work.batch.passages]
    texts = sum(len(side) for side in sides)
    return Row(
        questions=len(work.batch.questions),
        texts=texts,
        extra_peak=extra_peak,
        reps=2 * texts * work.model.embedding_dim * 4,
        token_ids=sum(side.ids.nbytes for side in sides),
    )


def print_table(rows: list[Row], options: argparse.Namespace) -> None:
    """One line per batch size, in bytes."""
    print(f"\n{describe(options)}; {describe_chunks(options)}; bytes\n")
    headings = ("questions", "texts", "extra peak", "reps + gradients", "beyond them", "token ids")
    print("".join(heading.rjust(18) for heading in headings))
    for row in rows:
        cells = (
            row.questions, row.texts, row.extra_peak, row.reps, row.beyond_reps, row.token_ids,
        )  # fmt: skip
        print("".join(f"{cell:,}".rjust(18) for cell in cells))


def plot(rows: list[Row], options: argparse.Namespace) -> None:
    """Two bars per batch size: everything, and what lies beyond the representations."""
    bars: dict[str, float] = {}
    for row in rows:
        bars[f"all, {row.questions} questions"] = row.extra_peak / MIB
        bars[f"beyond reps, {row.questions} questions"] = row.beyond_reps / MIB
    plot_bars(
        bars,
        options.plot,
        title="Extra peak memory of a training step",
        subtitle=f"{describe(options)}; one hard negative per question, no text twice",
        label="MiB beyond model, gradients and token ids",
        ours="beyond",
        form="{:,.0f}",
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GcDprError as error:
        sys.exit(f"error: {error}")
