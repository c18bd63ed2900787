import dataclasses
import json
import logging
import shutil
import subprocess
import sys

import faiss
import numpy as np
import pytest

from gc_dpr.data.records import Question
from gc_dpr.errors import ArtifactError, ConfigError, DataError
from gc_dpr.retrieval import (
    INDEX_FILES,
    DenseIndex,
    ShardWriter,
    check_fingerprint,
    finish_embeddings,
    retrieve,
    set_search_threads,
)

DIM = 16


def log_normal(count, *, seed, dim=DIM):
    generator = np.random.default_rng(seed)
    return (generator.lognormal(size=(count, 1)) * generator.normal(size=(count, dim))).astype(
        np.float32
    )


def make_store(folder, embeddings, ids, *, num_shards=1, dtype="float32"):
    start = 0
    for shard in range(num_shards):
        with ShardWriter.open(
            folder,
            shard=shard,
            num_shards=num_shards,
            corpus_rows=len(ids),
            dim=embeddings.shape[1],
            dtype=dtype,
            model_fingerprint="model-a",
        ) as writer:
            end = start + writer.end_row - writer.first_row
            writer.write(embeddings[start:end], ids[start:end])
            start = end
    return finish_embeddings(folder, num_shards=num_shards)


def abc_index(folder):
    return DenseIndex.build(make_store(folder, np.eye(3, 2, dtype=np.float32) + 1, list("abc")))


def brute_force(questions, passages, ids, k):
    """Scores and ids by a full sort in float64."""
    scores = questions.astype(np.float64) @ passages.astype(np.float64).T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), [[ids[i] for i in line] for line in order]


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("k", [1, 10, 300])
def test_search_is_brute_force(tmp_path, num_shards, k):
    passages, questions = log_normal(300, seed=0), log_normal(37, seed=1)
    ids = [f"p{row:03}" for row in range(300)]
    store = make_store(tmp_path, passages, ids, num_shards=num_shards)
    index = DenseIndex.build(store, block_rows=64)
    scores, found = index.search(questions, k, block_questions=10)
    expected_scores, expected = brute_force(questions, passages, ids, k)
    assert scores.dtype == np.float32
    assert scores.shape == (37, k)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-4)
    assert found == expected
    assert (np.diff(scores, axis=1) <= 0).all()


def test_float16_embeddings_are_searched_as_stored(tmp_path):
    passages, questions = log_normal(50, seed=0), log_normal(5, seed=1)
    ids = [str(row) for row in range(50)]
    index = DenseIndex.build(make_store(tmp_path, passages, ids, dtype="float16"))
    stored = passages.astype(np.float16).astype(np.float32)
    assert index.search(questions, 5)[1] == brute_force(questions, stored, ids, 5)[1]


def test_equal_scores_come_in_the_order_of_the_corpus(tmp_path):
    passages = np.array([[1], [2], [1], [2], [1]], np.float32)
    index = DenseIndex.build(make_store(tmp_path, passages, ["z", "y", "x", "w", "v"]))
    scores, ids = index.search(np.array([[3.0]], np.float32), 5)
    assert ids == [["y", "w", "z", "x", "v"]]
    assert scores.tolist() == [[6, 6, 3, 3, 3]]


def test_more_than_there_is(tmp_path, caplog):
    index = abc_index(tmp_path)
    for _ in range(2):
        scores, ids = index.search(np.array([[1, 0]], np.float32), 5)
    assert ids == [["a", "b", "c"]]
    assert scores.tolist() == [[2, 1, 1]]
    assert caplog.text.count("asked for 5 passages, the index holds 3") == 1


def test_no_hit_is_not_the_last_passage(tmp_path, monkeypatch):
    index = abc_index(tmp_path)

    class FindsOne:
        def search(self, block, k):
            assert k == 3
            padding = np.finfo(np.float32).min
            return (
                np.array([[padding, 5, padding], [padding] * 3], np.float32),
                np.array([[-1, 1, -1], [-1] * 3]),
            )

    monkeypatch.setattr(index, "_searcher", FindsOne())
    scores, ids = index.search(np.zeros((2, 2), np.float32), 3)
    assert ids == [["b"], []]
    assert scores.tolist() == [[5, -np.inf, -np.inf], [-np.inf] * 3]
    questions = [Question(id="q1", text=""), Question(id="q2", text="")]
    run = retrieve(lambda texts: np.zeros((len(texts), 2), np.float32), index, questions, 3)
    assert run == {"q1": [("b", 5.0)], "q2": []}


def test_an_empty_index_and_no_questions(tmp_path):
    empty = DenseIndex.build(make_store(tmp_path / "0", np.zeros((0, 2), np.float32), []))
    empty.save(tmp_path / "index")
    scores, ids = DenseIndex.load(tmp_path / "index").search(np.zeros((2, 2), np.float32), 4)
    assert (scores.shape, ids) == ((2, 0), [[], []])
    scores, ids = abc_index(tmp_path / "3").search(np.zeros((0, 2), np.float32), 2)
    assert (scores.shape, ids) == ((0, 2), [])


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (np.zeros((1, 3), np.float32), "3 dims do not fit an index of 2 dims"),
        (np.zeros(2, np.float32), r"shape \(2,\)"),
        (np.zeros((1, 2)), r"float64; expected \(questions, 2\) float32"),
        (
            np.array([[0, 0], [0, np.nan]], np.float32),
            "1 question .* not finite, the first in row 1",
        ),
    ],
)
def test_unfit_question_embeddings(tmp_path, embeddings, message):
    with pytest.raises(ValueError, match=message):
        abc_index(tmp_path).search(embeddings, 1)


@pytest.mark.parametrize("k", [0, -1])
def test_k_below_one(tmp_path, k):
    with pytest.raises(ValueError, match=f"k={k}"):
        abc_index(tmp_path).search(np.zeros((1, 2), np.float32), k)


def test_loading_needs_only_the_index_folder(tmp_path):
    passages, questions = log_normal(40, seed=0), log_normal(6, seed=1)
    ids = [f"ü{row}" for row in range(40)]
    index = DenseIndex.build(make_store(tmp_path / "embeddings", passages, ids))
    index.save(tmp_path / "index")
    shutil.rmtree(tmp_path / "embeddings")
    loaded = DenseIndex.load(tmp_path / "index", verify=True)
    assert {entry.name for entry in (tmp_path / "index").iterdir()} == set(INDEX_FILES)
    assert loaded.info == index.info
    assert len(loaded) == 40
    for one, two in zip(loaded.search(questions, 7), index.search(questions, 7), strict=True):
        assert np.array_equal(one, two)
    assert index.search(questions, 7)[1] == brute_force(questions, passages, ids, 7)[1]


def test_saving_beside_other_files_but_not_over_an_index(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "config.yaml").write_text("")
    index = abc_index(tmp_path / "embeddings")
    index.save(tmp_path / "index")
    with pytest.raises(ArtifactError, match="holds a finished index"):
        index.save(tmp_path / "index")


def test_a_failed_save_is_not_an_index(tmp_path, monkeypatch):
    index = abc_index(tmp_path / "embeddings")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gc_dpr.retrieval.hashed_file.HashedFile.write", full)
    with pytest.raises(OSError, match="No space left"):
        index.save(tmp_path / "index")
    assert list((tmp_path / "index").iterdir()) == []
    with pytest.raises(ArtifactError, match="no index was finished there"):
        DenseIndex.load(tmp_path / "index")


@pytest.fixture
def saved(tmp_path):
    abc_index(tmp_path / "embeddings").save(tmp_path / "index")
    return tmp_path / "index"


def edit_meta(folder, **changes):
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "l2"}, "metric is 'l2', expected 'inner_product'"),
        ({"format_version": 2}, "format version 2"),
        ({"format": "x"}, "does not describe an index"),
        ({"count": 4}, "holds 3 embeddings of 2 dims for 3 passage ids; expected 4"),
        ({"dim": 3}, "expected 3 embeddings of 3 dims"),
        ({"count": "3"}, "count is '3', expected a value of type int"),
    ],
)
def test_an_edited_meta_file(saved, changes, message):
    edit_meta(saved, **changes)
    with pytest.raises(ArtifactError, match=message):
        DenseIndex.load(saved)


def test_missing_and_damaged_files(saved, tmp_path):
    with pytest.raises(ArtifactError, match="does not exist"):
        DenseIndex.load(tmp_path / "nowhere")
    index_bytes = (saved / "index.faiss").read_bytes()
    (saved / "index.faiss").write_bytes(index_bytes[:-4])
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged: it has \d+ bytes, expected"):
        DenseIndex.load(saved)
    flipped = bytearray(index_bytes)
    flipped[-1] ^= 1
    (saved / "index.faiss").write_bytes(flipped)
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged: its SHA-256"):
        DenseIndex.load(saved, verify=True)
    (saved / "index.faiss").write_bytes(b"x" * len(index_bytes))
    with pytest.raises(ArtifactError, match="FAISS cannot read it"):
        DenseIndex.load(saved)
    (saved / "index.faiss").unlink()
    with pytest.raises(ArtifactError, match=r"index\.faiss is missing"):
        DenseIndex.load(saved)
    (saved / "ids.txt").write_text("a\nc\nb\n")
    with pytest.raises(ArtifactError, match=r"ids\.txt is not the file"):
        DenseIndex.load(saved)
    (saved / "ids.txt").unlink()
    with pytest.raises(ArtifactError, match=r"ids\.txt is missing"):
        DenseIndex.load(saved)


def test_an_l2_index_is_refused(saved):
    distances = faiss.IndexFlatL2(2)
    distances.add(np.zeros((3, 2), np.float32))
    faiss.write_index(distances, str(saved / "index.faiss"))
    edit_meta(saved, index_bytes=(saved / "index.faiss").stat().st_size)
    with pytest.raises(ArtifactError, match=r"metric is number 1 \(1 is L2\)"):
        DenseIndex.load(saved)


def test_hnsw_scores_are_inner_products(tmp_path):
    passages, questions = log_normal(500, seed=0), log_normal(20, seed=1)
    ids = [str(row) for row in range(500)]
    set_search_threads(1)
    index = DenseIndex.build(make_store(tmp_path / "e", passages, ids), factory="HNSW32")
    index.save(tmp_path / "i")
    scores, found = DenseIndex.load(tmp_path / "i").search(questions, 10)
    expected = brute_force(questions, passages, ids, 10)[1]
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, expected, strict=True)])
    assert recall > 0.9
    top = passages[[int(line[0]) for line in found]]
    np.testing.assert_allclose(scores[:, 0], (questions * top).sum(1), rtol=1e-4)


@pytest.mark.parametrize(
    ("factory", "message"),
    [("IVF4,Flat", "needs training"), ("Bogus", "could not parse"), ("IDMap,Flat", "drop IDMap")],
)
def test_unusable_factory_strings(tmp_path, factory, message):
    store = make_store(tmp_path, log_normal(3, seed=0), list("abc"))
    with pytest.raises(ConfigError, match=message):
        DenseIndex.build(store, factory=factory)


def test_threads():
    before = faiss.omp_get_max_threads()
    try:
        set_search_threads(1)
        assert faiss.omp_get_max_threads() == 1
    finally:
        faiss.omp_set_num_threads(before)
    with pytest.raises(ConfigError, match="0 search threads"):
        set_search_threads(0)


def test_another_model_than_the_index_was_made_with(tmp_path, caplog):
    index = abc_index(tmp_path)
    check_fingerprint(index, "model-a")
    with pytest.raises(ArtifactError, match=r"model-a….*model-b….*generate_embeddings"):
        check_fingerprint(index, "model-b")
    with caplog.at_level(logging.WARNING):
        check_fingerprint(index, "model-b", allow_mismatch=True)
    assert "searching all the same" in caplog.text
    other = DenseIndex(None, index.ids, dataclasses.replace(index.info, model_fingerprint="b"))
    assert other.fingerprint == "b"


@pytest.mark.parametrize("block", [1, 4, 100])
def test_retrieve_makes_a_run(tmp_path, block):
    passages, vectors = log_normal(30, seed=0), log_normal(10, seed=1)
    ids = [f"p{row}" for row in range(30)]
    index = DenseIndex.build(make_store(tmp_path, passages, ids))
    questions = [Question(id=f"q{row}", text=str(row)) for row in range(10)]
    run = retrieve(lambda texts: vectors[[int(t) for t in texts]], index, questions, 4, block=block)
    scores, expected = brute_force(vectors, passages, ids, 4)
    assert list(run) == [question.id for question in questions]
    assert [[passage_id for passage_id, _ in hits] for hits in run.values()] == expected
    found = [[score for _, score in hits] for hits in run.values()]
    np.testing.assert_allclose(found, scores, rtol=1e-4, atol=1e-4)
    assert all(type(score) is float for score in found[0])
    assert retrieve(lambda texts: vectors, index, [], 4) == {}


def test_retrieve_refuses_what_makes_no_run(tmp_path):
    index = abc_index(tmp_path)
    twice = [Question(id="q", text="a"), Question(id="r", text="b"), Question(id="q", text="c")]
    with pytest.raises(DataError, match=r"'q' occurs twice \(questions 0 and 2"):
        retrieve(lambda texts: np.zeros((3, 2), np.float32), index, twice, 1)
    with pytest.raises(ValueError, match="k=0"):
        retrieve(lambda texts: np.zeros((3, 2), np.float32), index, [], 0)


def test_torch_and_faiss_in_one_process():
    program = """
import torch
a = torch.randn(300, 300); (a @ a).sum().item()
import sys
import gc_dpr.retrieval
assert "faiss" not in sys.modules
import faiss, numpy as np
from gc_dpr.retrieval import DenseIndex
from gc_dpr.retrieval.index import IndexInfo
from gc_dpr.retrieval.passage_ids import PassageIds
searcher = faiss.index_factory(32, "Flat", faiss.METRIC_INNER_PRODUCT)
searcher.add(np.eye(32, dtype=np.float32).repeat(100, 0))
info = IndexInfo("Flat", "inner_product", 3200, 32, "", "")
index = DenseIndex(searcher, PassageIds.of(map(str, range(3200))), info)
scores, ids = index.search(np.eye(32, dtype=np.float32), 100)
assert ids[31] == [str(row) for row in range(3100, 3200)]
(a @ a).sum().item()
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.stdout == "done\n", ended.stderr
