"""Files of every training format through the one reader: found, mixed, packed, refused."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from gc_dpr.data import Passage, load_training_set, read_training_examples
from gc_dpr.data.readers.compression import zstd
from gc_dpr.data.readers.training_formats import (
    FORMATS,
    find_training_format,
    numbered_training_examples,
)
from gc_dpr.errors import DataError

CONTEXT = {"title": "T", "text": "Ada."}
DPR = {"question": "who?", "answers": ["Ada"], "positive_ctxs": [CONTEXT]}
RESULT = {"question": "who?", "answers": ["Ada"], "ctxs": [{**CONTEXT, "has_answer": True}]}
TEVATRON = {"query_id": "7", "query": "who?", "positive_passages": [{"docid": "1", **CONTEXT}]}
FLAG = {"query": "who?", "pos": ["Ada."], "neg": ["Bob."]}
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Ada.",
                    "qas": [{"question": "who?", "answers": [{"text": "Ada", "answer_start": 0}]}],
                }
            ],
        }
    ],
}
PAIR = {"anchor": "who?", "positive": "Ada.", "negative": "Bob."}
# name, content, the format's place in FORMATS
FILES = [
    ("dpr.json", json.dumps([DPR]), 0),
    ("dpr_lines.jsonl", json.dumps(DPR) + "\n", 0),
    ("any_name", json.dumps({"id": 1, **DPR}), 0),
    ("results.json", json.dumps([RESULT], indent=4), 1),
    ("results.jsonl", json.dumps(RESULT), 1),
    ("tevatron.jsonl", json.dumps(TEVATRON), 2),
    ("flag.jsonl", json.dumps(FLAG), 3),
    ("flag_list.json", json.dumps([FLAG]), 3),
    ("squad.json", json.dumps(SQUAD), 4),
    ("pairs.jsonl", json.dumps(PAIR), 5),
    ("pairs.json", "\n" + json.dumps([PAIR], indent=1), 5),
    ("answer.jsonl", json.dumps({"question": "who?", "answer": "Ada."}), 5),
    ("pairs.csv", "anchor,positive,negative\nwho?,Ada.,Bob.\n", 5),
    ("triplets.tsv", "anchor\tpositive\tnegative\nwho?\tAda.\tBob.\n", 5),
]
PACKINGS = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("name", "content", "place"), FILES, ids=[entry[0] for entry in FILES])
def test_every_format_is_found_and_read(write, name, content, place, packing):
    for start in ("", "\ufeff"):
        path = write(name + packing, PACKINGS[packing]((start + content).encode()))
        assert find_training_format(path).name == FORMATS[place]
        [(_, example)] = numbered_training_examples(path)
        assert list(read_training_examples(path)) == load_training_set(path).examples == [example]
        assert example.question == "who?"
        assert [passage.text for passage in example.positives] == ["Ada."]


def test_parquet_is_read_by_row(tmp_path):
    path = write_parquet(tmp_path / "p.parquet", {"query": ["who?", "why?"], "answer": ["a", "b"]})
    assert find_training_format(path).name == FORMATS[5]
    other_name = path.with_name("table")
    other_name.write_bytes(path.read_bytes())
    assert [e.question for e in read_training_examples(other_name)] == ["who?", "why?"]
    numbered = list(numbered_training_examples(path))
    assert [(row, example.question) for row, example in numbered] == [(1, "who?"), (2, "why?")]
    assert load_training_set(path).examples[1].positives == (Passage("", "", "b"),)


def test_files_of_different_formats_together(write, tmp_path):
    paths = [write(name, content) for name, content, _ in FILES]
    paths.append(write_parquet(tmp_path / "p.parquet", {"query": ["who?"], "positive": ["Ada."]}))
    found = load_training_set(paths)
    assert (len(found), found.read, found.without_positives) == (len(paths), len(paths), 0)
    assert found.paths == paths
    assert {example.question for example in found.examples} == {"who?"}
    ids = [example.id for example in found.examples]
    assert len(set(ids)) == len(ids)
    assert ids[:4] == ["dpr.json#0", "dpr_lines.jsonl#0", "1", "results.json#0"]


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("x.jsonl", '{"_id": "1", "title": "t", "text": "x"}', 1, "keys _id, title, text"),
        ("x.jsonl", '\n\n{"query_id": "1", "query": "who?"}', 3, "keys query_id, query"),
        ("x.json", '{"a": {"question": 1, "ctxs": []}, "b": 2}', 1, "keys a, b"),
        ("x.json", '{"question": "who?", "other": 3}', 1, "keys question, other"),
        ("x.csv", "question,answers\nwho?,Ada\n", None, "text that begins 'question,answers"),
        ("x.csv", "id,text,title\n1,a,b\n", None, "text that begins 'id,text,title"),
        ("x.csv", "who?\t['Ada']\n", None, "a questions CSV.*data.questions_file"),
        ("x.tsv", "id\ttext\ttitle\n1\ta\tb\n", None, "a passages TSV.*data.passages_file"),
        ("x.tsv", "1\ta\tb\n", None, "a passages TSV.*data.passages_file"),
        ("x.tsv", "query-id\tcorpus-id\tscore\n1\t2\t1\n", None, "a qrels file"),
        ("x.txt", "anchor,positive\nwho?,Ada\n", None, "text that begins 'anchor,positive"),
        ("x.json", '"who?"', None, "text that begins"),
    ],
)
def test_what_fits_no_format_is_refused_with_the_list(write, name, content, line, message):
    with pytest.raises(DataError, match=message) as caught:
        list(read_training_examples(write(name, content)))
    assert caught.value.line == line
    assert all(format_name in str(caught.value) for format_name in FORMATS)
    assert "\n" not in str(caught.value)


def test_parquet_of_something_else_is_refused_with_its_columns(tmp_path):
    path = write_parquet(tmp_path / "p.parquet", {"id": ["1"], "text": ["a"]})
    with pytest.raises(DataError, match="Parquet file with the columns id, text, expected DPR"):
        list(read_training_examples(path))
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cut\.parquet"):
        list(read_training_examples(tmp_path / "cut.parquet"))


def test_ids_of_a_corpus_are_refused_by_the_tevatron_reader(write):
    row = {"query_id": "1", "query_text": "who?", "positive_document_ids": ["3"]}
    with pytest.raises(DataError, match="name passages of a corpus by id"):
        list(read_training_examples(write("x.jsonl", json.dumps(row))))


def test_first_record_longer_than_what_is_looked_at(write):
    long = "x" * (1 << 21)
    for record, place in (
        ({"question": "who?", "ctxs": [{"text": long, "has_answer": True}]}, 1),
        ({"query": "who?", "pos": [long]}, 3),
        ({"query_id": "1", "query": "who?", "positive_passages": [{"text": long}]}, 2),
    ):
        path = write("long.jsonl", json.dumps(record))
        assert find_training_format(path).name == FORMATS[place]
        [example] = read_training_examples(path)
        assert example.positives[0].text == long


@pytest.mark.parametrize(
    "text",
    [
        '{"question": "a \\" {", "x\\u0079": 1}',
        '{"question": "who?", "nested": {"ctxs": [], "data": [1]}}',
        '{"question": "the word \\"positive_ctxs\\": []", "more": [0, "\\"ctxs\\": ["]}',
    ],
)
def test_only_keys_of_the_record_itself_count(write, text):
    keys = ", ".join(json.loads(text))
    with pytest.raises(DataError, match=f"the keys {keys}, expected"):
        list(read_training_examples(write("x", text)))


def test_bad_escape_in_a_key_is_left_to_the_parser(write):
    with pytest.raises(DataError, match="broken JSON"):
        list(read_training_examples(write("x", '{"question": "a", "positive_ctxs": [], "\\q": 1}')))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_refused_because_looking_at_it_would_lose_records(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError, match="a pipe or a device"):
        list(read_training_examples(tmp_path / "pipe.json"))


def test_reading_text_loads_neither_torch_nor_pyarrow(write):
    path = write("dpr.json", json.dumps([DPR]))
    program = (
        "import sys; from gc_dpr.data import load_training_set; "
        f"load_training_set({str(path)!r}); "
        "print([name for name in ('torch', 'pyarrow', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
