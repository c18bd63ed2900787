"""SQuAD: questions in order, impossible ones, faults and their places."""

import copy
import gzip
import json
import logging

import pytest

from gc_dpr.data import Passage, TrainingExample
from gc_dpr.data.readers.squad_json import numbered_squad
from gc_dpr.errors import DataError

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Ada_Lovelace",
            "paragraphs": [
                {
                    "context": "Ada wrote it in 1843.",
                    "qas": [
                        {
                            "id": "56be",
                            "question": "When?",
                            "answers": [
                                {"text": "in 1843", "answer_start": 13},
                                {"text": "1843", "answer_start": 16},
                                {"text": "in 1843", "answer_start": 13},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "id": "56bf",
                            "question": "Where?",
                            "answers": [],
                            "plausible_answers": [{"text": "it", "answer_start": 10}],
                            "is_impossible": True,
                        },
                    ],
                },
                {"context": "Nobody asks.", "qas": []},
            ],
        },
        {
            "title": "Caf\u00e9",
            "paragraphs": [
                {
                    "context": "Tea.",
                    "qas": [
                        {"question": "What?", "answers": [{"text": "Tea", "answer_start": 0}]},
                        {"id": 9, "question": "Who?", "answers": []},
                    ],
                }
            ],
        },
    ],
}
EXPECTED = [
    TrainingExample(
        "56be",
        "When?",
        ("in 1843", "1843"),
        (Passage("", "Ada_Lovelace", "Ada wrote it in 1843."),),
    ),
    TrainingExample("56bf", "Where?", (), ()),
    TrainingExample("squad.json#2", "What?", ("Tea",), (Passage("", "Caf\u00e9", "Tea."),)),
    TrainingExample("9", "Who?", (), ()),
]


@pytest.fixture
def read(tmp_path):
    def read_bytes(data):
        path = tmp_path / "squad.json"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return list(numbered_squad(path))

    return read_bytes


def test_every_question_is_an_example(read):
    assert read(json.dumps(SQUAD)) == [(1, example) for example in EXPECTED]


def test_layout_mark_line_ends_and_gzip_do_not_matter(read):
    pretty = json.dumps(SQUAD, indent=1, ensure_ascii=False).encode()
    windows = b"\xef\xbb\xbf" + pretty.replace(b"\n", b"\r\n")
    for data in (pretty, windows, gzip.compress(pretty)):
        assert [example for _, example in read(data)] == EXPECTED
    assert read(b"\n\n" + pretty + b"\n\n") == [(3, example) for example in EXPECTED]


def test_version_one_has_no_flag_and_may_put_data_first(read):
    question = {"id": "q", "question": "What?", "answers": [{"text": "Tea"}]}
    article = {"paragraphs": [{"context": "Tea.", "qas": [question]}]}
    [(_, example)] = read(json.dumps({"data": [article], "version": "1.1"}))
    assert example == TrainingExample("q", "What?", ("Tea",), (Passage("", "", "Tea."),))


def test_an_impossible_question_may_lack_its_answers(read):
    question = {"id": "q", "question": "What?", "is_impossible": True}
    article = {
        "paragraphs": [{"context": "Tea.", "qas": [question, {**question, "answers": None}]}]
    }
    assert [e.positives for _, e in read(json.dumps({"data": [article]}))] == [(), ()]


def test_no_articles(read):
    assert read('{"data": []}') == []


def test_keys_that_are_not_kept_are_counted_and_logged(read, caplog):
    caplog.set_level(logging.INFO)
    read(json.dumps({**SQUAD, "licence": "x"}))
    expected = "not kept: data[].paragraphs[].qas[].plausible_answers (1), licence (1)"
    assert expected in caplog.text


ARTICLE = ("data", 0)
PARAGRAPH = (*ARTICLE, "paragraphs", 0)
QUESTION = (*PARAGRAPH, "qas", 1)
ANSWER = (*PARAGRAPH, "qas", 0, "answers", 1)
MISSING = object()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("data",), MISSING, r"data: it is missing \(the object has: version\), expected a list"),
        (("data",), None, "data: found None .*, expected a list, each an object with title and"),
        (("data",), {}, "data: found {} .*, expected a list"),
        (ARTICLE, "x", r"data\[0\]: found 'x' .*, expected an object with title and paragraphs"),
        ((*ARTICLE, "title"), 4, r"data\[0\].title: found 4 .*, expected a string or null"),
        ((*ARTICLE, "paragraphs"), MISSING, r"data\[0\].paragraphs: it is missing"),
        ((*ARTICLE, "paragraphs"), None, r"data\[0\].paragraphs: found None"),
        (PARAGRAPH, [], r"data\[0\].paragraphs\[0\]: found \[\] .*, expected an object with"),
        ((*PARAGRAPH, "context"), None, r"paragraphs\[0\].context: found None .*, expected a str"),
        ((*PARAGRAPH, "context"), MISSING, r"paragraphs\[0\].context: it is missing"),
        ((*PARAGRAPH, "qas"), MISSING, r"paragraphs\[0\].qas: it is missing"),
        (QUESTION, None, r"qas\[1\]: found None .*, expected an object with question"),
        ((*QUESTION, "question"), 3, r"paragraphs\[0\].qas\[1\].question: found 3"),
        ((*QUESTION, "question"), MISSING, r"qas\[1\].question: it is missing"),
        ((*QUESTION, "id"), 1.5, r"qas\[1\].id: found 1.5 .*, expected a string or a whole"),
        ((*QUESTION, "is_impossible"), "no", r"qas\[1\].is_impossible: found 'no' .*true, false"),
        ((*QUESTION, "is_impossible"), 0, r"qas\[1\].is_impossible: found 0 .*true, false"),
        ((*QUESTION, "answers"), [{"text": "x"}], r"qas\[1\].is_impossible: found true and 1 ans"),
        ((*QUESTION, "answers"), {"text": ["x"]}, r"qas\[1\].answers: found {.*expected a list"),
        ((*PARAGRAPH, "qas", 0, "answers"), MISSING, r"qas\[0\].answers: it is missing"),
        (ANSWER, "1843", r"qas\[0\].answers\[1\]: found '1843' .*, expected an object with text"),
        ((*ANSWER, "text"), 1843, r"answers\[1\].text: found 1843 \(int\), expected a string"),
        ((*ANSWER, "text"), MISSING, r"answers\[1\].text: it is missing"),
    ],
)
def test_wrong_values_name_file_line_and_key(read, place, value, message):
    squad = copy.deepcopy(SQUAD)
    holder = squad
    for step in place[:-1]:
        holder = holder[step]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    with pytest.raises(DataError, match=rf"squad\.json:2: .*{message}") as caught:
        read("\n" + json.dumps(squad))
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (json.dumps(SQUAD)[:-1], 1, "cut off"),
        (json.dumps(SQUAD)[:200], 1, "cut off"),
        (json.dumps(SQUAD) + "\n{}", 2, "another object follows the first"),
        (json.dumps(SQUAD) + "\n]", 2, "broken JSON"),
        ('{"data": [}', 1, "broken JSON"),
        ('["x"]', 1, "found a string"),
        ("[]", None, "no object"),
        (" \n", None, "no object"),
        ("", None, "the file is empty"),
        ("word", 1, "found 'w'"),
        (gzip.compress(json.dumps(SQUAD).encode())[:-9], None, "gzip stream ends before"),
    ],
)
def test_broken_files(read, text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read(text)
    assert caught.value.line == line
