"""The main job from files to numbers, each number computed once more by other means."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import run_command, succeed
from distributed_run import run_distributed
from pipeline_run import TRAINING, file_settings, run_pipeline
from tiny_data import BUILDINGS, passage, training_example, write_world
from transformers import AutoModel, AutoTokenizer

from gc_dpr.models import BiEncoder

pytestmark = pytest.mark.pipeline

QUESTIONS = [training_example(number)["question"] for number in range(0, len(BUILDINGS), 2)]
QUESTIONS.append("who wrote the first book")
ANSWERS = [str(1801 + number) for number in range(0, len(BUILDINGS), 2)] + ["a duck"]
PASSAGES = [passage(number) for number in range(len(BUILDINGS))]  # (id, text, title)
IDS = [passage_id for passage_id, _, _ in PASSAGES]
LEARNING = ("train.batch_size=12", "train.epochs=25", "train.learning_rate=2e-3")
TOP_K = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_encoder_dir, world):
    return run_pipeline(tmp_path_factory.mktemp("trained"), tiny_encoder_dir, world, *LEARNING)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, tiny_encoder_dir, world):
    folder = tmp_path_factory.mktemp("untrained")
    return run_pipeline(folder, tiny_encoder_dir, world, "train.epochs=0")


@pytest.fixture(scope="module")
def bm25(tmp_path_factory, world):
    folder = tmp_path_factory.mktemp("bm25") / "run"
    files = file_settings(world, "questions_file", "passages_file")
    succeed("retrieve", "method=bm25", f"top_k={TOP_K}", f"output_dir={folder}", *files)
    return folder


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def read_log(folder):
    """The records of a training run."""
    return [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]


def read_trec(folder):
    """The columns of every line."""
    return [line.split() for line in (folder / "run.trec").read_text().splitlines()]


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


# ------------------------------------------------------------------------- other means


def embed(folder, first, second, length):
    """What transformers alone makes of a tower's folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokens = tokenizer(
        first, second, padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    with torch.no_grad():
        return model(**tokens).last_hidden_state[:, 0].numpy()


def brute_force(checkpoint):
    """(Q, P) inner products of all questions and passages."""
    titles, texts = [p[2] for p in PASSAGES], [p[1] for p in PASSAGES]
    questions = embed(checkpoint / "question_encoder", QUESTIONS, None, 32)
    return questions @ embed(checkpoint / "passage_encoder", titles, texts, 60).T


def answered(question, passage_row):
    """Whether the answer's words stand in the passage's text, one after the other."""
    words = re.findall(r"\w+", PASSAGES[passage_row][1].lower())
    answer = ANSWERS[question].split()
    return any(words[i : i + len(answer)] == answer for i in range(len(words)))


def accuracies(rows, ks):
    """Top-k accuracy of the best rows (Q, K)."""
    flags = np.array([[answered(q, row) for row in line] for q, line in enumerate(rows)])
    return {f"top{k}_accuracy": float(flags[:, :k].any(1).mean()) for k in ks}


# ----------------------------------------------------------------------------- training


def test_training_learns_its_questions(trained, untrained):
    before, after = (
        accuracies(np.argsort(-brute_force(p.checkpoint), axis=1), (1, 5))
        for p in (untrained, trained)
    )
    assert after["top1_accuracy"] >= before["top1_accuracy"] + 0.4
    assert after["top5_accuracy"] >= before["top5_accuracy"] + 0.3
    log = read_log(trained.model)
    assert log[-1]["loss"] < log[0]["loss"] / 4


def test_training_leaves_what_it_promises(trained, tiny_encoder_dir, world):
    assert names(trained.model) == [
        "checkpoint", "config.yaml", "metrics.json", "training_log.jsonl", "training_loss.png",
    ]  # fmt: skip
    assert names(trained.checkpoint) == [
        "biencoder_config.json", "config.yaml", "passage_encoder", "question_encoder",
        "trainer_state.json",
    ]  # fmt: skip
    config = yaml.safe_load((trained.model / "config.yaml").read_text())
    assert config == yaml.safe_load((trained.checkpoint / "config.yaml").read_text())
    assert config["model"]["name_or_path"] == str(tiny_encoder_dir)
    assert config["data"]["train_file"] == str(world["train_file"])
    assert (config["train"]["epochs"], config["hardware"]["passage_chunk_rows"]) == (25, 3)
    log = read_log(trained.model)
    metrics = read_json(trained.model / "metrics.json")
    assert [record["step"] for record in log] == list(range(1, 26))
    assert all(record["chunks"] > 6 for record in log), "the gradient cache was not used"
    assert (metrics["steps"], metrics["epochs"], metrics["seed"]) == (25, 25, 0)
    assert metrics["final_loss"] == log[-1]["loss"]
    assert metrics["final_in_batch_accuracy"] == log[-1]["in_batch_accuracy"]
    assert metrics["final_in_batch_candidates"] == log[-1]["candidates"]
    assert metrics["fewer_negatives"] == sum(record["fewer_negatives"] for record in log)
    seconds = metrics["training_seconds"]
    assert metrics["questions_per_second"] == pytest.approx(12 * 25 / seconds)
    fingerprint = BiEncoder.from_pretrained(trained.checkpoint).fingerprint()
    assert metrics["model_fingerprint"] == fingerprint
    assert read_json(trained.checkpoint / "trainer_state.json") == {
        "steps": 25, "epochs": 25, "seed": 0, "model_fingerprint": fingerprint,
    }  # fmt: skip


def test_the_plan_is_told_before_the_work(trained):
    """TRAPS B8, B25."""
    plan = next(line for line in trained.outcomes["model"].out.splitlines() if "plan" in line)
    # example n has n % 3 hard negatives: 0, 2, 1, 0, 2, 1, …
    assert "25 steps of 12 questions, 25 epochs of 12 questions" in plan
    assert "up to 24 candidates per question" in plan
    assert "0/1/2 available (min/median/max), 1 asked for" in plan
    assert "1 process(es) on cpu, fp32" in plan
    notes = trained.outcomes["model"].out
    assert "100 questions had fewer negatives than asked for (all epochs together)" in notes


def test_without_epochs_the_start_is_saved(untrained, tiny_encoder_dir):
    assert names(untrained.model) == ["checkpoint", "config.yaml", "metrics.json"]
    start = embed(tiny_encoder_dir, QUESTIONS, None, 32)
    saved = embed(untrained.checkpoint / "question_encoder", QUESTIONS, None, 32)
    np.testing.assert_array_equal(start, saved)
    assert read_json(untrained.model / "metrics.json")["steps"] == 0


def test_a_checkpoint_is_a_sentence_transformers_model(trained):
    from sentence_transformers import SentenceTransformer

    ours = BiEncoder.from_pretrained(trained.checkpoint)
    theirs = SentenceTransformer(str(trained.checkpoint / "question_encoder"), device="cpu")
    np.testing.assert_allclose(
        theirs.encode(QUESTIONS), ours.encode_questions(QUESTIONS), rtol=1e-5, atol=1e-5
    )


def test_a_run_can_be_repeated(tiny_encoder_dir, world, trained, tmp_path):
    """Dropout on: bit for bit; dropout off: with any chunks, up to rounding."""
    other_chunks = ["hardware.passage_chunk_rows=50", "hardware.question_chunk_tokens=1000"]
    curves = []
    for number, more in enumerate((["model.dropout=0.2"], ["model.dropout=0.2"], other_chunks)):
        succeed(
            "train_dense_encoder", f"model.name_or_path={tiny_encoder_dir}", *TRAINING, *LEARNING,
            *file_settings(world, "train_file"), "train.max_steps=2", *more,
            f"output_dir={tmp_path / str(number)}",
        )  # fmt: skip
        curves.append([record["loss"] for record in read_log(tmp_path / str(number))])
    assert len(curves[0]) == 2
    assert curves[0] == curves[1]
    first = read_log(trained.model)[0]["loss"]
    assert curves[2][0] == pytest.approx(first, abs=1e-5)
    assert curves[0][0] != pytest.approx(first, abs=1e-2)


# ----------------------------------------------------------------- embeddings and index


def test_embeddings_are_what_transformers_gives(trained):
    assert names(trained.embeddings) == [
        "embeddings-00000-of-00001.npy", "ids-00000-of-00001.txt", "meta.json", "metrics.json",
        "shard-00000-of-00001.json",
    ]  # fmt: skip
    stored = np.load(trained.embeddings / "embeddings-00000-of-00001.npy", allow_pickle=False)
    assert (trained.embeddings / "ids-00000-of-00001.txt").read_text().split() == IDS
    titles, texts = [p[2] for p in PASSAGES], [p[1] for p in PASSAGES]
    expected = embed(trained.checkpoint / "passage_encoder", titles, texts, 60)
    np.testing.assert_allclose(stored, expected, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(trained.checkpoint / "passage_encoder")
    lengths = [
        len(tokenizer(title, text)["input_ids"]) for title, text in zip(titles, texts, strict=True)
    ]
    metrics = read_json(trained.embeddings / "metrics.json")
    assert metrics["passages"] == 24
    assert metrics["tokens"] == sum(min(length, 60) for length in lengths)
    assert metrics["truncated_passages"] == sum(length > 60 for length in lengths)


def test_an_index_is_complete(trained):
    assert names(trained.index) == ["ids.txt", "index.faiss", "meta.json"]
    meta = read_json(trained.index / "meta.json")
    assert (meta["factory"], meta["metric"], meta["count"]) == ("Flat", "inner_product", 24)
    fingerprint = read_json(trained.model / "metrics.json")["model_fingerprint"]
    assert meta["model_fingerprint"] == fingerprint


def test_other_ways_to_the_same_embeddings(trained, world, tmp_path):
    """Two compressed files by a glob, half precision, bf16 and small batches."""
    lines = world["passages_file"].read_text(encoding="utf-8").splitlines()
    for part, rows in enumerate((lines[1:11], lines[11:])):
        with gzip.open(tmp_path / f"part_{part}.tsv.gz", "wt", encoding="utf-8") as handle:
            handle.write("\n".join(rows) + "\n")
    outcome = succeed(
        "generate_embeddings", f"checkpoint={trained.checkpoint}", "hardware=cpu", "dtype=float16",
        f"data.passages_file={tmp_path}/part_*.tsv.gz", "hardware.encode_batch_tokens=100",
        "hardware.precision=bf16", f"output_dir={tmp_path / 'half'}",
    )  # fmt: skip
    assert f"read   {tmp_path}/part_0.tsv.gz\n" in outcome.out
    assert f"read   {tmp_path}/part_1.tsv.gz  (24 passages in 2 files)\n" in outcome.out
    half = np.load(tmp_path / "half" / "embeddings-00000-of-00001.npy", allow_pickle=False)
    full = np.load(trained.embeddings / "embeddings-00000-of-00001.npy", allow_pickle=False)
    assert half.dtype == np.float16
    assert (np.abs(half - full) / np.abs(full).max()).mean() < 0.01
    whole, parts = (
        read_json(folder / "meta.json")["corpus_hash"]
        for folder in (trained.embeddings, tmp_path / "half")
    )
    assert whole == parts


# ------------------------------------------------------------------------------- search


def test_a_run_is_the_brute_force_result(trained):
    assert names(trained.run) == ["metrics.json", "run.json", "run.trec"]
    products = brute_force(trained.checkpoint)
    best = np.argsort(-products, axis=1, kind="stable")[:, :TOP_K]
    run = read_json(trained.run / "run.json")
    assert [entry["question"] for entry in run] == QUESTIONS
    assert [entry["answers"] for entry in run] == [[answer] for answer in ANSWERS]
    trec = read_trec(trained.run)
    assert len(trec) == len(QUESTIONS) * TOP_K
    for question, entry in enumerate(run):
        contexts = entry["ctxs"]
        rows = [IDS.index(context["id"]) for context in contexts]
        assert rows == best[question].tolist()
        scores = [float(context["score"]) for context in contexts]
        np.testing.assert_allclose(scores, products[question, rows], rtol=1e-5, atol=1e-5)
        for row, context in zip(rows, contexts, strict=True):
            assert (context["id"], context["text"], context["title"]) == PASSAGES[row]
            assert context["has_answer"] is answered(question, row)
        lines = trec[question * TOP_K : (question + 1) * TOP_K]
        assert [line[2] for line in lines] == [context["id"] for context in contexts]
        assert [line[3] for line in lines] == [str(rank) for rank in range(1, TOP_K + 1)]
        assert [np.float32(line[4]) for line in lines] == [np.float32(score) for score in scores]
        assert {(line[0], line[1], line[5]) for line in lines} == {(str(question), "Q0", "dense")}
    metrics = read_json(trained.run / "metrics.json")
    assert (metrics["questions"], metrics["pool_size"], metrics["top_k"]) == (13, 24, 10)
    shown = accuracies(best, (1, 5))
    line = f"top1 {shown['top1_accuracy']:.1%}, top5 {shown['top5_accuracy']:.1%}"
    assert line in trained.outcomes["run"].out


def test_one_typed_question(trained, world, tmp_path):
    question = "when was the salt works built in the country?"
    arguments = [
        question, f"checkpoint={trained.checkpoint}", f"index_dir={trained.index}",
        *file_settings(world, "passages_file"), "hardware=cpu",
    ]  # fmt: skip
    outcome = succeed("search", *arguments, "top_k=4", f"output_dir={tmp_path / 'found'}")
    stored = np.load(trained.embeddings / "embeddings-00000-of-00001.npy", allow_pickle=False)
    products = stored @ embed(trained.checkpoint / "question_encoder", [question], None, 32)[0]
    best = np.argsort(-products)[:4]
    found = read_json(tmp_path / "found" / "search.json")
    assert found["question"] == question
    assert [hit["id"] for hit in found["passages"]] == [IDS[row] for row in best]
    scores = [hit["score"] for hit in found["passages"]]
    np.testing.assert_allclose(scores, products[best], rtol=1e-5)
    assert outcome.out.startswith(f"{question}  (best 4 of 24 passages)\n")
    titles = re.findall(r"^\d\. (.*?)  \(score", outcome.out, re.MULTILINE)
    assert titles == [BUILDINGS[row] for row in best]
    # without output_dir nothing is written
    assert "wrote  " not in succeed("search", *arguments).out


def test_bm25_finds_by_words(bm25):
    run = read_json(bm25 / "run.json")
    for number, entry in zip(range(0, len(BUILDINGS), 2), run, strict=False):
        assert entry["ctxs"][0]["title"] == BUILDINGS[number]
    assert read_json(bm25 / "metrics.json")["method"] == "bm25"


# --------------------------------------------------------------------------- evaluation


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory, trained, bm25, world):
    """The same two runs, once as JSON and once as TREC; what was printed for the first."""
    folder = tmp_path_factory.mktemp("evaluation")
    files = file_settings(world, "questions_file", "passages_file")
    outcomes = {}
    for suffix, extra in (("json", []), ("trec", files)):
        runs = f"{{BM25: {bm25}/run.{suffix}, ours: {trained.run}/run.{suffix}}}"
        outcomes[suffix] = succeed(
            "evaluate_retrieval", f"runs={runs}", "top_ks=[1,3,10]", *extra,
            f"output_dir={folder / suffix}",
        )  # fmt: skip
    return folder, outcomes


def test_metrics_equal_an_independent_computation(evaluations, trained, bm25):
    folder, outcomes = evaluations
    metrics = read_json(folder / "json" / "metrics.json")
    assert list(metrics) == ["BM25", "ours"]
    for name, run in (("BM25", bm25), ("ours", trained.run)):
        rows = [
            [IDS.index(context["id"]) for context in entry["ctxs"]]
            for entry in read_json(run / "run.json")
        ]
        assert metrics[name].items() >= accuracies(rows, (1, 3, 10)).items()
        assert metrics[name]["questions"] == 13
        assert (metrics[name]["pool_size"], metrics[name]["match"]) == (24, "string")
        ranks = [
            next((rank for rank, row in enumerate(line, 1) if answered(q, row)), None)
            for q, line in enumerate(rows)
        ]
        listed = read_json(folder / "json" / "per_question.json")[name]
        assert listed == {str(q): rank for q, rank in enumerate(ranks)}
        shown = "  ".join(f"{100 * metrics[name][f'top{k}_accuracy']:.1f}" for k in (1, 3, 10))
        table = re.sub(r" +", "  ", outcomes["json"].out)
        assert f"{name}  {shown}" in table
    assert metrics["ours"]["top10_accuracy"] < 1, "one question has no answer anywhere"
    assert "% of 13 questions, of 24 passages; answer match: string" in outcomes["json"].out


def test_trec_and_json_give_the_same_numbers(evaluations):
    folder, outcomes = evaluations
    for name in ("metrics.json", "per_question.json"):
        assert read_json(folder / "trec" / name) == read_json(folder / "json" / name)
    assert "24 passages looked up" in outcomes["trec"].out


def test_evaluation_leaves_what_it_promises(evaluations):
    folder, outcomes = evaluations
    assert names(folder / "json") == [
        "accuracy_over_k.png", "metrics.json", "per_question.json", "table.md", "table.txt",
    ]  # fmt: skip
    assert (folder / "json" / "table.txt").read_text().strip() in outcomes["json"].out
    assert (folder / "json" / "table.md").read_text().startswith("|")
    assert (folder / "json" / "accuracy_over_k.png").read_bytes().startswith(b"\x89PNG")


def test_the_title_counts_only_when_asked(trained, world, tmp_path):
    """The title is the answer here; DPR looks at the text alone."""
    rows = ["id\ttext\ttitle", *(f"{i}\tIt is old.\t{title}" for i, _, title in PASSAGES)]
    (tmp_path / "titles.tsv").write_text("\n".join(rows) + "\n")
    questions = "".join(f"{text}\t['{BUILDINGS[0]}']\n" for text in QUESTIONS)
    (tmp_path / "questions.csv").write_text(questions)
    found = {}
    for use_title in ("false", "true"):
        succeed(
            "evaluate_retrieval", f"runs={trained.run}/run.trec", f"use_title={use_title}",
            f"data.questions_file={tmp_path}/questions.csv", "top_ks=[10]",
            f"data.passages_file={tmp_path}/titles.tsv", f"output_dir={tmp_path / use_title}",
        )  # fmt: skip
        found[use_title] = read_json(tmp_path / use_title / "metrics.json")["run"]
    assert (found["false"]["top10_accuracy"], found["false"]["title_searched"]) == (0, False)
    listed = [line for line in read_trec(trained.run) if line[2] == "p0"]
    assert found["true"]["top10_accuracy"] == pytest.approx(len(listed) / 13)
    assert found["true"]["title_searched"] is True


# ------------------------------------------------------------------------- what is said


def test_every_path_that_was_read_and_written_is_named(trained, evaluations, world):
    expected = {
        "model": ({world["train_file"]}, {trained.model / "training_log.jsonl"}),
        "embeddings": ({trained.checkpoint, world["passages_file"]}, {trained.embeddings}),
        "index": ({trained.embeddings}, {trained.index}),
        "run": (
            {trained.checkpoint, trained.index, world["questions_file"], world["passages_file"]},
            {trained.run / "run.json", trained.run / "run.trec", trained.run / "metrics.json"},
        ),
    }
    for name, (read, written) in expected.items():
        said = re.findall(r"^(read|wrote) +(\S+)", trained.outcomes[name].out, re.MULTILINE)
        assert all(Path(path).is_absolute() and Path(path).exists() for _, path in said)
        assert {Path(path) for verb, path in said if verb == "read"} >= read
        assert {Path(path) for verb, path in said if verb == "wrote"} >= written


# --------------------------------------------------------------------- several processes


def arguments_for_comparison(encoder, world, output):
    """Batches of 5: shares of 2 and 3, and a last batch of 2."""
    return [
        "train_dense_encoder", f"model.name_or_path={encoder}", f"output_dir={output}",
        *file_settings(world, "train_file"), *TRAINING, "train.batch_size=5", "train.epochs=2",
        "train.learning_rate=1e-3", "train.warmup_steps=1", "train.hard_negatives=2",
    ]  # fmt: skip


@pytest.mark.distributed
def test_torchrun_trains_as_one_process_does(tiny_encoder_dir, world, tmp_path):
    succeed(*arguments_for_comparison(tiny_encoder_dir, world, tmp_path / "one"))
    torchrun = Path(sys.executable).with_name("torchrun")
    ended = subprocess.run(
        [
            torchrun, "--standalone", "--nproc-per-node", "2", "-m", "gc_dpr",
            *arguments_for_comparison(tiny_encoder_dir, world, tmp_path / "two"),
        ],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "2 process(es) on cpu" in ended.stdout
    assert ended.stdout.count("wrote ") == 4, "one process speaks for all"
    assert "Warning" not in ended.stderr
    one, two = (read_log(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == 6
    for key in ("loss", "grad_norm", "learning_rate", "in_batch_accuracy", "candidates"):
        found, expected = ([record[key] for record in log] for log in (two, one))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), key
    assert names(tmp_path / "two") == names(tmp_path / "one")


def embed_twice(arguments):
    """Runs in each of two processes: the command, then the same command once more."""
    return [(run.status, run.out, run.err) for run in (run_command(*arguments) for _ in range(2))]


@pytest.mark.distributed
def test_two_processes_embed_as_one_does(trained, world, tmp_path):
    output = tmp_path / "embeddings"
    arguments = [
        "generate_embeddings", f"checkpoint={trained.checkpoint}", f"output_dir={output}",
        *file_settings(world, "passages_file"), "hardware=cpu",
    ]  # fmt: skip
    (first, again), (other, other_again) = run_distributed(embed_twice, 2, arguments)
    assert (first[0], other[0]) == (0, 0), first[2] + other[2]
    assert other[1] == "", "only rank 0 prints"
    shards = [
        np.load(output / f"embeddings-0000{shard}-of-00002.npy", allow_pickle=False)
        for shard in range(2)
    ]
    one = np.load(trained.embeddings / "embeddings-00000-of-00001.npy", allow_pickle=False)
    np.testing.assert_allclose(np.concatenate(shards), one, rtol=1e-6, atol=1e-6)
    ids = [(output / f"ids-0000{shard}-of-00002.txt").read_text() for shard in range(2)]
    assert "".join(ids).split() == IDS
    for key in ("passages", "tokens", "truncated_passages"):
        expected = read_json(trained.embeddings / "metrics.json")[key]
        assert read_json(output / "metrics.json")[key] == expected
    # the folder is not empty any more: rank 0 says so, the other ends without a word
    assert (again[0], other_again[0], other_again[2]) == (2, 2, "")
    assert "[rank 0]: error: output_dir=" in again[2]
    succeed("build_index", f"embeddings_dir={output}", f"output_dir={tmp_path / 'index'}")
    assert (tmp_path / "index" / "ids.txt").read_text().split() == IDS


def test_several_runs_in_one_call(tiny_encoder_dir, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        f"model.name_or_path={tiny_encoder_dir}", *file_settings(world, "train_file"), *TRAINING,
        "train.epochs=0", "train.seed=1,2", "output_dir=runs/${train.seed}",
    ]  # fmt: skip
    succeed("train_dense_encoder", "-m", *arguments)
    for seed in (1, 2):
        assert read_json(tmp_path / "runs" / str(seed) / "metrics.json")["seed"] == seed
    failed = run_command("train_dense_encoder", *arguments, "-m")
    assert failed.status == 2
    assert f"output_dir={tmp_path}/runs/1 is not empty" in failed.error
