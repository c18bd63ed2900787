"""Earlier results are kept until new ones can be made, and nobody else's file is touched."""

import pytest
from commands import run_command, succeed

from gc_dpr.artifacts import file_checksum

pytestmark = pytest.mark.pipeline


def contents(folder):
    return {
        str(path.relative_to(folder)): file_checksum(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def commands(chain, tiny_encoder_dir, world, tmp_path):
    """Every command with its settings; each has its own output folder."""
    checkpoint, index = f"checkpoint={chain.checkpoint}", f"index_dir={chain.index}"
    files = {name: f"data.{name}={path}" for name, path in world.items()}
    settings = {
        "train_dense_encoder": (
            f"model.name_or_path={tiny_encoder_dir}", files["train_file"], "train.epochs=0",
            "model.max_question_length=32", "model.max_passage_length=32",
        ),
        "generate_embeddings": (checkpoint, files["passages_file"]),
        "build_index": (f"embeddings_dir={chain.embeddings}",),
        "retrieve": (checkpoint, index, files["questions_file"], files["passages_file"]),
        "evaluate_retrieval": (f"runs={chain.run}/run.json",),
        "search": ("question=who?", checkpoint, index, files["passages_file"]),
    }  # fmt: skip
    return {name: (name, *values) for name, values in settings.items()}


NAMES = (
    "train_dense_encoder", "generate_embeddings", "build_index", "retrieve", "evaluate_retrieval",
    "search",
)  # fmt: skip
# What makes each command fail after its settings were found right.
WRONG = {
    "train_dense_encoder": "data.train_file=no.json",
    "generate_embeddings": "data.passages_file=no.tsv",
    "build_index": "embeddings_dir=no",
    "retrieve": "data.passages_file=no.tsv",
    "evaluate_retrieval": "runs=no.json",
    "search": "index_dir=no",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_life_of_an_output_folder(commands, name, tmp_path, monkeypatch):
    # new folders are made, below the current one, and nothing else is written there
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "a" / "b"
    command = (*commands[name], "output_dir=a/b")
    succeed(*command)
    assert any(output.iterdir())
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"], "Hydra or others wrote here"
    (output / "notes.txt").write_text("mine")
    (output / "sub").mkdir()
    (output / "sub" / "metrics.json").write_text("mine too")
    first = contents(output)

    # once more: refused, and everything is still there
    refused = run_command(*command)
    assert refused.status == 2
    assert f"output_dir={output} is not empty (it holds" in refused.error
    assert "overwrite=true" in refused.error
    assert contents(output) == first

    # a slip together with overwrite=true costs nothing
    key = WRONG[name].partition("=")[0]
    slipped = [text for text in command if text.partition("=")[0] != key]
    failed = run_command(*slipped, WRONG[name], "overwrite=true")
    assert failed.status == 1
    assert failed.error
    assert contents(output) == first

    # overwritten: the same again, what others put there is kept, leftovers of a killed run go
    leftover = output / f".{'checkpoint' if name.startswith('train') else 'metrics.json'}.tmp-7"
    if name not in ("build_index", "search"):
        leftover.mkdir()
    succeed(*command, "overwrite=true")
    assert not leftover.exists()
    second = contents(output)
    assert second.keys() == first.keys()
    assert second["notes.txt"] == first["notes.txt"]
    assert second["sub/metrics.json"] == first["sub/metrics.json"]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_never_written_over(commands, name, chain, world):
    """An index beside its embeddings would replace their meta.json, and so on."""
    places = {
        "train_dense_encoder": world["train_file"].parent,
        "generate_embeddings": chain.model,
        "build_index": chain.embeddings,
        "retrieve": chain.index,
        "evaluate_retrieval": chain.run,
        "search": chain.index,
    }
    before = contents(places[name])
    outcome = run_command(*commands[name], f"output_dir={places[name]}", "overwrite=true")
    assert outcome.status == 2
    assert f"output_dir={places[name]} holds " in outcome.error
    assert "which this command reads" in outcome.error
    assert contents(places[name]) == before


def test_training_goes_on_from_its_own_checkpoint_elsewhere(commands, chain, tmp_path):
    """The start model lies in the folder that overwrite=true would empty: TRAPS' kind of loss."""
    command = [t for t in commands["train_dense_encoder"] if not t.startswith("model.name_or_path")]
    command.append(f"model.name_or_path={chain.checkpoint}")
    refused = run_command(*command, f"output_dir={chain.model}", "overwrite=true")
    assert refused.status == 2
    assert chain.checkpoint.is_dir()
    succeed(*command, f"output_dir={tmp_path / 'next'}")
    assert (tmp_path / "next" / "checkpoint").is_dir()
