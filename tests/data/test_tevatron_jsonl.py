"""Tevatron rows: fields, faults and their places, what is not kept, round trips."""

import gzip
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gc_dpr.data import Passage, TrainingExample
from gc_dpr.data.readers.tevatron_jsonl import numbered_tevatron, write_tevatron
from gc_dpr.errors import DataError

PASSAGE = {"docid": "p", "title": "T", "text": "t"}
RECORD = {
    "query_id": "q",
    "query": "who?",
    "positive_passages": [PASSAGE],
    "negative_passages": [{"docid": 5, "title": None, "text": "n"}],
}


@pytest.fixture
def read(tmp_path):
    def read_bytes(data):
        path = tmp_path / "train.jsonl"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return list(numbered_tevatron(path))

    return read_bytes


def lines(*records, end="\n"):
    return "".join(json.dumps(record) + end for record in records)


def test_fields(read):
    [(line, example)] = read(lines({**RECORD, "answers": ["Ada", "Lovelace"]}))
    assert line == 1
    assert example == TrainingExample(
        id="q",
        question="who?",
        answers=("Ada", "Lovelace"),
        positives=(Passage("p", "T", "t"),),
        hard_negatives=(Passage("5", "", "n"),),
    )


def test_what_may_be_missing_or_null(read):
    bare = {"query": "a", "positive_passages": []}
    nulls = {**bare, "query_id": None, "answers": None, "negative_passages": None}
    number = {**bare, "query_id": 17, "positive_passages": [{"text": "t"}]}
    examples = [example for _, example in read(lines(bare, nulls, number))]
    assert examples[0] == TrainingExample("train.jsonl#0", "a", (), ())
    assert examples[1] == TrainingExample("train.jsonl#1", "a", (), ())
    assert examples[2] == TrainingExample("17", "a", (), (Passage("", "", "t"),))


def test_blank_lines_windows_ends_mark_and_gzip_change_nothing_but_lines(read):
    plain = read(lines(RECORD, RECORD))
    assert [line for line, _ in plain] == [1, 2]
    assert read(gzip.compress(lines(RECORD, RECORD).encode())) == plain
    assert read(b"\xef\xbb\xbf" + lines(RECORD, RECORD, end="\r\n").encode()) == plain
    assert read("\n \n" + lines(RECORD, end="\n\r\n") + lines(RECORD)) == [
        (3, plain[0][1]),
        (5, plain[1][1]),
    ]


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"query": None}, "query: found None", "a string"),
        ({"query": 5}, r"query: found 5 \(int\)", "a string"),
        ({"query_id": True}, "query_id: found True", "a string or a whole number"),
        ({"query_id": 1.5}, "query_id: found 1.5", "a string or a whole number"),
        ({"answers": "Ada"}, "answers: found 'Ada'", "a list of strings"),
        ({"answers": ["a", None]}, r"answers\[1\]: found None", "a string"),
        ({"positive_passages": None}, "positive_passages: found None", "a list"),
        ({"positive_passages": {}}, "positive_passages: found {}", "a list, each an object with"),
        ({"positive_passages": ["x"]}, r"positive_passages\[0\]: found 'x'", "an object with"),
        (
            {"positive_passages": [PASSAGE, {**PASSAGE, "text": 3}]},
            r"positive_passages\[1\].text: found 3",
            "a string",
        ),
        (
            {"negative_passages": [{"docid": "p", "title": "t"}]},
            r"negative_passages\[0\].text: it is missing \(the object has: docid, title\)",
            "a string",
        ),
        ({"negative_passages": [{**PASSAGE, "title": 1}]}, r"\[0\].title: found 1", "null"),
        ({"negative_passages": [{**PASSAGE, "docid": [1]}]}, r"\[0\].docid: found \[1\]", "whole"),
        ({"negative_passages": 1}, "negative_passages: found 1", "a list"),
    ],
)
def test_wrong_values_name_file_line_and_key(read, change, key, expected):
    with pytest.raises(
        DataError, match=rf"train\.jsonl:3: .*{key}.*expected .*{expected}"
    ) as caught:
        read(lines(RECORD) + "\n" + lines({**RECORD, **change}))
    assert caught.value.line == 3
    assert caught.value.path.name == "train.jsonl"
    assert expected in str(caught.value)


@pytest.mark.parametrize("key", ["query", "positive_passages"])
def test_missing_keys(read, key):
    record = {name: value for name, value in RECORD.items() if name != key}
    with pytest.raises(DataError, match=f"{key}: it is missing") as caught:
        read(lines(RECORD, record))
    assert caught.value.line == 2


def test_rows_with_ids_of_a_corpus_are_refused_clearly(read):
    record = {"query_id": "q", "query_text": "who?", "positive_document_ids": ["1"]}
    with pytest.raises(DataError, match=r"name passages of a corpus by id; expected rows that"):
        read(lines(record))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (lines(RECORD) + lines(RECORD)[:30], 2, "cut off"),
        (lines(RECORD) + "[1]\n", 2, "found a list"),
        (lines(RECORD) + "null\n", 2, "found null"),
        (lines(RECORD) + '{"query": ?}\n', 2, "broken JSON"),
        (lines(RECORD) + '{"query": "\\ud800"}\n', 2, "half of a character"),
        ("", None, "the file is empty"),
        (lines(RECORD).encode() + b'{"query": "\xe9"}\n', 2, "not UTF-8"),
        (gzip.compress(lines(RECORD).encode())[:-9], None, "gzip stream ends before"),
    ],
)
def test_broken_files(read, text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read(text)
    assert caught.value.line == line


def test_keys_that_are_not_kept_are_counted_and_logged(read, caplog):
    caplog.set_level(logging.INFO)
    other = {**RECORD, "split": 1, "positive_passages": [{**PASSAGE, "score": 1}] * 2}
    read(lines(RECORD, other, other))
    assert "not kept: positive_passages[].score (4), split (2)" in caplog.text
    caplog.clear()
    read(lines(RECORD))
    assert caplog.text == ""


def test_reading_is_lazy(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(lines(RECORD) + "x", encoding="utf-8")
    examples = numbered_tevatron(path)
    assert next(examples)[1].id == "q"
    with pytest.raises(DataError):
        next(examples)


TEXT = st.text(
    st.one_of(st.sampled_from('"\\\n\r\t\u2028 ab'), st.characters(exclude_categories=["Cs"])),
    max_size=8,
)
PASSAGES = st.lists(st.builds(Passage, TEXT, TEXT, TEXT), max_size=3).map(tuple)
EXAMPLES = st.lists(
    st.builds(
        TrainingExample,
        id=TEXT.filter(bool),
        question=TEXT,
        answers=st.lists(TEXT, max_size=3).map(tuple),
        positives=PASSAGES,
        hard_negatives=PASSAGES,
    ),
    min_size=1,
    max_size=4,
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(examples=EXAMPLES, ending=st.sampled_from(["jsonl", "jsonl.gz", "jsonl.zst"]))
def test_what_is_written_is_read_back(examples, ending, tmp_path):
    path = tmp_path / f"written.{ending}"
    assert write_tevatron(path, examples) == len(examples)
    assert list(numbered_tevatron(path)) == list(enumerate(examples, start=1))


def test_written_rows_have_tevatrons_keys(tmp_path):
    path = tmp_path / "written.jsonl"
    example = TrainingExample("q", "caf\u00e9?", (), (Passage("p", "T", "t"),))
    write_tevatron(path, [example])
    text = path.read_text(encoding="utf-8")
    assert "caf\u00e9" in text
    assert json.loads(text) == {
        "query_id": "q",
        "query": "caf\u00e9?",
        "positive_passages": [PASSAGE],
        "negative_passages": [],
    }


def test_random_negatives_are_refused_or_joined_to_the_hard_ones(tmp_path):
    path = tmp_path / "written.jsonl"
    one, two = Passage("1", "", "a"), Passage("2", "", "b")
    example = TrainingExample("q", "who?", (), (), (one,), (two,))
    with pytest.raises(DataError, match=r"'q' has random negatives.*random_as_hard=True"):
        write_tevatron(path, [example])
    assert not path.exists()
    assert write_tevatron(path, [example], random_as_hard=True) == 1
    [(_, read_back)] = numbered_tevatron(path)
    assert read_back == TrainingExample("q", "who?", (), (), (one, two))
