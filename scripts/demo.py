"""The steps of scripts/demo.sh: the toolkit's own commands, one after the other.

Every step is one command as a user would type it. What a step did is remembered in
``stages.json``; a second call repeats only steps whose settings, or whose inputs, have changed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

from gc_dpr import __version__
from gc_dpr.artifacts import write_json

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = {
    "factbook": "What money do people pay with in Sri Lanka?",
    "squad_sample": "Who won the first Super Bowl?",
}


class Demo:
    """Runs stages that are not finished yet.

    Args:
        folder: Where everything is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "stages.json"
        # stage → what was asked for, and which run it was
        self.done: dict[str, dict[str, str]] = {}
        if self.record.is_file():
            self.done = json.loads(self.record.read_text(encoding="utf-8"))

    def stage(self, name: str, command: str, *settings: str, after: tuple[str, ...] = ()) -> str:
        """Run one command unless it is finished; returns its output folder, relative to here.

        Args:
            name: Folder below the demo's folder, and the stage's name.
            command: A gc-dpr command.
            settings: Its settings.
            after: Stages it reads from: when one of them ran again, so does this one.
        """
        output = (self.folder / name).relative_to(ROOT)
        # a stage is only finished for the very run of the stages that it read from
        read_from = [f"{stage}@{self.done[stage]['run']}" for stage in after]
        wanted = " ".join((__version__, presets_digest(), command, *settings, *read_from))
        if self.done.get(name, {}).get("wanted") == wanted and (self.folder / name).is_dir():
            print(f"== {name}: finished before, skipped", flush=True)
            return str(output)
        self.done.pop(name, None)
        write_json(self.record, self.done)
        run(f"== {name}", command, *settings, f"output_dir={output}", "overwrite=true")
        self.done[name] = {"wanted": wanted, "run": str(time.time_ns())}
        write_json(self.record, self.done)
        return str(output)


def presets_digest() -> str:
    """Changes when a recipe or a preset does."""
    files = sorted((ROOT / "conf").rglob("*.yaml"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def run(title: str, *arguments: str) -> None:
    """Show a command and run it; leave with its exit status when it fails."""
    shown = " ".join(f"'{a}'" if " " in a or "{" in a else a for a in arguments)
    print(f"\n{title}\n$ gc-dpr {shown}", flush=True)
    status = subprocess.run([sys.executable, "-m", "gc_dpr", *arguments], cwd=ROOT, check=False)
    if status.returncode:
        sys.exit(status.returncode)


def main() -> None:
    """The whole chain, for the data set named in the arguments."""
    data = next((a.partition("=")[2] for a in sys.argv[1:] if a.startswith("data=")), "factbook")
    if data not in QUESTIONS:
        sys.exit(f"demo.sh: data={data}: expected one of {', '.join(QUESTIONS)}")
    extra = [a for a in sys.argv[1:] if not a.startswith("data=")]
    started = time.monotonic()
    demo = Demo(ROOT / "runs" / ("demo" if data == "factbook" else f"demo_{data}"))
    experiment = f"experiment={data}_cpu"
    files = (f"data={data}", "hardware=cpu")

    bm25 = demo.stage("bm25", "retrieve", "method=bm25", *files)
    runs = {"BM25": bm25}
    for name, row, settings in (
        ("before", "before training", (*extra, "train.epochs=0")),
        ("after", "after training", tuple(extra)),
    ):
        model = demo.stage(f"{name}/model", "train_dense_encoder", experiment, *settings)
        checkpoint = f"checkpoint={model}/checkpoint"
        embeddings = demo.stage(
            f"{name}/embeddings", "generate_embeddings", checkpoint, *files,
            after=(f"{name}/model",),
        )  # fmt: skip
        index = demo.stage(
            f"{name}/index", "build_index", f"embeddings_dir={embeddings}",
            after=(f"{name}/embeddings",),
        )  # fmt: skip
        runs[row] = demo.stage(
            f"{name}/run", "retrieve", checkpoint, f"index_dir={index}", *files,
            after=(f"{name}/index",),
        )  # fmt: skip
    table = ", ".join(f"{row}: {path}/run.json" for row, path in runs.items())
    demo.stage(
        "evaluation", "evaluate_retrieval", f"runs={{{table}}}", f"data={data}",
        after=("bm25", "before/run", "after/run"),
    )  # fmt: skip
    show_result(demo)
    run("== one question", "search", QUESTIONS[data], checkpoint, f"index_dir={index}", *files)
    print(f"\neverything is in {demo.folder}; it took {time.monotonic() - started:.0f} s")


def show_result(demo: Demo) -> None:
    """Print the table once more, so that a second call ends with it too."""
    print("\n" + (demo.folder / "evaluation" / "table.txt").read_text(encoding="utf-8"))
    for name in ("evaluation/accuracy_over_k.png", "after/model/training_loss.png"):
        print(f"plot: {demo.folder / name}")


if __name__ == "__main__":
    main()
