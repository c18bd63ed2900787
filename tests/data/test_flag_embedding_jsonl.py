"""FlagEmbedding rows: fields, faults and their places, what is not kept, round trips."""

import gzip
import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gc_dpr.data import Passage, TrainingExample
from gc_dpr.data.readers.flag_embedding_jsonl import (
    numbered_flag_embedding,
    write_flag_embedding,
)
from gc_dpr.errors import DataError

RECORD = {"query": "who?", "pos": ["a", "b"], "neg": ["c"]}


@pytest.fixture
def read(tmp_path):
    def read_bytes(data):
        path = tmp_path / "train.jsonl"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return list(numbered_flag_embedding(path))

    return read_bytes


def lines(*records, end="\n"):
    return "".join(json.dumps(record) + end for record in records)


def untitled(*texts):
    return tuple(Passage("", "", text) for text in texts)


def test_fields(read):
    record = {**RECORD, "pos_id": [1, None], "neg_id": ["07"], "id": "x", "answers": ["Ada"]}
    assert read(lines(record, RECORD)) == [
        (
            1,
            TrainingExample(
                id="x",
                question="who?",
                answers=("Ada",),
                positives=(Passage("1", "", "a"), Passage("", "", "b")),
                hard_negatives=(Passage("07", "", "c"),),
            ),
        ),
        (2, TrainingExample("train.jsonl#1", "who?", (), untitled("a", "b"), untitled("c"))),
    ]


def test_what_may_be_missing_or_null(read):
    bare = {"query": "a", "pos": []}
    nulls = dict.fromkeys(
        ["neg", "pos_id", "neg_id", "pos_scores", "neg_scores", "prompt", "type", "id", "answers"]
    )
    assert read(lines(bare, {**bare, **nulls})) == [
        (1, TrainingExample("train.jsonl#0", "a", (), ())),
        (2, TrainingExample("train.jsonl#1", "a", (), ())),
    ]


def test_blank_lines_windows_ends_mark_and_gzip_change_nothing_but_lines(read):
    plain = read(lines(RECORD, RECORD))
    assert read(gzip.compress(lines(RECORD, RECORD).encode())) == plain
    assert read(b"\xef\xbb\xbf" + lines(RECORD, RECORD, end="\r\n").encode()) == plain
    spaced = read("\n \n" + lines(RECORD, end="\n\r\n") + lines(RECORD))
    assert spaced == [(3, plain[0][1]), (5, plain[1][1])]


def test_scores_prompt_and_type_are_checked_counted_and_not_kept(read, caplog):
    caplog.set_level(logging.INFO)
    extra = {"pos_scores": [1, 0.5], "neg_scores": [-3], "prompt": "Find: ", "type": "symmetric"}
    with_extra = read(lines({**RECORD, **extra}, {**RECORD, "prompt": "x", "own": 1}))
    assert "not kept: neg_scores (1), own (1), pos_scores (1), prompt (2), type (1)" in caplog.text
    assert with_extra == read(lines(RECORD, RECORD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": None}, r"query: found None \(NoneType\), expected a string"),
        ({"query": 5}, r"query: found 5 \(int\), expected a string"),
        ({"pos": None}, "pos: found None .*, expected a list of strings"),
        ({"pos": "a"}, "pos: found 'a' .*, expected a list of strings"),
        ({"pos": ["a", 2]}, r"pos\[1\]: found 2 \(int\), expected a string"),
        ({"neg": "a"}, "neg: found 'a' .*, expected a list of strings"),
        ({"neg": [None]}, r"neg\[0\]: found None .*, expected a string"),
        ({"neg": [{"text": "a"}]}, r"neg\[0\]: found {'text': 'a'} \(dict\), expected a string"),
        ({"pos_id": "ab"}, "pos_id: found 'ab' .*, expected a list of ids"),
        ({"pos_id": ["1", 1.5]}, r"pos_id\[1\]: found 1.5 .*, expected a string or a whole"),
        ({"pos_id": ["1"]}, "pos_id: found 1 values, expected 2: one for each text of pos"),
        ({"pos_scores": [1.0]}, "pos_scores: found 1 values, expected 2"),
        ({"neg_scores": []}, "neg_scores: found 0 values, expected 1: .* text of neg"),
        ({"neg_id": ["1", "2"]}, "neg_id: found 2 values, expected 1"),
        ({"pos_scores": 3}, "pos_scores: found 3 .*, expected a list of numbers"),
        ({"pos_scores": [1, "2"]}, r"pos_scores\[1\]: found '2' .*, expected a finite number"),
        ({"pos_scores": [1, True]}, r"pos_scores\[1\]: found True .*, expected a finite number"),
        ({"neg_scores": [float("nan")]}, r"neg_scores\[0\]: found nan .*, expected a finite"),
        ({"neg_scores": [float("-inf")]}, r"neg_scores\[0\]: found -inf .*, expected a finite"),
        ({"prompt": 1}, "prompt: found 1 .*, expected a string or null"),
        ({"type": ["x"]}, r"type: found \['x'\] .*, expected a string or null"),
        ({"id": []}, r"id: found \[\] .*, expected a string or a whole number"),
        ({"answers": [1]}, r"answers\[0\]: found 1 .*, expected a string"),
    ],
)
def test_wrong_values_name_file_line_and_key(read, change, message):
    with pytest.raises(DataError, match=rf"train\.jsonl:3: {message}") as caught:
        read(lines(RECORD) + "\n" + lines({**RECORD, **change}))
    assert caught.value.line == 3


@pytest.mark.parametrize("key", ["query", "pos"])
def test_missing_keys(read, key):
    record = {name: value for name, value in RECORD.items() if name != key}
    with pytest.raises(DataError, match=rf"train\.jsonl:2: {key}: it is missing"):
        read(lines(RECORD, record))


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (lines(RECORD) + lines(RECORD)[:30], 2, "cut off"),
        (lines(RECORD) + "7\n", 2, "found a number"),
        (lines(RECORD) + '{"query": ?}\n', 2, "broken JSON"),
        ("", None, "the file is empty"),
    ],
)
def test_broken_files(read, text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read(text)
    assert caught.value.line == line


TEXT = st.text(
    st.one_of(st.sampled_from('"\\\n\r\t\u2028 ab'), st.characters(exclude_categories=["Cs"])),
    max_size=8,
)
PASSAGES = st.lists(st.builds(Passage, TEXT, st.just(""), TEXT), max_size=3).map(tuple)
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
    assert write_flag_embedding(path, examples) == len(examples)
    assert list(numbered_flag_embedding(path)) == list(enumerate(examples, start=1))


def test_written_rows_have_flag_embeddings_keys(tmp_path):
    path = tmp_path / "written.jsonl"
    example = TrainingExample("q", "caf\u00e9?", (), (Passage("p", "", "t"),), untitled("n"))
    write_flag_embedding(path, [example])
    text = path.read_text(encoding="utf-8")
    assert "caf\u00e9" in text
    assert json.loads(text) == {
        "id": "q",
        "query": "caf\u00e9?",
        "pos": ["t"],
        "pos_id": ["p"],
        "neg": ["n"],
    }


def test_titles_are_refused_or_put_before_the_text(tmp_path):
    path = tmp_path / "written.jsonl"
    titled, plain = Passage("1", "Ada", "wrote it."), Passage("2", "", "b")
    example = TrainingExample("q", "who?", (), (plain,), (titled,))
    with pytest.raises(DataError, match=r"'q' has the title 'Ada'.*join_titles=True"):
        write_flag_embedding(path, [example])
    assert not path.exists()
    write_flag_embedding(path, [example], join_titles=True)
    [(_, read_back)] = numbered_flag_embedding(path)
    assert read_back.positives == (plain,)
    assert read_back.hard_negatives == (Passage("1", "", "Ada wrote it."),)


def test_random_negatives_are_refused_or_joined_to_the_hard_ones(tmp_path):
    path = tmp_path / "written.jsonl"
    example = TrainingExample("q", "who?", (), (), untitled("a"), untitled("b"))
    with pytest.raises(DataError, match=r"'q' has random negatives.*random_as_hard=True"):
        write_flag_embedding(path, [example])
    assert write_flag_embedding(path, [example], random_as_hard=True) == 1
    [(_, read_back)] = numbered_flag_embedding(path)
    assert read_back.hard_negatives == untitled("a", "b")
