"""gc-dpr search "who …": one typed question → the best passages, on the screen."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

from gc_dpr.artifacts import write_json
from gc_dpr.cli.console import say, say_wrote
from gc_dpr.cli.models import apply_threads, load_bi_encoder
from gc_dpr.cli.output import claim_output
from gc_dpr.cli.retrieve import encode_options
from gc_dpr.config import SearchConfig
from gc_dpr.data import Passage, passages_by_id
from gc_dpr.distributed import process_group
from gc_dpr.retrieval import DenseIndex, check_fingerprint


def run(settings: SearchConfig) -> None:
    """Encode the question, search, print."""
    folder = None
    if settings.output_dir is not None:
        inputs = [settings.checkpoint, settings.index_dir, settings.data.passages_file]
        folder = claim_output(settings, owned=("search.json",), inputs=inputs)
    with process_group(settings.hardware.device) as device:
        apply_threads(settings.hardware)
        model = load_bi_encoder(str(settings.checkpoint), device)
        index = DenseIndex.load(str(settings.index_dir))
        check_fingerprint(index, model.fingerprint(), allow_mismatch=settings.allow_mismatch)
        question = str(settings.question)
        embedding = model.encode_questions([question], **encode_options(settings.hardware))
        scores, passage_ids = index.search(embedding, settings.top_k)
    passages = passages_by_id(
        settings.data.passages_file,
        passage_ids[0],
        quoting=settings.data.passages_quoting,  # type: ignore[arg-type]
    )
    found = [
        (passages[passage_id], float(score))
        for passage_id, score in zip(passage_ids[0], scores[0], strict=False)
    ]
    show(question, found, len(index))
    if folder is not None:
        say_wrote(write_found(folder.clear(), question, found))


def show(question: str, found: list[tuple[Passage, float]], pool_size: int) -> None:
    """Print the passages, best first."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    say(f"{question}  (best {len(found)} of {pool_size} passages)")
    for place, (passage, score) in enumerate(found, 1):
        say(f"\n{place}. {passage.title or 'untitled'}  (score {score:.4f}, passage {passage.id})")
        say(textwrap.fill(passage.text, width, initial_indent="   ", subsequent_indent="   "))


def write_found(output: Path, question: str, found: list[tuple[Passage, float]]) -> Path:
    """The same as JSON, for scripts."""
    passages = [
        {"id": passage.id, "title": passage.title, "text": passage.text, "score": score}
        for passage, score in found
    ]
    return write_json(output / "search.json", {"question": question, "passages": passages})
