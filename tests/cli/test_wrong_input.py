"""Every wrong input gets one line that says what, where and what to do, and leaves nothing."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import run_command, succeed
from pipeline_run import TRAINING
from tiny_data import training_example

pytestmark = pytest.mark.pipeline


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files with one fault each."""
    folder = tmp_path_factory.mktemp("faults")

    def examples(name, *records):
        (folder / name).write_text(json.dumps(list(records)), encoding="utf-8")

    def with_positives(number, positives):
        return {**training_example(number), "positive_ctxs": positives}

    examples("empty.json")
    examples("no_positives.json", with_positives(1, []), with_positives(2, []))
    examples("one_without.json", *(training_example(n) for n in (0, 4)), with_positives(1, []))
    examples("no_negatives.json", *(training_example(n, negatives=0) for n in (1, 2, 3)))
    examples("one.json", training_example(1, negatives=0))
    examples("wrong_type.json", with_positives(1, "text"))
    examples("two.json", training_example(0), training_example(2))
    text = (folder / "two.json").read_text()
    (folder / "cut.json").write_text(text[: len(text) - 300])
    (folder / "comma.json").write_text(text.replace('"question"', ',"question"', 1))
    header = "id\ttext\ttitle\n"
    (folder / "stray.tsv").write_text(header + '1\t"half open\tA\n2\tx\tB\n3\ty\tC\n')
    (folder / "columns.tsv").write_text(header + "1\tx\tA\n2\ty\n")
    (folder / "twice.tsv").write_text(header + "1\tx\tA\n2\ty\tB\n1\tz\tC\n")
    (folder / "header.tsv").write_text(header)
    (folder / "latin1.tsv").write_bytes((header + "1\tM\u00fcnchen\tA\n").encode("latin-1"))
    (folder / "empty.csv").write_text("")
    (folder / "answers.csv").write_text("who?\t['a'\n")
    (folder / "short.trec").write_text("0 Q0 p1 1 2.5 x\n1 Q0 p1 1\n")
    (folder / "ids.trec").write_text("q77 Q0 p1 1 2.5 x\n")
    (folder / "passage.trec").write_text("0 Q0 nowhere 1 2.5 x\n")
    return folder


def arguments(command, chain, encoder, world):
    """A command that would work; what a test gives replaces a setting."""
    files = {name: f"data.{name}={path}" for name, path in world.items()}
    checkpoint = f"checkpoint={chain.checkpoint}"
    return {
        "train_dense_encoder": (
            f"model.name_or_path={encoder}", files["train_file"], *TRAINING, "train.batch_size=4",
            "train.max_steps=2",
        ),
        "generate_embeddings": (checkpoint, files["passages_file"]),
        "build_index": (f"embeddings_dir={chain.embeddings}",),
        "retrieve": (
            checkpoint, f"index_dir={chain.index}", files["questions_file"],
            files["passages_file"],
        ),
        "evaluate_retrieval": (f"runs={chain.run}/run.json",),
        "search": ("question=who?", checkpoint, f"index_dir={chain.index}", files["passages_file"]),
    }[command]  # fmt: skip


class Runner:
    """Runs a command with some settings exchanged and its output in a fresh folder."""

    def __init__(self, chain, encoder, world, files, output):
        self.places = {
            "faults": files, "world": world["train_file"].parent, "model": chain.model,
            "embeddings": chain.embeddings, "index": chain.index, "run": chain.run,
            "encoder": encoder,
        }  # fmt: skip
        self.inputs = (chain, encoder, world)
        self.output = output

    def arguments(self, command, *changes):
        changes = [change.format(**self.places) for change in changes]
        keys = {change.partition("=")[0] for change in changes}
        usual = arguments(command, *self.inputs)
        kept = [text for text in usual if text.partition("=")[0] not in keys]
        return [command, f"output_dir={self.output}", *kept, *changes]

    def __call__(self, command, *changes):
        return run_command(*self.arguments(command, *changes))


@pytest.fixture
def run(chain, tiny_encoder_dir, world, files, tmp_path):
    return Runner(chain, tiny_encoder_dir, world, files, tmp_path / "output")


TRAIN, EMBED, INDEX = "train_dense_encoder", "generate_embeddings", "build_index"
RETRIEVE, EVALUATE, SEARCH = "retrieve", "evaluate_retrieval", "search"
TREC = ("data.questions_file={world}/questions.csv", "data.passages_file={world}/passages.tsv")

CASES = [
    # not there
    (TRAIN, "data.train_file={faults}/no.json", 1, "{faults}/no.json: file not found"),
    (TRAIN, "data.train_file={faults}/no*.jsonl", 1, "no file matches this glob"),
    (TRAIN, "data.train_file={faults}", 1, "is a folder, expected a file"),
    (TRAIN, "data.train_file=[{faults}/two.json,{faults}/two.json]", 1, "named twice"),
    (EMBED, "data.passages_file={faults}/no.tsv", 1, "{faults}/no.tsv: file not found"),
    (RETRIEVE, "data.questions_file={faults}/no.csv", 1, "{faults}/no.csv: file not found"),
    (RETRIEVE, "data.passages_file={faults}/no*.tsv", 1, "no file matches this glob"),
    (TRAIN, "model.name_or_path={faults}/model", 1, "{faults}/model does not exist"),
    (TRAIN, "model.name_or_path=no-such-model", 1, "nor a model 'no-such-model' on the hub"),
    (EMBED, "checkpoint={faults}/checkpoint", 1, "{faults}/checkpoint does not exist"),
    (INDEX, "embeddings_dir={faults}/embeddings", 1, "expected a folder that generate_embeddings"),
    (RETRIEVE, "index_dir={faults}/index", 1, "expected the description of an index"),
    (EVALUATE, "runs={faults}/run.json", 1, "no such file, expected a run that gc-dpr retrieve"),
    # the wrong kind
    (TRAIN, "data.train_file={world}/passages.tsv", 1, "did you mean data.passages_file?"),
    (TRAIN, "data.train_file={world}/questions.csv", 1, "did you mean data.questions_file?"),
    (TRAIN, "data.train_file={run}/run.trec", 1, "run.trec"),
    (TRAIN, "data.train_file={index}/index.faiss", 1, "not a text file"),
    (TRAIN, "model.name_or_path={world}", 1, "is not a model"),
    (TRAIN, "model.name_or_path={model}", 1, "did you mean {model}/checkpoint?"),
    (TRAIN, "model.name_or_path={world}/train.json", 1, "is a file; expected the folder of a mod"),
    (EMBED, "data.passages_file={world}/train.json", 1, "did you mean data.train_file?"),
    (EMBED, "data.passages_file={world}/questions.csv", 1, "did you mean data.questions_file?"),
    (EMBED, "checkpoint={embeddings}", 1, "is not a model"),
    (INDEX, "embeddings_dir={index}", 1, "does not describe embeddings"),
    (INDEX, "embeddings_dir={model}", 1, "no meta.json"),
    (RETRIEVE, "index_dir={embeddings}", 1, "does not describe an index"),
    (RETRIEVE, "data.questions_file={world}/passages.tsv", 1, "did you mean data.passages_file?"),
    (RETRIEVE, "data.questions_file={world}/train.json", 1, "did you mean data.train_file?"),
    (
        RETRIEVE, "data.questions_file={embeddings}/embeddings-00000-of-00001.npy", 1,
        "looks like a NumPy array (.npy)",
    ),
    (RETRIEVE, "data.passages_file={world}/train.json", 1, "did you mean data.train_file?"),
    (EVALUATE, "runs={world}/train.json", 1, "did you mean data.train_file?"),
    (EVALUATE, "runs={world}/passages.tsv", 1, "did you mean data.passages_file?"),
    (EVALUATE, "runs={run}", 1, "a folder, expected a run that gc-dpr … mean {run}/run.json?"),
    (EVALUATE, "runs={run}/metrics.json", 1, "expected DPR's list of questions"),
    (EVALUATE, "runs={embeddings}/embeddings-00000-of-00001.npy", 1, "looks like a NumPy array"),
    (SEARCH, "index_dir={embeddings}", 1, "does not describe an index"),
    # broken inside
    (TRAIN, "data.train_file={faults}/cut.json", 1, "cut.json:1: the file ends at byte"),
    (TRAIN, "data.train_file={faults}/comma.json", 1, "comma.json:1: broken JSON … (byte 3 of "),
    (TRAIN, "data.train_file={faults}/wrong_type.json", 1, "wrong_type.json:1: positive_ctxs"),
    (TRAIN, "data.train_file={faults}/empty.json", 1, "no training example left: 0 read"),
    (TRAIN, "data.train_file={faults}/no_positives.json", 1, "2 read from {faults}/no_positives"),
    (
        EMBED, "data.passages_file={faults}/stray.tsv", 1,
        "stray.tsv:2: a double quote … data.passages_quoting=none",
    ),
    (EMBED, "data.passages_file={faults}/columns.tsv", 1, "columns.tsv:3: found 2 tab-separated"),
    (EMBED, "data.passages_file={faults}/twice.tsv", 1, "twice.tsv:4: the passage id '1' occurs"),
    (EMBED, "data.passages_file={faults}/header.tsv", 1, "the corpus holds no passage"),
    (EMBED, "data.passages_file={faults}/latin1.tsv", 1, "UTF-8"),
    (RETRIEVE, "data.questions_file={faults}/empty.csv", 1, "empty.csv"),
    (RETRIEVE, "data.questions_file={faults}/answers.csv", 1, "answers.csv:1:"),
    (RETRIEVE, "data.passages_file={faults}/stray.tsv", 1, "stray.tsv:2: a double quote"),
    (RETRIEVE, "data.passages_file={faults}/twice.tsv", 1, "twice.tsv:4: the passage id '1'"),
    # does not fit
    (TRAIN, "train.batch_size=1 data.train_file={faults}/no_negatives.json", 1, "one candidate"),
    (TRAIN, "data.train_file={faults}/one.json", 1, "one candidate: the loss is 0"),
    (TRAIN, "train.batch_size=100 train.last_batch=drop", 1, "do not fill one batch of 100"),
    (TRAIN, "train.warmup_steps=2", 2, "train.warmup_steps=2 does not fit a run of 2"),
    (TRAIN, "model.expected_sha256=0123456789abcdef", 1, "has SHA-256"),
    (TRAIN, "model.expected_sha256=nonsense", 2, "is not a SHA-256"),
    (TRAIN, "model.max_passage_length=512", 2, "max_passage_length=512 is more than the 64"),
    (TRAIN, "model.num_layers=3", 2, "num_layers=3 must be from 1 to the model's 2"),
    (TRAIN, "data.on_missing_positives=error data.train_file={faults}/one_without.json", 1,
     "one_without.json:1: this example has no positive passage"),
    (INDEX, "index.factory=Flatt", 2, "FAISS makes no index of 32 dims"),
    (INDEX, "index.factory='IVF4,Flat'", 2, "needs training"),
    (RETRIEVE, "checkpoint={encoder}", 1, "the index was made with another model"),
    (RETRIEVE, "method=bm25", 2, "checkpoint has no effect with method=bm25"),
    (SEARCH, "checkpoint={encoder}", 1, "the index was made with another model"),
    (EVALUATE, "runs={run}/run.trec", 2, "set data.questions_file and data.passages_file"),
    (EVALUATE, "runs=[{run}/run.json,{run}/run.json]", 2, "runs names a file twice"),
    (EVALUATE, "runs=3", 2, "expected a run file, a list of them, or 'runs={{BM25: a.json"),
    (EVALUATE, "runs={faults}/short.trec", 1, "short.trec:2: found 4 columns, expected 6", *TREC),
    (EVALUATE, "runs={faults}/ids.trec", 1, "such as 'q77', are not in", *TREC),
    (EVALUATE, "runs={faults}/passage.trec", 1, "'nowhere'", *TREC),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "changes", "status", "answer", "more"),
    [(*case[:4], case[4:]) for case in CASES],
    ids=[f"{case[0]} {case[1]}" for case in CASES],
)
def test_wrong_input_gets_one_line(run, command, changes, status, answer, more):
    outcome = run(command, *changes.split(), *more)
    assert outcome.status == status
    assert outcome.error.startswith(f"gc-dpr {command}: error: ")
    for part in answer.split(" … "):
        assert part.format(**run.places) in outcome.error
    assert not run.output.exists() or list(run.output.iterdir()) == []


def test_runs_about_different_questions_are_refused(run, tmp_path):
    entries = json.loads((run.places["run"] / "run.json").read_text())
    (tmp_path / "fewer.json").write_text(json.dumps(entries[:5]))
    outcome = run(
        "evaluate_retrieval", f"runs={{{{a: {{run}}/run.json, b: {tmp_path}/fewer.json}}}}"
    )
    assert outcome.status == 1
    assert "'a' and 'b' are about different questions (13 and 5)" in outcome.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["train_dense_encoder", "generate_embeddings", "retrieve"])
def test_no_gpu(run, command):
    outcome = run(command, "hardware=single_gpu_11gb", "hardware.device=cuda")
    assert outcome.status == 2
    assert "device=cuda, but torch finds no GPU: use device=cpu or device=auto" in outcome.error


def test_a_training_that_breaks_off_leaves_its_log_but_no_checkpoint(run):
    outcome = run("train_dense_encoder", "train.learning_rate=1e30", "train.max_steps=3")
    assert outcome.status == 1
    assert re.search(
        r"the (loss|gradient norm) of step 2 is (nan|inf); no parameter", outcome.error
    )
    assert "train.json#" in outcome.error
    assert [entry.name for entry in run.output.iterdir()] == ["training_log.jsonl"]
    assert len((run.output / "training_log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("place", ["{world}/train.json", "{world}/train.json/below"])
def test_an_output_folder_that_cannot_be_one(run, place):
    run.output = place.format(**run.places)
    outcome = run("build_index")
    assert outcome.status in (1, 2)
    assert str(run.output) in outcome.error


# ----------------------------------------------- unusual, but the job can be done


def test_questions_without_positives_are_skipped_and_counted(run):
    outcome = succeed(
        *run.arguments("train_dense_encoder", "data.train_file={faults}/one_without.json")
    )
    assert "training examples: 3 read, 2 kept, 1 dropped without a positive passage" in outcome.err
    assert "epochs of 2 questions" in outcome.out


def test_a_batch_larger_than_the_data_is_one_smaller_batch(run):
    outcome = succeed(*run.arguments("train_dense_encoder", "train.batch_size=100"))
    lines = (run.output / "training_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["questions"] for line in lines] == [12, 12]
    assert "2 steps of 100 questions, 10 epochs of 12 questions" in outcome.out


def test_dropped_questions_are_counted(run):
    changes = ["train.batch_size=5", "train.last_batch=drop", "train.max_steps=1"]
    outcome = succeed(*run.arguments("train_dense_encoder", *changes))
    assert "train.last_batch=drop: 2 questions of each epoch are left out" in outcome.err


@pytest.mark.parametrize("method", ["dense", "bm25"])
def test_more_passages_than_the_corpus_has(run, method):
    changes = ["top_k=50", f"method={method}"]
    changes += ["checkpoint=null", "index_dir=null"] if method == "bm25" else []
    outcome = succeed(*run.arguments("retrieve", *changes))
    assert re.search(r"asked for 50 passages, the (index|corpus) holds 24", outcome.err)
    entries = json.loads((run.output / "run.json").read_text())
    assert len(entries[0]["ctxs"]) == 24
    assert "up to 24 passages each" in outcome.out


def test_another_model_is_allowed_when_asked_for(run):
    outcome = succeed(*run.arguments("retrieve", "checkpoint={encoder}", "allow_mismatch=true"))
    assert "the index was made with another model" in outcome.err
    assert "searching all the same, as asked" in outcome.err
    assert (run.output / "run.json").is_file()


def test_a_stray_quote_is_text_when_asked_for(run):
    changes = ["data.passages_file={faults}/stray.tsv", "data.passages_quoting=none"]
    outcome = succeed(*run.arguments("generate_embeddings", *changes))
    assert "3 embeddings of 32 dimensions" in outcome.out


def test_questions_without_answers_are_searched_all_the_same(run, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "who?"}\n{"question": "when?"}\n')
    change = f"data.questions_file={tmp_path}/questions.jsonl"
    outcome = succeed(*run.arguments("retrieve", change))
    assert "the questions have no answers" in outcome.out
    entries = json.loads((run.output / "run.json").read_text())
    assert "has_answer" not in entries[0]["ctxs"][0]


def test_a_hub_name_is_not_shown_as_a_path(run, monkeypatch, tiny_encoder_dir):
    """Only what lies on this disk has an absolute path."""
    monkeypatch.setattr(
        "gc_dpr.models.pretrained.snapshot_download", lambda *_, **__: tiny_encoder_dir
    )
    outcome = succeed(*run.arguments("train_dense_encoder", "model.name_or_path=some/model"))
    assert "read   some/model  (" in outcome.out


def test_scores_that_hardly_differ_are_warned_of(run):
    outcome = succeed(*run.arguments("train_dense_encoder", "model.normalize=true"))
    assert "representations have length 1 and train.temperature=1" in outcome.err


def test_a_corpus_changed_since_it_was_embedded_is_refused(run, tmp_path):
    """The scores would belong to other texts than those in run.json."""
    (setting,) = [
        a for a in map(str, run.arguments("retrieve")) if a.startswith("data.passages_file=")
    ]
    original = setting.partition("=")[2].strip('"')
    changed = tmp_path / "changed.tsv"
    text = Path(original).read_text(encoding="utf-8")
    changed.write_text(text.replace("was built", "was destroyed", 1), encoding="utf-8")
    other = f"data.passages_file={changed}"
    outcome = run_command(*run.arguments("retrieve", other))
    assert outcome.status == 1
    assert re.search(r"changed\.tsv: ids or texts differ from the corpus", outcome.error)
    outcome = succeed(*run.arguments("retrieve", other, "overwrite=true", "allow_mismatch=true"))
    assert "ids or texts differ from the corpus" in outcome.err


def test_a_run_without_any_answer_is_not_measured(run, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(
        json.dumps(
            [{"question": "who?", "answers": [], "ctxs": [{"id": "1", "text": "x", "score": "1"}]}]
        )
    )
    outcome = run_command("evaluate_retrieval", f"runs={path}", f"output_dir={tmp_path / 'out'}")
    assert outcome.status == 1
    assert "no question of this run has an answer" in outcome.error
