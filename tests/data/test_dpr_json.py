"""Training JSON: streaming, faults and their places, ids."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gc_dpr.data import Passage, TrainingExample, read_training_examples
from gc_dpr.data.readers.dpr_json import numbered_retrieval_results, write_dpr_json
from gc_dpr.data.readers.json_stream import iter_objects
from gc_dpr.errors import DataError

RECORD = {"question": "who?", "answers": ["Ada"], "positive_ctxs": [{"text": "Ada."}]}


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        path = tmp_path / "train.json"
        path.write_bytes(text.encode())
        return list(read_training_examples(path))

    return read_text


def stream(text, block_bytes):
    handle = io.BufferedReader(io.BytesIO(text.encode()))
    return list(iter_objects(handle, Path("f"), block_bytes=block_bytes))


def test_fields_and_ids(read):
    record = {
        "question": "who?",
        "answers": ["Ada", "Lovelace"],
        "dataset": "x",
        "positive_ctxs": [
            {"title": "T", "text": "p", "passage_id": "07", "score": 1000},
            {"title": None, "text": "q", "psg_id": 8},
        ],
        "hard_negative_ctxs": [{"text": "h", "id": 9.0}],
        "negative_ctxs": [{"text": "n"}],
    }
    [example] = read(json.dumps([record]))
    assert example.id == "train.json#0"
    assert example.answers == ("Ada", "Lovelace")
    assert example.positives == (Passage("07", "T", "p"), Passage("8", "", "q"))
    assert example.hard_negatives == (Passage("9", "", "h"),)
    assert example.random_negatives == (Passage("", "", "n"),)


@pytest.mark.parametrize("key", ["id", "question_id", "qid", "query_id"])
def test_own_ids_are_used(read, key):
    examples = read(json.dumps([{**RECORD, key: 17}, RECORD, {**RECORD, key: None}]))
    assert [e.id for e in examples] == ["17", "train.json#1", "train.json#2"]


def test_missing_and_null_lists_are_empty(read):
    [one, two] = read(
        '[{"question": "a"}, {"question": "b", "answers": null, "positive_ctxs": null}]'
    )
    assert one.positives == one.answers == two.positives == two.answers == ()


def test_list_and_lines_are_the_same(read):
    records = [{**RECORD, "question": f"question {i}\u2028"} for i in range(5)]
    wanted = read(json.dumps(records))
    assert read(json.dumps(records, indent=2, ensure_ascii=False)) == wanted
    assert read("\n".join(json.dumps(r, ensure_ascii=False) for r in records)) == wanted
    assert read("\n\n  " + json.dumps(records) + " \n") == wanted
    assert read("[]") == read("[\n]\n") == []


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"question": None}, "question: found None", "a string"),
        ({"question": 5}, r"question: found 5 \(int\)", "a string"),
        ({"answers": "Ada"}, "answers: found 'Ada'", "a list of strings"),
        ({"answers": ["a", 1]}, r"answers\[1\]: found 1", "a string"),
        ({"positive_ctxs": {}}, "positive_ctxs: found {}", "a list of passages"),
        ({"positive_ctxs": ["x"]}, r"positive_ctxs\[0\]: found 'x'", "an object"),
        (
            {"positive_ctxs": [{"text": "a"}, {"text": "b"}, {"text": 3}]},
            r"positive_ctxs\[2\].text: found 3",
            "a string",
        ),
        ({"hard_negative_ctxs": [{"title": "t"}]}, r"\[0\].text: it is missing", "a string"),
        ({"negative_ctxs": [{"text": "a", "title": 1}]}, r"negative_ctxs\[0\].title", "null"),
        ({"positive_ctxs": [{"text": "a", "psg_id": [1]}]}, r"\[0\].psg_id: found \[1\]", "whole"),
        ({"id": True}, "id: found True", "a string or a whole number"),
        ({"id": 1.5}, "id: found 1.5", "a string or a whole number"),
    ],
)
def test_wrong_types_name_line_and_key(read, change, key, expected):
    text = "[\n" + json.dumps(RECORD) + ",\n" + json.dumps({**RECORD, **change}) + "\n]"
    with pytest.raises(DataError, match=f"{key}.*expected .*{expected}") as caught:
        read(text)
    assert caught.value.line == 3


GOOD = json.dumps(RECORD)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (f"[\n{GOOD},\n{GOOD}", 3, "after record 2 of the list, which is not closed by ]"),
        (f"[\n{GOOD},\n", 3, "the file ends at byte .* after record 1 of the list"),
        ("[", 1, "the file ends"),
        (f"[\n{GOOD},\n{GOOD[:40]}", 3, "ends at byte 121 inside the record that begins here"),
        (f"{GOOD}\n{GOOD[:-1]}", 2, "inside the record that begins here"),
        (f'[\n{GOOD},\n{{"question": "a", }}]', 3, "broken JSON"),
        (f'[\n{GOOD},\n{{"question": "a" "b"}}]', 3, "broken JSON: Expecting ','"),
        (f"[\n{GOOD}\n{GOOD}]", 3, "found '{' after record 1 of the list, expected , or ]"),
        (f"[\n{GOOD},\n]", 3, "a comma stands before the closing ]"),
        (f"[\n{GOOD}]\n]", 3, "more text follows after the end of the JSON list"),
        (f"{GOOD}\nnull\n", 2, "found null where the next line's object should begin"),
        (f'{GOOD}\n{{"question": \n{GOOD}', 2, "inside the record that begins here"),
        ('[{"question": "two\nlines"}]', 1, "broken JSON: Invalid control character"),
        ('["who?"]', 1, "found a string in the list, expected an object"),
        ("[1, 2]", 1, "found a number in the list"),
        ("[[]]", 1, "found a list in the list"),
        ("[null]", 1, "found null in the list"),
        (
            '{"version": 1, "data": 0}',
            1,
            "a first record with the keys version, data, expected DPR",
        ),
        (f'{GOOD}\n{{"version": 1, "data": 0}}', 2, r"missing \(the object has: version, data\)"),
        (f'{GOOD}\n{{"question": "a", "ctxs": []}}', 2, "a retrieval result among training exam"),
        ('"who?"', None, "found text that begins '\"who\\?\"', expected DPR training JSON"),
        ("just words\n", None, "found text that begins 'just words', expected DPR training JSON"),
        ("[" + '{"question":' * 100_000, 1, "cannot be read"),
    ],
)
def test_broken_files_name_the_place(read, text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read(text)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


def test_byte_of_broken_json_counts_bytes_not_characters(read):
    text = '[{"question": "caf\u00e9"},\n{"question": ?}]'
    byte = text.encode().index(b"?") + 1
    with pytest.raises(DataError, match=rf"Expecting value \(byte {byte} of the text\)"):
        read(text)


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 64, 1 << 20])
def test_faults_are_found_in_the_same_place_at_any_block_size(block_bytes):
    text = f'[\n{GOOD},\n{{"question": "\u00e9\u00e9", "x": tru }},\n' + f"{GOOD},\n" * 20
    with pytest.raises(DataError) as caught:
        stream(text, block_bytes)
    byte = text.encode().index(b"tru") + 1
    assert caught.value.line == 3
    assert f"broken JSON: Expecting value (byte {byte} of the text)" in str(caught.value)


def test_broken_record_does_not_read_the_rest_of_the_file():
    class Counting(io.BytesIO):
        taken = 0

        def readinto(self, buffer):
            size = super().readinto(buffer)
            self.taken += size
            return size

    source = Counting(("[{broken}," + f"{GOOD}," * 100_000).encode())
    with pytest.raises(DataError):
        list(iter_objects(io.BufferedReader(source, 4096), Path("f"), block_bytes=4096))
    assert source.taken < 20_000


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3), max_size=4)


@settings(deadline=None)
@given(
    records=OBJECTS,
    block_bytes=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    lines=st.booleans(),
)
def test_any_block_size_gives_what_json_gives(records, block_bytes, indent, ascii_only, lines):
    options = {"indent": indent, "ensure_ascii": ascii_only}
    if lines:
        text = "\n".join(json.dumps(record, **options) for record in records)
    else:
        text = json.dumps(records, **options)
    wanted = json.loads(json.dumps(records))
    assert [record for _, record in stream(text, block_bytes)] == wanted


@pytest.mark.parametrize("block_bytes", [1, 5, 1000])
def test_lines_of_records(block_bytes):
    text = '[\n\n{"a": 1},\n{"b":\n 2}, {"c": 3}\n]\n'
    assert [line for line, _ in stream(text, block_bytes)] == [3, 4, 5]


def test_large_record_takes_linear_time():
    record = {"question": "x" * 300_000}
    [(_, read)] = stream(json.dumps([record]), 16)
    assert read == record


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
PASSAGES = st.lists(st.builds(Passage, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple)
EXAMPLES = st.lists(
    st.builds(
        TrainingExample,
        TEXTS.filter(bool),
        TEXTS,
        st.lists(TEXTS, max_size=2).map(tuple),
        PASSAGES,
        PASSAGES,
        PASSAGES,
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=40)
@given(examples=EXAMPLES, ending=st.sampled_from(["json", "jsonl"]))
def test_what_is_written_is_read_back(tmp_path_factory, examples, ending):
    folder = tmp_path_factory.mktemp("round")
    for packing in ("", ".gz", ".zst"):
        path = folder / f"out.{ending}{packing}"
        assert write_dpr_json(path, iter(examples)) == len(examples)
        assert list(read_training_examples(path)) == examples


def test_what_is_written_is_plain_json(tmp_path):
    example = TrainingExample("q\u2028", "who?", ("Ada",), (Passage("07", "T", "p"),))
    bare = TrainingExample("", "why?", (), (Passage("", "", "p"),))
    write_dpr_json(tmp_path / "out.json", [example, bare])
    write_dpr_json(tmp_path / "out.jsonl", [example, bare])
    wanted = [
        {
            "id": "q\u2028",
            "question": "who?",
            "answers": ["Ada"],
            "positive_ctxs": [{"title": "T", "text": "p", "passage_id": "07"}],
            "negative_ctxs": [],
            "hard_negative_ctxs": [],
        },
        {
            "question": "why?",
            "answers": [],
            "positive_ctxs": [{"title": "", "text": "p"}],
            "negative_ctxs": [],
            "hard_negative_ctxs": [],
        },
    ]
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == wanted
    lines = (tmp_path / "out.jsonl").read_bytes().decode().split("\n")
    assert [json.loads(line) for line in lines[:-1]] == wanted
    assert lines[-1] == ""
    assert write_dpr_json(tmp_path / "none.json", []) == 0
    assert json.loads((tmp_path / "none.json").read_text()) == []


def result(**changes):
    ctxs = [
        {"id": "wiki:3", "title": "B", "text": "b", "score": "9.5", "has_answer": False},
        {"id": "wiki:1", "title": "A", "text": "a", "score": "9.25", "has_answer": True},
        {"id": "wiki:2", "title": "C", "text": "c", "score": 8, "has_answer": False},
        {"id": 4, "title": None, "text": "d", "score": "7", "has_answer": True},
    ]
    return {"question": "who?", "answers": ["a"], "ctxs": ctxs, **changes}


def test_retrieval_results_become_positives_and_hard_negatives_in_rank_order(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps([result(), result(id=7, ctxs=[])], indent=4))
    (line, example), (_, empty) = numbered_retrieval_results(path)
    assert line == 2
    assert example == TrainingExample(
        "results.json#0",
        "who?",
        ("a",),
        (Passage("wiki:1", "A", "a"), Passage("4", "", "d")),
        (Passage("wiki:3", "B", "b"), Passage("wiki:2", "C", "c")),
    )
    assert empty == TrainingExample("7", "who?", ("a",), ())
    contriever = json.dumps([result()]).replace("has_answer", "hasanswer")
    path.write_text(contriever)
    assert next(read_training_examples(path)) == example


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ctxs": [{"text": "a"}]},
            r"ctxs\[0\].has_answer: it is missing .*expected true or false",
        ),
        ({"ctxs": [{"text": "a", "has_answer": "True"}]}, r"ctxs\[0\].has_answer: found 'True'"),
        ({"ctxs": [{"has_answer": True}]}, r"ctxs\[0\].text: it is missing"),
        ({"ctxs": None}, "ctxs: found None"),
        ({"question": 3}, "question: found 3"),
    ],
)
def test_faults_of_retrieval_results(tmp_path, change, message):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(result()) + "\n" + json.dumps(result(**change)))
    with pytest.raises(DataError, match=message) as caught:
        list(read_training_examples(path))
    assert caught.value.line == 2
