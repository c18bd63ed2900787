import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest

from gc_dpr.evaluation import has_answer, question_matching, top_k_accuracy

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "topk_validation.json").read_text(encoding="utf-8")
)


def golden_case(name):
    variant = GOLDEN["variants"][name]
    missing = set(variant.get("passages_with_text_null", ()))
    lengths = variant.get("lengths", [None] * len(GOLDEN["answers"]))
    ids = [row[0][:length] for row, length in zip(GOLDEN["closest_docs"], lengths, strict=True)]
    texts = [[None if i in missing else GOLDEN["passages"][i][0] for i in row] for row in ids]
    titles = [[GOLDEN["passages"][i][1] for i in row] for row in ids]
    return {
        "answers": variant.get("answers", GOLDEN["answers"]),
        "retrieved_texts": texts,
        "match": variant["match_type"],
        "titles": titles if name.endswith("use_title_true") else None,
    }, variant["expected"]


@pytest.mark.parametrize("name", sorted(GOLDEN["variants"]))
def test_agrees_with_dpr(name):
    case, expected = golden_case(name)
    result = top_k_accuracy(**case)
    assert result.per_question == expected["questions_doc_hits"]
    # DPR's list ends with the first question's list, and it drops first hits beyond (a fault of
    # it); up to there the numbers are the same, and ours go on to the end of the longest list.
    depth = len(expected["top_k_hits"])
    assert result.hits[:depth].tolist() == expected["top_k_hits"]
    assert result.accuracy[:depth].tolist() == expected["top_k_accuracy"]
    assert len(result.hits) == max(len(row) for row in case["retrieved_texts"])
    assert result.title_searched is (case["titles"] is not None)
    assert result.match == case["match"]


def test_ragged_lists_count_hits_beyond_the_first_list():
    result = top_k_accuracy([["a"], ["b"], ["c"]], [["x"], ["x", "y", "b"], []])
    assert result.hits.tolist() == [0, 0, 1]
    assert result.per_question == [[False], [False, False, True], []]
    assert result.at(3) == result.at(50) == pytest.approx(1 / 3)


def direct_accuracy(answers, texts, *, match, k):
    found = [
        any(has_answer(item, text, match=match) for text in row[:k])
        for item, row in zip(answers, texts, strict=True)
    ]
    return sum(found) / len(found)


def random_case(seed, *, questions=25, depth=8):
    draw = random.Random(seed)
    words = ["a", "the", "São", "Sao\u0303", "10", "1910", "C++", "ΟΔΟΣ", "no", "nobody", "-"]
    pool = [" ".join(draw.choices(words, k=draw.randint(0, 6))) for _ in range(12)] + [None]
    texts = [draw.choices(pool, k=draw.randint(0, depth)) for _ in range(questions)]
    answers = [
        [" ".join(draw.choices(words, k=draw.randint(1, 2))) for _ in range(draw.randint(0, 3))]
        for _ in range(questions)
    ]
    return answers, texts


@pytest.mark.parametrize("match", ["string", "kilt", "regex"])
@pytest.mark.parametrize("seed", range(5))
def test_equals_the_direct_count(seed, match):
    answers, texts = random_case(seed)
    result = top_k_accuracy(answers, texts, match=match)
    for k in (1, 2, 5, 8):
        assert result.at(k) == direct_accuracy(answers, texts, match=match, k=k)


def test_worker_processes_change_nothing():
    case, _ = golden_case("regex")
    expected = top_k_accuracy(**case)
    for workers in (1, 2):
        result = top_k_accuracy(**case, workers=workers, progress=True)
        assert result.per_question == expected.per_question
        assert np.array_equal(result.accuracy, expected.accuracy)
        assert result.description() == expected.description()


def test_an_error_in_a_worker_reaches_the_caller():
    texts = [["a"], [b"bytes"], [None]]
    for workers in (0, 1):
        with pytest.raises(TypeError, match="expected a string or None"):
            top_k_accuracy([["a"]] * 3, texts, workers=workers)


def test_each_passage_is_prepared_once(monkeypatch):
    prepared = []

    def counting(text, *, match):
        prepared.append(text)
        return text

    monkeypatch.setattr(question_matching, "prepare_passage", counting)
    top_k_accuracy([["q"]] * 50, [["one", "two"], ["two", "three"]] * 25)
    assert sorted(prepared) == ["one", "three", "two"]


def test_metrics_and_description():
    result = top_k_accuracy(
        [["a"], ["b"]], [["a", "x", "x", "x", "x"], ["x", "b"]], pool_size=5, ks=(1, 2, 100)
    )
    assert result.metrics() == {"top1_accuracy": 0.5, "top2_accuracy": 1, "top100_accuracy": 1}
    assert result.metrics([1]) == {"top1_accuracy": 0.5}
    assert result.description() == {
        "questions": 2,
        "questions_without_usable_answer": 0,
        "questions_with_empty_answer": 0,
        "match": "string",
        "title_searched": False,
        "pool_size": 5,
    }
    assert top_k_accuracy([["a"]], [["a"] * 6]).ks == (1, 5)
    with pytest.raises(ValueError, match="k=0"):
        result.at(0)


def messages(caplog, **arguments):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        top_k_accuracy(**arguments)
    return [record.getMessage() for record in caplog.records]


def test_a_cut_off_beyond_the_lists_is_said(caplog):
    case = {"answers": [["a"]], "retrieved_texts": [["a", "b"]], "ks": (1, 20)}
    assert "at most 2 passages" in messages(caplog, **case)[0]
    assert messages(caplog, **case, pool_size=2) == [], "the whole corpus was retrieved"


def test_empty_answers_are_counted_and_said(caplog):
    answers = [[""], [], ["a"], ["x", " "]]
    texts = [["z"]] * 4
    said = messages(caplog, answers=answers, retrieved_texts=texts)
    assert "2 of 4 questions have no usable answer" in said[0]
    assert "2 questions have an empty answer, which matches every passage" in said[1]
    result = top_k_accuracy(answers, texts)
    assert (result.questions_without_usable_answer, result.questions_with_empty_answer) == (2, 2)
    assert result.at(1) == 0.5
    ignored = top_k_accuracy(answers, texts, empty_answers="ignore")
    assert ignored.at(1) == 0
    assert ignored.questions == 4


def test_invalid_and_slow_patterns_are_said_once_with_counts(caplog, monkeypatch):
    answers = [["(open", "b"], ["(open"], ["(a|aa)+$"]]
    texts = [["b"] * 4, ["(open"], ["a" * 60 + "!"] * 2]
    matcher = question_matching.AnswerMatcher
    monkeypatch.setattr(
        question_matching, "AnswerMatcher", lambda *a, **k: matcher(*a, **k, time_limit=0.05)
    )
    said = messages(caplog, answers=answers, retrieved_texts=texts, match="regex")
    assert "1 of 3 questions have no usable answer" in said[0]
    assert "'(open' is no valid regular expression" in said[1]
    assert "a miss for 2 question(s), first for question 0" in said[1]
    assert "'(a|aa)+$' took too long on 2 passage(s)" in said[2]
    assert len(said) == 3


def test_the_wrong_mode_is_doubted(caplog):
    texts = [["text"]] * 2
    patterns = [["19[0-9]{2}"], [r"Alexander\s+Bell"]]
    assert 'match="regex" meant' in messages(caplog, answers=patterns, retrieved_texts=texts)[0]
    assert messages(caplog, answers=patterns, retrieved_texts=texts, match="regex") == []
    plain = [["U.S."], ["Washington (state)"]]
    said = messages(caplog, answers=plain, retrieved_texts=texts, match="regex")
    assert 'match="string" meant' in said[0]
    assert messages(caplog, answers=plain, retrieved_texts=texts) == []
    assert messages(caplog, answers=[["Who?"], ["[sic]"]], retrieved_texts=texts) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], []), ValueError, "no question"),
        (([["a"]], []), ValueError, "0 lists for 1 questions"),
        ((["Paris"], [["Paris"]]), TypeError, r"answers\[0\] is the string 'Paris'"),
        (([["a"], ["b", 3]], [["a"], ["b"]]), TypeError, r"answers\[1\]\[1\] is 3 \(int\)"),
        (([["a"]], ["abc"]), TypeError, r"retrieved_texts\[0\] is a string"),
    ],
)
def test_wrong_arguments_are_explained(arguments, error, message):
    with pytest.raises(error, match=message):
        top_k_accuracy(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "strings"}, 'did you mean "string"'),
        ({"empty_answers": "ignored"}, "ignore"),
        ({"workers": -1}, "workers=-1"),
        ({"ks": [0]}, "ks="),
        ({"titles": [["a", "b"]]}, r"titles\[0\] has 2 entries for 1 passages"),
        ({"titles": []}, "titles has 0 lists"),
    ],
)
def test_wrong_options_are_explained(options, message):
    with pytest.raises(ValueError, match=message):
        top_k_accuracy([["a"]], [["a"]], **options)


def test_nothing_retrieved_is_an_accuracy_of_zero():
    result = top_k_accuracy([["a"]], [[]])
    assert result.at(1) == 0.0
    assert result.accuracy.shape == (0,)
