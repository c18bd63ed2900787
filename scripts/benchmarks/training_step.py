"""What one training step costs: the toolkit's against the usual ways, in one run, as ratios.

    python scripts/benchmarks/training_step.py                 the table of README.md beside it
    python scripts/benchmarks/training_step.py --layers 2 --batch-size 32 --no-check   a quick look

Forward and backward of one batch of real squad_sample texts, without optimizer:

    ours            chunks by token budget, sorted by length (gc_dpr.training.batch_step)
    padded_256      every text padded to 256 tokens, gradient cache in chunks of 16 (GC-DPR's way)
    padded_longest  padded to the side's longest, gradient cache in chunks of 16 (GradCache's way)
    undivided       each side in one piece, padded to its longest, plain autograd

Exit status 1 if losses or gradients differ or a target is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from peak_memory import MEASURING_ENVIRONMENT, extra_peak_bytes
from step_variants import (
    Counts,
    Step,
    Workload,
    build_workload,
    by_rows,
    by_token_budget,
    counting,
    undivided,
)

from gc_dpr.artifacts import write_json
from gc_dpr.cli.launch import config_folder
from gc_dpr.errors import GcDprError

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = ("ours", "padded_256", "padded_longest", "undivided")
ROWS = 16  # of a chunk of the padded variants
TOLERANCE = 1e-4  # relative, for float32
# name, a figure of Row, of this variant, relative to that one, at most
TARGETS = (
    ("time", "seconds", "ours", "padded_256", 1 / 4),
    ("extra peak memory", "extra_peak_bytes", "ours", "undivided", 1 / 2),
)


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

    @property
    def seconds(self) -> float:
        """The fastest round: other work on the machine can only add to a time."""
        return min(self.rounds)


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measure_memory(options.memory_of, options))
        return 0
    names = [*options.variants, *(f"ours_{tokens}" for tokens in options.try_budgets)]
    # First, so that the subprocesses do not share the machine's memory with what is built here.
    rows = [Row(name, memory_in_subprocess(name, arguments)) for name in names]
    work = workload(options, questions=options.batch_size)
    steps = {name: make_step(name, work, options) for name in names}
    warm_up_and_compare(rows, steps, work)
    for number in range(1, options.repeats + 1):
        for row in rows:
            row.rounds.append(timed(steps[row.variant], work))
            tell(f"round {number} of {options.repeats}, {row.variant}: {row.rounds[-1]:.2f} s")
    print_table(rows, work, options)
    passed = [are_equal(rows, options), reach_targets(rows) or options.no_check]
    if options.json:
        figures = [{**asdict(row), "seconds": row.seconds} for row in rows]
        write_json(options.json, {"options": vars(options), "rows": figures})
    return 0 if all(passed) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; chunk budgets that are not given are the cpu preset's."""
    preset: Any = OmegaConf.load(config_folder() / "hardware" / "cpu.yaml")
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n    python")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--variants", nargs="+", choices=VARIANTS, default=["ours", "padded_256", "undivided"],
        help="what to measure; ours always is",
    )  # fmt: skip
    add("--layers", type=int, help="keep only the first so many layers of the encoder; None = all")
    add("--batch-size", type=int, default=128, help="questions, each with one hard negative")
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's, for all variants")
    add("--repeats", type=int, default=3, help="rounds over all variants; the fastest counts")
    data = ROOT / "data" / "squad_sample" / "train.json"
    add("--data", default=str(data), help="DPR training JSON")
    for side in ("question", "passage"):
        key = f"{side}_chunk_tokens"
        meaning = f"padded tokens of a chunk of {side}s, for ours"
        add(f"--{side}-chunk-tokens", type=int, default=preset[key], help=meaning)
    kept = "chunks of each side that ours keeps from the first pass and does not encode twice"
    add("--kept-chunks", type=int, default=preset["kept_chunks"], help=kept)
    add(
        "--try-budgets", nargs="+", type=int, default=[], metavar="TOKENS",
        help="measure ours also with each of these, on both sides",
    )  # fmt: skip
    add(
        "--distinct-for-all", action="store_true",
        help="let the other variants, too, encode a passage of several questions only once",
    )  # fmt: skip
    masks = "above 0, every variant draws its own masks and nothing can be compared"
    add("--dropout", type=float, default=0.0, help=masks)
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where the encoder computes")
    add("--no-check", action="store_true", help="print a missed target, but do not fail for it")
    add("--json", metavar="FILE", help="write all figures there, too")
    add("--memory-of", help=argparse.SUPPRESS)  # how the script calls itself
    options = parser.parse_args(arguments)
    if min(options.batch_size, options.threads, options.repeats) < 1:
        parser.error("--batch-size, --threads and --repeats must be at least 1")
    options.variants = ["ours", *(name for name in options.variants if name != "ours")]
    return options


def workload(options: argparse.Namespace, *, questions: int) -> Workload:
    """The batch that the options ask for, of so many questions."""
    return build_workload(
        options.data,
        questions=questions,
        layers=options.layers,
        dropout=options.dropout,
        device=options.device,
        distinct_for_all=options.distinct_for_all,
    )


def make_step(name: str, work: Workload, options: argparse.Namespace) -> Step:
    """The step of a variant; ``ours_N`` has a budget of N tokens on both sides."""
    if name == "undivided":
        return undivided(work)
    if name.startswith("padded"):
        return by_rows(work, rows=ROWS, length=256 if name == "padded_256" else None)
    question_tokens, passage_tokens = options.question_chunk_tokens, options.passage_chunk_tokens
    if name != "ours":
        question_tokens = passage_tokens = int(name.removeprefix("ours_"))
    return by_token_budget(
        work,
        question_tokens=question_tokens,
        passage_tokens=passage_tokens,
        kept=options.kept_chunks,
    )


def memory_in_subprocess(variant: str, arguments: list[str]) -> int:
    """Measure a variant's extra peak memory in a process of its own, in bytes."""
    tell(f"memory of {variant} ...")
    command = [sys.executable, __file__, *arguments, "--memory-of", variant]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **MEASURING_ENVIRONMENT}
    )
    if done.returncode != 0:
        raise GcDprError(f"the subprocess that measures {variant} ended with {done.returncode}")
    return int(done.stdout.split()[-1])


def measure_memory(variant: str, options: argparse.Namespace) -> int:
    """In the subprocess: extra peak memory of one step, after one with very few texts.

    The small step loads what is loaded once, such as the libraries' code.
    """
    small = workload(options, questions=min(4, options.batch_size))
    make_step(variant, small, options)()
    del small
    work = workload(options, questions=options.batch_size)
    return extra_peak_bytes(make_step(variant, work, options), work.device)


def warm_up_and_compare(rows: list[Row], steps: dict[str, Step], work: Workload) -> None:
    """Run every step once: count what goes through the encoders, compare with the first row."""
    reference = torch.empty(0)
    for row in rows:
        work.model.zero_grad(set_to_none=False)
        with counting(work.model) as row.counts:
            row.loss = float(steps[row.variant]())
        gradient = torch.cat(
            [p.grad.flatten() for p in work.model.parameters() if p.grad is not None]
        )
        reference = reference if len(reference) else gradient
        row.loss_difference = abs(row.loss / rows[0].loss - 1)
        # Of all parameters together: that of a key bias is 0 in theory and only noise in practice.
        row.gradient_difference = float((gradient - reference).norm() / reference.norm())
        tell(f"warm-up, {row.variant}: loss {row.loss:.6f}")


def timed(step: Step, work: Workload) -> float:
    """Seconds of one step."""
    work.model.zero_grad(set_to_none=False)
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    started = time.perf_counter()
    step()
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return time.perf_counter() - started


def print_table(rows: list[Row], work: Workload, options: argparse.Namespace) -> None:
    """One line per variant; ratios are multiples of ours, in the first line."""
    ours = rows[0]
    print(
        f"\n{len(work.batch.questions)} questions, {len(work.batch.passage_rows)} candidates, "
        f"{len(work.batch.passages)} distinct passages; {options.layers or 'all'} layers, "
        f"{options.threads} threads, {options.device}, fastest of {options.repeats}; chunks of "
        f"ours: {options.question_chunk_tokens} question and {options.passage_chunk_tokens} "
        f"passage tokens, {options.kept_chunks} kept"
    )
    print(
        f"{'variant':<15}{'seconds':>9}{'x ours':>8}{'texts':>7}{'padded tokens':>15}{'padding':>9}"
        f"{'forwards/text':>15}{'extra peak MiB':>16}{'x ours':>8}"
    )
    for row in rows:
        counts = row.counts
        print(
            f"{row.variant:<15}{row.seconds:>9.2f}{row.seconds / ours.seconds:>8.2f}"
            f"{counts.texts:>7}{counts.padded_tokens:>15,}{counts.padding:>9.1%}"
            f"{counts.forwards / counts.texts:>15.2f}{row.extra_peak_bytes / 2**20:>16,.0f}"
            f"{row.extra_peak_bytes / ours.extra_peak_bytes:>8.2f}"
        )


def are_equal(rows: list[Row], options: argparse.Namespace) -> bool:
    """Print how far losses and gradients are from ours, and whether that is near enough."""
    if options.dropout:
        print(f"dropout {options.dropout}: other masks in every variant, nothing compared")
        return True
    equal = True
    for row in rows[1:]:
        same = max(row.loss_difference, row.gradient_difference) <= TOLERANCE
        equal &= same
        print(
            f"{'equal' if same else 'DIFFERENT'}: {row.variant}, relative difference from ours "
            f"{row.loss_difference:.1e} in the loss, {row.gradient_difference:.1e} in the gradient"
        )
    return equal


def reach_targets(rows: list[Row]) -> bool:
    """Print every target whose two variants were measured, and whether all are met."""
    measured = {row.variant: row for row in rows}
    all_met = True
    for name, figure, of, against, limit in (t for t in TARGETS if t[3] in measured):
        ratio = getattr(measured[of], figure) / getattr(measured[against], figure)
        met = ratio <= limit
        all_met &= met
        verdict = "met" if met else "MISSED"
        print(f"{verdict}: {name} of {of} / {against} = {ratio:.3f}, at most {limit:g}")
    return all_met


def tell(text: str) -> None:
    """Progress goes to standard error, results to standard output."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GcDprError as error:
        sys.exit(f"error: {error}")
