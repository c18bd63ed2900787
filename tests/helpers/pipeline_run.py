"""The main job on the small world, one command after the other."""

from dataclasses import dataclass
from pathlib import Path

from commands import Outcome, succeed


@dataclass(frozen=True)
class Pipeline:
    """Where a chain of commands wrote, and what it printed."""

    model: Path
    embeddings: Path
    index: Path
    run: Path
    outcomes: dict[str, Outcome]

    @property
    def checkpoint(self):
        return self.model / "checkpoint"


# Chunks of two or three texts, so that the gradient cache is really used.
TRAINING = (
    "model.dropout=0", "model.max_question_length=32", "model.max_passage_length=60",
    "hardware.device=cpu", "hardware.question_chunk_rows=2", "hardware.passage_chunk_rows=3",
)  # fmt: skip


def file_settings(world, *names):
    """``data.NAME=PATH`` for some or all files of a world."""
    return [f"data.{name}={world[name]}" for name in names or world]


def run_pipeline(folder, encoder, world, *training, top_k=10):
    """Train, embed, index, retrieve; everything below ``folder``."""
    folder = Path(folder)
    names = ("model", "embeddings", "index", "run")
    paths = {name: folder / name for name in names}
    checkpoint = f"checkpoint={paths['model'] / 'checkpoint'}"
    steps = {
        "model": (
            "train_dense_encoder", f"model.name_or_path={encoder}",
            *file_settings(world, "train_file"), *TRAINING, *training,
        ),
        "embeddings": (
            "generate_embeddings", checkpoint, *file_settings(world, "passages_file"),
            "hardware=cpu",
        ),
        "index": ("build_index", f"embeddings_dir={paths['embeddings']}"),
        "run": (
            "retrieve", checkpoint, f"index_dir={paths['index']}", f"top_k={top_k}",
            *file_settings(world, "questions_file", "passages_file"), "hardware=cpu",
        ),
    }  # fmt: skip
    outcomes = {name: succeed(*steps[name], f"output_dir={paths[name]}") for name in names}
    return Pipeline(**paths, outcomes=outcomes)
