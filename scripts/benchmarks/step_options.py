"""The options that all benchmarks of a training step have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from batches import SQUAD_SAMPLE
from omegaconf import OmegaConf
from step_variants import Workload, build_workload

from gc_dpr.cli.launch import config_folder
from gc_dpr.data.records import TrainingExample


def new_parser(documentation: str | None) -> argparse.ArgumentParser:
    """A parser that shows defaults and, as its description, what stands above the examples."""
    return argparse.ArgumentParser(
        description=(documentation or "").partition("\n\n    python")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def add_step_options(
    parser: argparse.ArgumentParser, *, layers: int = 0, kept_chunks: int | None = None
) -> None:
    """Add the options; chunk budgets that are not given are the cpu preset's.

    Args:
        parser: The script's.
        layers: Default of ``--layers``.
        kept_chunks: Default of ``--kept-chunks``; None takes the preset's.
    """
    preset: Any = OmegaConf.load(config_folder() / "hardware" / "cpu.yaml")
    add = parser.add_argument
    meaning = "keep only the first so many layers of the encoder; 0 = all"
    add("--layers", type=int, default=layers, help=meaning)
    add("--threads", type=int, default=torch.get_num_threads(), help="torch's, for all variants")
    add("--data", default=str(SQUAD_SAMPLE), help="DPR training JSON")
    for side in ("question", "passage"):
        key = f"{side}_chunk_tokens"
        meaning = f"padded tokens of a chunk of {side}s, for ours"
        add(f"--{side}-chunk-tokens", type=int, default=preset[key], help=meaning)
    kept = "chunks of each side that ours keeps from the first pass and does not encode twice"
    default = preset["kept_chunks"] if kept_chunks is None else kept_chunks
    add("--kept-chunks", type=int, default=default, help=kept)
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where the encoder computes")
    add("--no-check", action="store_true", help="print a missed target, but do not fail for it")
    add("--plot", metavar="FILE", help="draw the figures there, as PNG")
    add("--json", metavar="FILE", help="write all figures there, too")


def workload(
    options: argparse.Namespace, examples: Sequence[TrainingExample], **settings: Any
) -> Workload:
    """The batch of these questions, and the model that the options ask for."""
    return build_workload(
        examples, layers=options.layers or None, device=options.device, **settings
    )


def describe(options: argparse.Namespace) -> str:
    """The setting in a few words."""
    layers = options.layers or "all"
    return f"layers: {layers}, threads: {options.threads}, {options.device}"


def describe_chunks(options: argparse.Namespace) -> str:
    """The chunk budgets of ours in a few words."""
    return (
        f"chunks of ours: {options.question_chunk_tokens} question and "
        f"{options.passage_chunk_tokens} passage tokens, {options.kept_chunks} kept"
    )


def tell(text: str) -> None:
    """Progress goes to standard error, results to standard output."""
    print(text, file=sys.stderr, flush=True)
