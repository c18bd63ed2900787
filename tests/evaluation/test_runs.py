import json
import logging
from pathlib import Path

import numpy as np
import pytest

from gc_dpr.data.records import Passage, Question
from gc_dpr.errors import DataError
from gc_dpr.evaluation.runs import read_dpr_json, read_trec, write_dpr_json, write_trec

GOLDEN = Path(__file__).parents[1] / "golden" / "dpr_results.json"


def random_run(seed, *, questions=20, depth=30):
    draw = np.random.default_rng(seed)
    run = {}
    for question in range(questions):
        scores = np.sort(draw.normal(size=depth).astype(np.float32))[::-1]
        scores[5:9] = scores[5]  # equal scores
        ids = draw.permutation(1000)[:depth]
        run[f"q{question}"] = [(f"wiki:{i}", float(s)) for i, s in zip(ids, scores, strict=True)]
    return run


@pytest.mark.parametrize("seed", range(3))
def test_trec_round_trip_keeps_ids_scores_and_order(tmp_path, seed):
    run = random_run(seed)
    path = write_trec(tmp_path / "run.trec", run, tag="dense")
    assert path.is_absolute()
    assert read_trec(path) == run
    assert list(read_trec(path)) == list(run)


def test_trec_lines(tmp_path):
    path = write_trec(tmp_path / "r", {"7": [("a", np.float32(0.1)), ("ü", -2)]}, tag="t")
    assert path.read_bytes().decode() == "7 Q0 a 1 0.10000000149011612 t\n7 Q0 ü 2 -2.0 t\n"


def test_trec_is_sorted_by_score_then_rank(tmp_path):
    path = tmp_path / "r"
    path.write_text(
        "q Q0 c 9 1.5 x\n\nq\tQ0\tb 3 1.5 x\nq Q0 a 1 1 x\nz Q0 a 0 1e3 x\r\nq Q0 d 0 2 x"
    )
    assert read_trec(path) == {
        "q": [("d", 2.0), ("b", 1.5), ("c", 1.5), ("a", 1.0)],
        "z": [("a", 1000.0)],
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"q Q0 a 1 1.0 x\nq Q0 b 2 1.0\n", r"r:2: found 5 columns, expected 6"),
        (b"q Q0 a 1 1.0 x\nq Q0 a 2 0.5 x\n", r"r:2: passage 'a' occurs again for question 'q'"),
        (b"q Q0 a 1 nan x\n", "r:1: score is 'nan'"),
        (b"q Q0 a 1 inf x\n", "r:1: score is 'inf'"),
        (b"q Q0 a 1 high x\n", "r:1: score is 'high'"),
        (b"q Q0 a first 1 x\n", "r:1: rank is 'first'"),
        (b"q Q0 a 1 1 x\nq Q0 \xff 1 1 x\n", "r:2: not UTF-8"),
    ],
)
def test_trec_faults_name_file_and_line(tmp_path, content, message):
    path = tmp_path / "r"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_trec(path)


def test_missing_files(tmp_path):
    with pytest.raises(DataError, match="no such file; expected a TREC run"):
        read_trec(tmp_path / "none")
    with pytest.raises(DataError, match="no such file; expected a DPR result file"):
        read_dpr_json(tmp_path / "none")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"my question": [("a", 1.0)]}, "question id 'my question' .* white space"),
        ({"q": [("a\u00a0b", 1.0)]}, "passage id .* white space"),
        ({"q": [("", 1.0)]}, "passage id '' is empty"),
        ({"q": [("a", 2.0), ("a", 1.0)]}, "has passage 'a' twice"),
        ({"q": [("a", float("nan"))]}, "not a finite number"),
        ({"q": [("a", 1.0), ("b", 2.0)]}, "expected the best passage first"),
    ],
)
def test_runs_that_trec_cannot_hold_are_refused(tmp_path, run, message):
    with pytest.raises(DataError, match=message):
        write_trec(tmp_path / "r", run, tag="t")
    assert list(tmp_path.iterdir()) == [], "nothing half-written"


def test_a_tag_is_one_word(tmp_path):
    for tag in ("", "two words", " x"):
        with pytest.raises(ValueError, match="one word"):
            write_trec(tmp_path / "r", {}, tag=tag)


def test_a_question_without_passages_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        write_trec(tmp_path / "r", {"q": [], "p": [("a", 1.0)]}, tag="t")
    assert "1 question(s) without any passage, such as 'q'" in caplog.text


def parts_of(entries):
    run = {e.question.id: [(p.passage.id, p.score) for p in e.passages] for e in entries}
    questions = [e.question for e in entries]
    passages = {p.passage.id: p.passage for e in entries for p in e.passages}
    flags = {e.question.id: [p.has_answer for p in e.passages] for e in entries}
    return run, questions, passages, flags


def test_a_file_of_dpr_is_read_and_written_byte_for_byte(tmp_path):
    entries = read_dpr_json(GOLDEN)
    assert [e.question.id for e in entries] == ["0", "1"]
    assert entries[0].question.answers == ("1984)",)
    first = entries[0].passages[0]
    assert (first.passage.id, first.score, first.has_answer) == ("wiki:10", 28.705624, False)
    assert first.passage.title == "  Pavel Dvorsky "
    run, questions, passages, flags = parts_of(entries)
    path = write_dpr_json(tmp_path / "out.json", run, questions, passages, has_answer=flags)
    assert path.read_bytes() == GOLDEN.read_bytes()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_written_as_the_json_module_would(tmp_path, count):
    questions = [Question(f"q{i}", f"wo\n{i}?", ("ü", "\u2028")) for i in range(count)]
    passages = {"p": Passage("p", "Tïtle", 'text "x"\n    y')}
    run = {q.id: [("p", float(np.float32(0.1)))] for q in questions}
    path = write_dpr_json(tmp_path / "out.json", run, questions, passages)
    expected = [
        {
            "id": q.id,
            "question": q.text,
            "answers": list(q.answers),
            "ctxs": [{"id": "p", "title": "Tïtle", "text": 'text "x"\n    y', "score": "0.1"}],
        }
        for q in questions
    ]
    assert path.read_text(encoding="ascii") == json.dumps(expected, indent=4) + "\n"
    assert [e.question for e in read_dpr_json(path)] == questions


def test_scores_keep_their_digits(tmp_path):
    scores = [1e300, 0.1, float(np.float32(0.1)), 28.0]
    run = {"0": [(str(i), s) for i, s in enumerate(scores)]}
    passages = {str(i): Passage(str(i), "", "") for i in range(4)}
    path = write_dpr_json(tmp_path / "o", run, [Question("0", "q")], passages)
    written = [context["score"] for context in json.loads(path.read_text())[0]["ctxs"]]
    assert written == ["1e+300", "0.1", "0.1", "28.0"]


def test_questions_that_the_run_leaves_out_get_no_passages(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        path = write_dpr_json(tmp_path / "o", {}, [Question("0", "q")], {}, has_answer={})
    assert "1 of 1 questions are not in the run" in caplog.text
    assert read_dpr_json(path)[0].passages == []


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    questions = [Question("a", "?")]
    passages = {"p": Passage("p", "", "")}
    path = tmp_path / "o"
    with pytest.raises(DataError, match="such as 'b', are not among the questions"):
        write_dpr_json(path, {"b": []}, questions, passages)
    with pytest.raises(DataError, match="passage 'x' of question 'a' is not in the corpus"):
        write_dpr_json(path, {"a": [("x", 1.0)]}, questions, passages)
    with pytest.raises(ValueError, match="0 flags for 1 passages"):
        write_dpr_json(path, {"a": [("p", 1.0)]}, questions, passages, has_answer={})
    with pytest.raises(DataError, match=r"1 question id\(s\) repeat"):
        write_dpr_json(path, {}, questions * 2, passages)
    assert list(tmp_path.iterdir()) == []


def test_optional_keys_may_be_missing(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('[{"question": "q", "ctxs": [{"id": 7, "title": null}]}]')
    (entry,) = read_dpr_json(path)
    assert entry.question == Question("0", "q")
    assert entry.passages == [(Passage("7", "", ""), None, None)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"question": "q",\n', r"r\.json:3: not JSON"),
        ('{"0": {}}', "found a JSON dict, expected DPR's list"),
        ("[3]", r"\[0\]: found 3, expected an object"),
        ('[{"ctxs": []}]', r"\[0\]\.question: found nothing"),
        ('[{"question": "q"}]', r"\[0\]\.ctxs: found nothing, expected a list"),
        ('[{"question": "q", "answers": "a", "ctxs": []}]', r"\[0\]\.answers: found \"a\""),
        ('[{"question": "q", "answers": [1], "ctxs": []}]', r"\[0\]\.answers\[0\]: found 1"),
        ('[{"question": "q", "ctxs": [{}]}]', r"\[0\]\.ctxs\[0\]\.id: found nothing"),
        ('[{"question": "q", "ctxs": [{"id": "a", "score": "NaN"}]}]', r"score: found \"NaN\""),
        ('[{"question": "q", "ctxs": [{"id": "a", "score": true}]}]', r"score: found true"),
        ('[{"question": "q", "ctxs": [{"id": "a", "score": []}]}]', r"score: found \[\]"),
        ('[{"question": "q", "ctxs": [{"id": "a", "has_answer": "no"}]}]', "expected true or"),
        ('[{"question": "q", "ctxs": [{"id": "a", "text": 3}]}]', r"text: found 3"),
        ('[{"question": "q", "ctxs": [{"id": "a"}, {"id": "a"}]}]', r"ctxs\[1\]: passage 'a'"),
        ('[{"question": "q", "id": "1", "ctxs": []}, {"question": "q", "ctxs": []}]', "twice"),
    ],
)
def test_faults_in_a_result_file_name_the_place(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_dpr_json(path)


def test_a_result_file_must_be_utf8(tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(b'["\xff"]')
    with pytest.raises(DataError, match="not UTF-8"):
        read_dpr_json(path)
