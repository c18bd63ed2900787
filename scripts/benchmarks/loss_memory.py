"""What the loss in blocks costs beside the one with the whole matrix of scores, in one run.

    python scripts/benchmarks/loss_memory.py --questions 16384 --passages 32768 --dim 256

Forward and backward of random representations, with the repeated passages of a real batch masked,
float32. Each row of the table is measured in a process of its own; "extra" is the peak beyond the
representations and their gradients. The dense loss is measured where its matrices fit, at a smaller
size, and ours there too for the ratios.

Exit status 1 if the losses differ or ours takes more than 300 MB at the full size.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from peak_memory import MEASURING_ENVIRONMENT, extra_peak_bytes
from torch import Tensor
from torch.nn import functional as F

from gc_dpr.data.known_positives import KnownPositives
from gc_dpr.losses import in_batch_nll

TARGET_BYTES = 300_000_000
TOLERANCE = 1e-4  # relative difference of the losses, float32
TEMPERATURE = 0.05


class Case(NamedTuple):
    """Representations with a gradient, (Q, D) and (P, D), and what the loss needs beside them."""

    questions: Tensor
    passages: Tensor
    labels: Tensor
    known_positives: KnownPositives


class Measured(NamedTuple):
    """One row of the table."""

    extra_bytes: int
    seconds: float
    loss: float


def main(arguments: list[str]) -> int:
    """Measure, print, and return the exit status."""
    options = parse(arguments)
    if options.measure is not None:
        print(*measure(options.measure, options))
        return 0
    full = (options.questions, options.passages)
    both = (min(full[0], options.dense_questions), min(full[1], options.dense_passages))
    rows = {
        ("in blocks", full): measure_in_subprocess("blocks", full, options),
        ("in blocks", both): measure_in_subprocess("blocks", both, options),
        ("dense", both): measure_in_subprocess("dense", both, options),
    }
    print(f"{'loss':<10} {'questions':>9} {'passages':>8} {'extra MB':>9} {'seconds':>8}")
    for (name, (questions, passages)), row in rows.items():
        megabytes = row.extra_bytes / 1e6
        print(f"{name:<10} {questions:>9} {passages:>8} {megabytes:>9.1f} {row.seconds:>8.2f}")
    ours, dense = rows["in blocks", both], rows["dense", both]
    difference = abs(ours.loss - dense.loss) / dense.loss
    print(f"in blocks / dense: memory {ours.extra_bytes / dense.extra_bytes:.3f}", end=", ")
    print(f"time {ours.seconds / dense.seconds:.2f}; losses differ by {difference:.1e}")
    extra = rows["in blocks", full].extra_bytes
    fits = extra <= TARGET_BYTES
    verdict = "reached" if fits else "MISSED"
    print(f"target: at most {TARGET_BYTES / 1e6:.0f} MB, found {extra / 1e6:.1f} MB: {verdict}")
    return 0 if fits and difference <= TOLERANCE else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--questions", type=int, default=16384)
    parser.add_argument("--passages", type=int, default=32768, help="at least as many")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--dense-questions", type=int, default=4096, help="size of the comparison")
    parser.add_argument("--dense-passages", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", choices=("blocks", "dense"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for questions, passages in (
        (options.questions, options.passages),
        (options.dense_questions, options.dense_passages),
    ):
        if not 1 <= questions <= passages:
            parser.error(f"{questions} questions need at least as many passages, found {passages}")
    return options


def measure_in_subprocess(
    name: str, size: tuple[int, int], options: argparse.Namespace
) -> Measured:
    """Run this script once more for one row."""
    print(f"{name}, {size[0]} x {size[1]} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__)), "--measure", name, "--device", options.device]
    numbers = {"questions": size[0], "passages": size[1]}
    for option in ("dim", "threads"):
        numbers[option] = getattr(options, option)
    # whatever the size, so that the check of the options holds
    numbers |= {"dense-questions": 1, "dense-passages": 1}
    command += [word for key, value in numbers.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **MEASURING_ENVIRONMENT},
    )
    extra, seconds, loss = done.stdout.split()[-3:]
    return Measured(int(extra), float(seconds), float(loss))


def measure(name: str, options: argparse.Namespace) -> Measured:
    """Do forward and backward once, after a small one that loads what torch loads on first use."""
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    loss_of = {"blocks": blocks_loss, "dense": dense_loss}[name]
    step_of(loss_of, make_case(8, 16, options.dim, device))()
    case = make_case(options.questions, options.passages, options.dim, device)
    step = step_of(loss_of, case)
    found: list[float] = []

    def work() -> None:
        start = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.extend((time.perf_counter() - start, float(loss)))

    peak = extra_peak_bytes(work, device)
    gradients = case.questions.nbytes + case.passages.nbytes  # as large as what they belong to
    return Measured(peak - gradients, *found)


def step_of(loss_of: Callable[[Case], Tensor], case: Case) -> Callable[[], Tensor]:
    """Forward and backward."""

    def step() -> Tensor:
        loss = loss_of(case)
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def make_case(questions: int, passages: int, dim: int, device: torch.device) -> Case:
    """Every passage occurs about twice; a question is near its positive."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randperm(passages, generator=generator)[:questions]
    keys = torch.randint(max(passages // 2, 1), (passages,), generator=generator)
    passage_reps = F.normalize(torch.randn(passages, dim, generator=generator), dim=1)
    noise = 3 * torch.randn(questions, dim, generator=generator) / dim**0.5
    question_reps = F.normalize(passage_reps[labels] + noise, dim=1)
    return Case(
        questions=question_reps.to(device).requires_grad_(),
        passages=passage_reps.to(device).requires_grad_(),
        labels=labels.to(device),
        known_positives=KnownPositives(
            keys[labels].to(device),
            torch.ones(questions, dtype=torch.int64, device=device),
            keys.to(device),
            labels.to(device),
        ),
    )


def blocks_loss(case: Case) -> Tensor:
    """The toolkit's loss."""
    return in_batch_nll(
        case.questions,
        case.passages,
        case.labels,
        temperature=TEMPERATURE,
        excluded=case.known_positives,
    ).loss


def dense_loss(case: Case) -> Tensor:
    """The same by torch's cross-entropy of the whole (Q, P) matrix."""
    scores = case.questions @ case.passages.T / TEMPERATURE  # (Q, P)
    excluded = case.known_positives(slice(None), slice(None))
    return F.cross_entropy(scores.masked_fill(excluded, -torch.inf), case.labels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
