"""The wheel is whole: built, unpacked into an empty folder, it runs the main job from elsewhere."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_data import write_world

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder that an installer would put on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_every_module_and_every_preset_is_inside(installed):
    for folder, inside in (("gc_dpr", "gc_dpr"), ("conf", "gc_dpr/conf")):
        for suffix in ("py", "yaml"):
            wanted = {p.relative_to(ROOT / folder) for p in (ROOT / folder).rglob(f"*.{suffix}")}
            found = {
                p.relative_to(installed / inside) for p in (installed / inside).rglob(f"*.{suffix}")
            }
            assert wanted <= found
    entry_points = next(installed.glob("*.dist-info/entry_points.txt")).read_text()
    assert "gc-dpr = gc_dpr.cli:main" in entry_points


@pytest.mark.pipeline
def test_the_five_commands_run_from_another_folder(installed, tiny_encoder_dir, tmp_path):
    write_world(tmp_path)

    def run(command, *settings):
        shown = subprocess.run(
            [sys.executable, "-W", "error::ImportWarning", "-m", "gc_dpr", command, *settings],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import gc_dpr; print(gc_dpr.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))
    run(
        "train_dense_encoder", f"model.name_or_path={tiny_encoder_dir}", "hardware=cpu",
        "model.max_question_length=32", "model.max_passage_length=64", "train.epochs=1",
        "train.batch_size=6", "data.train_file=train.json", "output_dir=model",
    )  # fmt: skip
    run(
        "generate_embeddings", "checkpoint=model/checkpoint", "data.passages_file=passages.tsv",
        "output_dir=embeddings",
    )  # fmt: skip
    run("build_index", "embeddings_dir=embeddings", "output_dir=index")
    run(
        "retrieve", "checkpoint=model/checkpoint", "index_dir=index", "output_dir=run", "top_k=5",
        "data.passages_file=passages.tsv", "data.questions_file=questions.csv",
    )  # fmt: skip
    shown = run("evaluate_retrieval", "runs=run/run.json", "output_dir=evaluation", "top_ks=[1,5]")
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert f"{100 * metrics['run']['top5_accuracy']:.1f}" in shown
