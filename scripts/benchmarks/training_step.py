"""What one training step costs: the toolkit's against the usual ways, in one run, as ratios.

    python scripts/benchmarks/training_step.py                 all variants, the whole encoder
    python scripts/benchmarks/training_step.py --layers 2 --markdown --plot step.png
    python scripts/benchmarks/training_step.py --layers 2 --batch-size 32 --no-check   a quick look

Forward and backward of one batch of real squad_sample texts, without optimizer:

    ours            chunks by token budget, sorted by length (gc_dpr.training.batch_step)
    ours_unkept     the same; no chunk keeps its graph from the first pass, whatever the setting
    ours_bf16       ours with the encoder under bfloat16 autocast
    padded_256      every text padded to 256 tokens, gradient cache in chunks of 16
    padded_256_eager   the same without a fused attention kernel, which is GC-DPR's way
    padded_longest  padded to the side's longest, gradient cache in chunks of 16 (GradCache's way)
    sentence_transformers   its CachedMultipleNegativesRankingLoss, the fastest of several settings
    undivided       each side in one piece, padded to its longest, plain autograd

Columns: tokens/s without padding, every encoded text once; "of matrix rate" = the time that the
variant's matrix products would take at the rate measured in the same run / its time. The peer has
no mask of known positives, so it is compared with the loss and gradient of ours without the mask.

Exit status 1 if losses or gradients differ or a target is missed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

import torch
from batches import random_examples
from machine_rate import has_bf16_products, matrix_rate
from peak_memory import extra_peak_bytes, extra_peak_in_subprocess
from peer_step import PEER, PeerSetting, by_peer, fastest_setting, reason_against_peer
from step_options import (
    add_step_options,
    describe,
    describe_chunks,
    new_parser,
    tell,
    workload,
)
from step_report import Row, are_equal, format_table, plot_seconds, reach_targets
from step_variants import Step, Workload, by_rows, by_token_budget, counting, undivided

from gc_dpr.artifacts import write_json
from gc_dpr.errors import GcDprError

VARIANTS = (
    "ours", "ours_unkept", "ours_bf16", "padded_256", "padded_256_eager", "padded_longest", PEER,
    "undivided",
)  # fmt: skip
ROWS = 16  # of a chunk of the padded variants


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.memory_of is not None:
        print(measure_memory(options.memory_of, options))
        return 0
    names = variants_to_measure(options)
    work = make_workload(options)
    if PEER in names:
        arguments = [*arguments, *choose_peer_setting(work, options)]
    rows = [Row(name, memory_in_subprocess(name, arguments)) for name in names]
    steps = {name: make_step(name, work, options) for name in names}
    warm_up_and_compare(rows, steps, work, options)
    measure_times(rows, steps, work, options)
    print_report(rows, work, options)
    passed = [
        options.dropout > 0 or are_equal(rows),
        reach_targets(rows, bf16_products=has_bf16_products(work.device)) or options.no_check,
    ]
    if options.plot:
        plot_seconds(rows, options.plot, setting=describe_batch(work, options))
    if options.json:
        figures = [{**asdict(row), "seconds": row.seconds} for row in rows]
        write_json(options.json, {"options": vars(options), "rows": figures})
    return 0 if all(passed) else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser(__doc__)
    add_step_options(parser)
    add = parser.add_argument
    add(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS),
        help="what to measure; ours always is",
    )  # fmt: skip
    add("--batch-size", type=int, default=128, help="questions, each with one hard negative")
    add("--repeats", type=int, default=3, help="rounds over all variants; the fastest counts")
    add(
        "--try-budgets", nargs="+", type=int, default=[], metavar="TOKENS",
        help="measure ours also with each of these, on both sides",
    )  # fmt: skip
    add(
        "--peer-mini-batch", nargs="*", type=int, default=[8, 16, 32, 64, 128], metavar="TEXTS",
        help=f"values of mini_batch_size to try for {PEER}; the fastest in a trial is used",
    )  # fmt: skip
    add(
        "--peer-mini-batch-tokens", nargs="*", type=int, default=[1024, 2048, 4096],
        metavar="TOKENS", help="values of mini_batch_num_tokens to try",
    )  # fmt: skip
    add(
        "--distinct-for-all", action="store_true",
        help="let padded and undivided, too, encode a passage of several questions only once",
    )  # fmt: skip
    masks = "above 0, every variant draws its own masks and nothing can be compared"
    add("--dropout", type=float, default=0.0, help=masks)
    add("--markdown", action="store_true", help="print the table as Markdown")
    add("--memory-of", help=argparse.SUPPRESS)  # how the script calls itself
    options = parser.parse_args(arguments)
    if min(options.batch_size, options.threads, options.repeats) < 1:
        parser.error("--batch-size, --threads and --repeats must be at least 1")
    if not options.peer_mini_batch and not options.peer_mini_batch_tokens:
        parser.error("--peer-mini-batch and --peer-mini-batch-tokens: one of them needs a value")
    return options


def variants_to_measure(options: argparse.Namespace) -> list[str]:
    """Ours first; without the peer where it is not installed."""
    names = ["ours", *(name for name in options.variants if name != "ours")]
    names += [f"ours_{tokens}" for tokens in options.try_budgets]
    reason = reason_against_peer() if PEER in names else None
    if reason is not None:
        print(f"{PEER} is left out: it cannot be imported ({reason})")
        names.remove(PEER)
    if "ours_bf16" in names and not has_bf16_products(torch.device(options.device)):
        print("ours_bf16: the hardware has no bf16 products, its target is not held")
    return names


def make_workload(options: argparse.Namespace, *, at_most: int | None = None) -> Workload:
    """The batch that the options ask for, or the first ``at_most`` of its questions."""
    examples = random_examples(options.data, options.batch_size)[:at_most]
    return workload(
        options,
        examples,
        dropout=options.dropout,
        distinct_for_all=options.distinct_for_all,
    )


def peer_settings(options: argparse.Namespace) -> list[PeerSetting]:
    """All settings of the peer that the options name."""
    return [
        *(PeerSetting(rows=rows) for rows in options.peer_mini_batch),
        *(PeerSetting(tokens=tokens) for tokens in options.peer_mini_batch_tokens),
    ]


def choose_peer_setting(work: Workload, options: argparse.Namespace) -> list[str]:
    """Try the peer's settings, keep the fastest in the options, and return it as options."""
    tell(f"trial of the settings of {PEER} ...")
    settings = peer_settings(options)
    best, seconds = fastest_setting(work, settings)
    for setting, value in zip(settings, seconds, strict=False):
        print(f"trial: {PEER} with {setting}: {value:.2f} s")
    print(f"{PEER} is measured with {best}")
    options.peer_mini_batch = [] if best.tokens else [best.rows]
    options.peer_mini_batch_tokens = [best.tokens] if best.tokens else []
    return [
        "--peer-mini-batch", *map(str, options.peer_mini_batch),
        "--peer-mini-batch-tokens", *map(str, options.peer_mini_batch_tokens),
    ]  # fmt: skip


def make_step(
    name: str, work: Workload, options: argparse.Namespace, *, masked: bool = True
) -> Step:
    """The step of a variant; ``ours_N`` has a budget of N tokens on both sides."""
    if name == "undivided":
        return undivided(work)
    if name == PEER:
        return by_peer(work, peer_settings(options)[0])
    if name.startswith("padded"):
        length = None if name == "padded_longest" else 256
        attention = "eager" if name.endswith("eager") else None
        return by_rows(work, rows=ROWS, length=length, attention=attention)
    question_tokens, passage_tokens = options.question_chunk_tokens, options.passage_chunk_tokens
    suffix = name.removeprefix("ours").removeprefix("_")
    if suffix.isdigit():
        question_tokens = passage_tokens = int(suffix)
    return by_token_budget(
        work,
        question_tokens=question_tokens,
        passage_tokens=passage_tokens,
        kept=0 if suffix == "unkept" else options.kept_chunks,
        masked=masked,
        autocast_dtype=torch.bfloat16 if suffix == "bf16" else None,
    )


def memory_in_subprocess(variant: str, arguments: list[str]) -> int:
    """Measure a variant's extra peak memory in a process of its own, in bytes."""
    return extra_peak_in_subprocess(__file__, [*arguments, "--memory-of", variant], of=variant)


def measure_memory(variant: str, options: argparse.Namespace) -> int:
    """In the subprocess: extra peak memory of one step, after one with very few texts.

    The small step loads what is loaded once, such as the libraries' code.
    """
    small = make_workload(options, at_most=4)
    make_step(variant, small, options)()
    del small
    work = make_workload(options)
    return extra_peak_bytes(make_step(variant, work, options), work.device)


def warm_up_and_compare(
    rows: list[Row], steps: dict[str, Step], work: Workload, options: argparse.Namespace
) -> None:
    """Run every step once: count what goes through the encoders, compare with ours."""
    reference: tuple[float, torch.Tensor] | None = None
    for row in rows:
        with counting(work.model) as row.counts:
            row.loss, gradient = loss_and_gradient(steps[row.variant], work)
        reference = reference or (row.loss, gradient)  # of ours, which comes first
        expected = reference
        if row.variant == PEER:
            expected = loss_and_gradient(make_step("ours", work, options, masked=False), work)
        row.loss_difference = abs(row.loss / expected[0] - 1)
        # Of all parameters together: that of a key bias is 0 in theory and only noise in practice.
        row.gradient_difference = float((gradient - expected[1]).norm() / expected[1].norm())
        tell(f"warm-up, {row.variant}: loss {row.loss:.6f}")


def loss_and_gradient(step: Step, work: Workload) -> tuple[float, torch.Tensor]:
    """Loss and the gradient of all parameters, from zeroed gradients."""
    work.model.zero_grad(set_to_none=False)
    return float(step()), work.flat_gradient()


def measure_times(
    rows: list[Row], steps: dict[str, Step], work: Workload, options: argparse.Namespace
) -> None:
    """Rounds over all variants and the machine's matrix rate, so that all see the same machine."""
    hidden = work.model.embedding_dim
    rates: dict[torch.dtype, float] = {}
    for number in range(1, options.repeats + 1):
        for row in rows:
            row.rounds.append(work.timed(steps[row.variant]))
            tell(f"round {number} of {options.repeats}, {row.variant}: {row.rounds[-1]:.2f} s")
        for dtype in {dtype_of(row) for row in rows}:
            rate = matrix_rate(
                tokens=options.passage_chunk_tokens, hidden=hidden, device=work.device, dtype=dtype
            )
            rates[dtype] = max(rate, rates.get(dtype, 0.0))
    for row in rows:
        row.matrix_rate = rates[dtype_of(row)]


def dtype_of(row: Row) -> torch.dtype:
    """In which the variant multiplies matrices."""
    return torch.bfloat16 if row.variant == "ours_bf16" else torch.float32


def describe_batch(work: Workload, options: argparse.Namespace) -> str:
    """The setting in a line."""
    return (
        f"{len(work.batch.positive_index)} questions, {len(work.batch.passage_rows)} candidates, "
        f"{len(work.batch.passages)} distinct passages; {describe(options)}"
    )


def print_report(rows: list[Row], work: Workload, options: argparse.Namespace) -> None:
    """The setting, the table and the rates."""
    print(f"\n{describe_batch(work, options)}, fastest of {options.repeats} rounds")
    print(f"{describe_chunks(options)}\n")
    print(format_table(rows, markdown=options.markdown))
    rates = {str(dtype_of(row)).removeprefix("torch."): row.matrix_rate / 1e9 for row in rows}
    shown = ", ".join(f"{rate:,.0f} GFLOP/s in {name}" for name, rate in rates.items())
    print(f"\nmatrix-product rate of the machine: {shown}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GcDprError as error:
        sys.exit(f"error: {error}")
