import logging
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest

from gc_dpr.data.records import Passage
from gc_dpr.errors import ConfigError, DataError
from gc_dpr.retrieval.bm25 import BM25Index

WORDS = ["harbour", "tram", "mill", "stone", "bridge", "clock", "tower", "salt", "garden", "mine"]


def corpus(seed, size=40):
    draw = random.Random(seed)
    return [
        Passage(f"p{i}", draw.choice(WORDS), " ".join(draw.choices(WORDS, k=draw.randint(0, 15))))
        for i in range(size)
    ]


def plain_scores(passages, question, *, k1, b):
    """The formula passage by passage, in float64."""
    documents = [f"{p.title} {p.text}".split() for p in passages]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in question.split():
            frequency = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            tf = counts[word]
            if tf:
                score += idf * tf / (tf + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.5, 0.75), (0.0, 0.0), (2.0, 1.0)])
def test_scores_equal_the_formula(k1, b):
    passages = corpus(3)
    questions = ["harbour tram", "salt salt mine", "clock nowhere"]
    index = BM25Index.build(passages, k1=k1, b=b, stemmer=None, stop_words=None)
    scores, ids = index.search(questions, len(passages))
    assert scores.dtype == np.float32
    for row, question in enumerate(questions):
        expected = plain_scores(passages, question, k1=k1, b=b)
        by_id = {p.id: s for p, s in zip(passages, expected, strict=True)}
        np.testing.assert_allclose(scores[row], [by_id[i] for i in ids[row]], rtol=2e-6)
        assert sorted(ids[row]) == sorted(by_id)
        assert (np.diff(scores[row]) <= 0).all()


@pytest.mark.parametrize("k", [1, 3, 7, 30])
def test_equal_scores_stand_in_corpus_order(k):
    texts = ["tram", "tower", "tram", "tram mill", "tower", "tram"] * 5
    index = BM25Index.build(Passage(str(i), "", text) for i, text in enumerate(texts))
    scores, ids = index.search(["tram"], 30)
    expected = sorted(
        range(30), key=lambda i: (-dict(zip(ids[0], scores[0], strict=True))[str(i)], i)
    )
    assert ids[0] == [str(i) for i in expected]
    first_scores, first_ids = index.search(["tram"], k)
    assert first_ids[0] == ids[0][:k]
    assert np.array_equal(first_scores[0], scores[0][:k])


def test_more_than_the_corpus_gives_the_corpus():
    index = BM25Index.build(corpus(1, size=4))
    scores, ids = index.search(["tram", "mill"], 100)
    assert scores.shape == (2, 4)
    assert [len(row) for row in ids] == [4, 4]
    assert len(index) == 4


def test_questions_without_a_known_word(caplog):
    index = BM25Index.build([Passage("a", "", ""), Passage("b", "", "tram stops")])
    with caplog.at_level(logging.WARNING):
        scores, ids = index.search(["", "the of", "unseen words", "Trams!"], 2)
    assert ids == [["a", "b"]] * 3 + [["b", "a"]]
    assert (scores[:3] == 0).all()
    assert scores[3, 0] > 0
    assert "3 of 4 questions share no word" in caplog.text
    assert index.search([], 2)[0].shape == (0, 2)


def test_title_case_stemming_and_stop_words():
    passages = [
        Passage("title", "Harbours", "x"),
        Passage("text", "", "the HARBOUR is"),
        Passage("no", "", "is"),
    ]
    scores, _ = BM25Index.build(passages).search(["harbour", "is the"], 3)
    assert (scores[0] > 0).tolist() == [True, True, False]
    assert (scores[1] == 0).all(), "stop words count for nothing"
    plain = BM25Index.build(passages, stemmer=None, stop_words=["HARBOUR"])
    scores, _ = plain.search(["harbour", "harbours", "is"], 3)
    assert (scores > 0).sum(1).tolist() == [0, 1, 2]


def test_searching_does_not_change_the_index():
    index = BM25Index.build(corpus(5))
    before = index.search(["tram mill"], 5)
    index.search(["entirely new words here"], 5)
    after = index.search(["tram mill"], 5)
    assert before[1] == after[1]
    assert np.array_equal(before[0], after[0])


def test_no_noise(caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        BM25Index.build(corpus(2)).search(["tram"], 3)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_a_missing_package_names_the_pip_line(monkeypatch):
    for name in ("bm25s", "Stemmer"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ConfigError, match=r"pip install 'gc-dpr\[bm25\]'"):
                BM25Index.build(corpus(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k1": -1}, "k1=-1"),
        ({"b": 1.5}, "b=1.5"),
        ({"stemmer": "klingon"}, "stemmer='klingon' is unknown; choose one of .*english"),
        ({"stop_words": "xx"}, "stop_words='xx' is no language"),
    ],
)
def test_wrong_settings_are_explained(settings, message):
    with pytest.raises(ConfigError, match=message):
        BM25Index.build(corpus(1), **settings)


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([], "no passage to index"),
        ([Passage("a", "", "tram"), Passage("a", "", "mill")], "1 of 2 passages repeat"),
        ([Passage("a", "", "the"), Passage("b", "", "")], "none of the 2 passages has a word"),
    ],
)
def test_a_corpus_that_cannot_be_indexed_is_explained(passages, message):
    with pytest.raises(DataError, match=message):
        BM25Index.build(passages)


def test_wrong_search_arguments():
    index = BM25Index.build(corpus(1))
    with pytest.raises(TypeError, match="write \\[question\\]"):
        index.search("tram", 3)
    with pytest.raises(ValueError, match="k=0"):
        index.search(["tram"], 0)
