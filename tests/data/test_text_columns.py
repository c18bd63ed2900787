"""Tables of texts (pairs, triplets, n-tuples): round trips, roles of columns, faults with place."""

import csv
import gzip
import json
import logging

import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from gc_dpr.data.readers import parquet_rows
from gc_dpr.data.readers.text_columns import looks_like_text_columns, numbered_text_columns
from gc_dpr.data.readers.text_columns_writing import write_text_columns
from gc_dpr.data.records import Passage, TrainingExample
from gc_dpr.errors import DataError

TEXT_ENDINGS = [".csv", ".tsv", ".jsonl"]
ENDINGS = [
    *TEXT_ENDINGS,
    *(ending + packing for ending in TEXT_ENDINGS for packing in (".gz", ".zst")),
    ".parquet",
]
NASTY = [
    'he said "no", twice',
    '"',
    "a\tb\nc,d\r\ne\rf",
    "line\u2028separator\u0085next\x0c\x1cend",
    "emoji \U0001f9d1\u200d\U0001f680 and 漢字",
    "  spaces kept  ",
    "\ufeffmark",
    "# no comment",
    "[1, 2]",
    "null",
]


def examples_of(rows, name):
    return [
        TrainingExample(
            id=f"{name}#{i}",
            question=row[0],
            answers=(),
            positives=tuple(Passage("", "", text) for text in row[1]),
            hard_negatives=tuple(Passage("", "", text) for text in row[2]),
        )
        for i, row in enumerate(rows)
    ]


def texts_of(example):
    return (
        example.question,
        [passage.text for passage in example.positives],
        [passage.text for passage in example.hard_negatives],
    )


@pytest.fixture
def read(tmp_path):
    def read_content(content, name="train.csv", **arguments):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [example for _, example in numbered_text_columns(path, **arguments)]

    return read_content


def write_table(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("ending", ENDINGS)
def test_round_trip_of_nasty_texts(tmp_path, ending):
    path = tmp_path / f"train{ending}"
    rows = [(text, [f"positive {text}"], [text, "other"]) for text in NASTY]
    examples = examples_of(rows, path.name)
    assert write_text_columns(path, iter(examples)) == len(rows)
    assert [example for _, example in numbered_text_columns(path)] == examples
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_round_trip_of_unequal_lists(tmp_path, ending):
    path = tmp_path / f"train{ending}"
    examples = examples_of([("a", ["b", "c"], []), ("d", [], ["e", "f", "g"])], path.name)
    assert write_text_columns(path, examples) == 2
    assert [example for _, example in numbered_text_columns(path)] == examples


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_columns_of_single_texts(tmp_path, ending):
    path = tmp_path / f"train{ending}"
    examples = examples_of([("a", ["b"], ["c", "d"])], path.name)
    write_text_columns(path, examples, negatives=2)
    if ending == ".parquet":
        [record] = parquet.read_table(path).to_pylist()
    else:
        record = json.loads(path.read_text())
    assert record == {"anchor": "a", "positive": "b", "negative_1": "c", "negative_2": "d"}
    assert [example for _, example in numbered_text_columns(path)] == examples


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_fewer_negatives_than_columns_are_empty_cells(tmp_path, ending, caplog):
    path = tmp_path / f"train{ending}"
    examples = examples_of([("a", ["b"], []), ("c", ["d"], ["e", "f"])], path.name)
    write_text_columns(path, examples, negatives=3)
    with caplog.at_level(logging.INFO):
        assert [example for _, example in numbered_text_columns(path)] == examples
    assert "2 rows have empty cells for negatives" in caplog.text


TEXTS = st.text(
    st.one_of(
        st.sampled_from('",\t\n\r\u2028\u2029\u0085\ufeff\x1c \\\U0001f9d1\u0301a'),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    ),
    min_size=1,
    max_size=12,
).filter(str.strip)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    rows=st.lists(
        st.tuples(TEXTS, TEXTS.map(lambda text: [text]), st.lists(TEXTS, max_size=3)), max_size=6
    )
)
@example(rows=[("a\r", ["\r\nb"], ['"'])])
def test_round_trips_keep_every_record(tmp_path, rows):
    for ending in (".csv", ".tsv", ".jsonl", ".parquet"):
        path = tmp_path / f"fuzz{ending}"
        examples = examples_of(rows, path.name)
        write_text_columns(path, examples, negatives=3 if ending in (".csv", ".tsv") else None)
        if path.stat().st_size:
            assert [example for _, example in numbered_text_columns(path)] == examples
        else:
            assert rows == []
        if ending == ".csv" and rows:
            with path.open(encoding="utf-8", newline="") as handle:
                independent = list(csv.reader(handle))
            padded = [[q, *p, *n, *[""] * (3 - len(n))] for q, p, n in rows]
            assert independent[1:] == padded


PIECES = [
    *("a", "b", ",", "\t", '"', "\n", "\r\n", "\r", "{", "}", ":", "[", "]", "null", "1"),
    *('{"q": "x", "p": "y"}', "\ufeff", "\0", "\\ud800"),
]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ending=st.sampled_from([".csv", ".tsv", ".jsonl"]),
    body=st.lists(
        st.sampled_from(PIECES),
        max_size=30,
    ),
)
def test_broken_text_is_read_or_refused_with_its_file(tmp_path, ending, body):
    path = tmp_path / f"broken{ending}"
    header = {".csv": "q,p\n", ".tsv": "q\tp\n", ".jsonl": '{"q": "x", "p": "y"}\n'}[ending]
    path.write_bytes((header + "".join(body)).encode())
    looks_like_text_columns(path, path.read_bytes())
    try:
        found = list(numbered_text_columns(path))
    except DataError as caught:
        fault = caught
    else:
        assert all(line >= 2 - (ending == ".jsonl") and item.question for line, item in found)
        return
    assert fault.path == path


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_files_of_other_writers(tmp_path, quoting):
    rows = [(text, f"p {text}", f"n {text}") for text in NASTY]
    path = tmp_path / "python.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as handle:
        csv.writer(handle, quoting=quoting).writerows([("x", "y", "z"), *rows])
    found = [example for _, example in numbered_text_columns(path)]
    assert [texts_of(example) for example in found] == [(q, [p], [n]) for q, p, n in rows]
    table = pyarrow.table({"x": [q for q, _, _ in rows], "y": [p for _, p, _ in rows]})
    arrow_csv.write_csv(table, tmp_path / "arrow.csv")
    found = [example for _, example in numbered_text_columns(tmp_path / "arrow.csv")]
    assert [texts_of(example) for example in found] == [(q, [p], []) for q, p, _ in rows]


def test_what_is_written_is_what_arrow_reads(tmp_path):
    path = tmp_path / "train.csv"
    texts = [text for text in NASTY if "\r" not in text]
    write_text_columns(path, examples_of([(t, [t], [t]) for t in texts], path.name))
    options = arrow_csv.ParseOptions(newlines_in_values=True)
    as_text = arrow_csv.ConvertOptions(column_types=dict.fromkeys(["anchor"], pyarrow.string()))
    table = arrow_csv.read_csv(path, parse_options=options, convert_options=as_text)
    assert table.column_names == ["anchor", "positive", "negative_1"]
    assert table["anchor"].to_pylist() == texts


def test_lines_are_those_on_which_rows_begin(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('q,p\n"a\nb",c\n\nd,e\n')
    assert [line for line, _ in numbered_text_columns(path)] == [2, 5]


def test_windows_line_ends_and_a_mark_at_the_start(read):
    [found] = read(b'\xef\xbb\xbfq,p\r\n"a\r\nb",c\r\n')
    assert texts_of(found) == ("a\r\nb", ["c"], [])
    [found] = read(b'\xef\xbb\xbf{"q": "a", "p": "b"}\r\n', "train.jsonl")
    assert texts_of(found) == ("a", ["b"], [])


def test_order_decides_and_set_names_and_prompts_are_ignored(read, caplog):
    with caplog.at_level(logging.INFO):
        [found] = read("dataset_name,foo,bar,prompt,baz\nnq,a,b,query:,c\n")
    assert texts_of(found) == ("a", ["b"], ["c"])
    assert found.id == "train.csv#0"
    assert "columns ignored: dataset_name, prompt" in caplog.text
    assert "question = foo, positive = bar, negatives = baz" in caplog.text


def test_named_columns_override_the_order(read, caplog):
    columns = {
        "question": "q",
        "positive": "p",
        "negatives": ["n2", "n1"],
        "title": "t",
        "answers": "a",
        "id": "id",
    }
    with caplog.at_level(logging.INFO):
        [found] = read("id,p,t,label,n1,n2,a,q\n007,P,T,1,N1,N2,A,Q\n", columns=columns)
    passages = (Passage("", "", "N2"), Passage("", "", "N1"))
    assert found == TrainingExample("007", "Q", ("A",), (Passage("", "T", "P"),), passages)
    assert "columns ignored: label" in caplog.text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question": "q", "positives": "p"}, "has the roles question, positives"),
        ({"question": "q"}, "expected question, positive"),
        ({"question": ["q", "p"], "positive": "p"}, "expected one column name"),
        ({"question": "q", "positive": []}, "names no column"),
        ({"question": "q", "positive": "q"}, "names 'q' twice"),
        ({"question": "q", "positive": "x"}, "no column 'x'; the file has: q, p"),
    ],
)
def test_wrong_names(read, columns, message):
    with pytest.raises(ValueError, match=message):
        read("q,p\na,b\n", columns=columns)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("q", r"header has one column \('q'\)"),
        ("q;p", "a comma between them"),
        ("q,q", "two columns are named 'q'"),
        ("q,", "column 2 has no name"),
        (",q,p", "pandas writes its index so"),
        ("q,p,label", "'label' cannot be ignored"),
        ("q,p,score", "'score' cannot be ignored"),
        ("query_id,q,p", "'query_id' holds ids"),
        ("id,p", "'id' holds ids"),
        ("q,p,positive_2", "is called a positive and would be read as a negative"),
        ("q,negative,p", "is called a negative and would be read as a positive"),
        ("Who was Ada?,A countess.", "must name the columns"),
        ("q,prompt", r"found 1 column of text \(q\)"),
    ],
)
def test_headers_that_are_refused(read, header, message):
    width = header.count(",") + 1
    with pytest.raises(DataError, match=message) as caught:
        read(f"{header}\n{','.join('abcdef'[:width])}\n")
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("q,p\na,b\nc\n", 3, r"found 1 cells, expected 2 \(q, p\)"),
        ("q,p\na,b,c\n", 2, "a cell with a comma in it must stand in double quotes"),
        ("q,p\na,\n", 2, "column p: found the empty text '', expected a text"),
        ("q,p\n ,b\n", 2, "column q: found the empty text ' '"),
        ('q,p\na,b\n"half open,b\nc,d\n', 3, "goes wrong .* it is never closed"),
        ('q,p\n"half open,b\nc,"d"\n', 2, "goes wrong .* more text follows the closing quote"),
        ('q,p\n"a"b,c\n', 2, "more text follows the closing quote"),
        ("q,p\na,b\rc,d\n", 2, "a bare carriage return"),
        (b"q,p\na,b\nc,\xff\n", 3, r"byte 3 of this line \(0xff\) is not UTF-8"),
    ],
)
def test_rows_that_are_refused(read, text, line, message):
    with pytest.raises(DataError, match=message) as caught:
        read(text)
    assert caught.value.line == line


def test_a_quote_never_closed_does_not_read_on_for_ever(read, monkeypatch):
    monkeypatch.setattr("gc_dpr.data.readers.csv_rows._ROW_LIMIT", 100)
    with pytest.raises(DataError, match="still open at line") as caught:
        read('q,p\n"half open,b\n' + "c,d\n" * 1000)
    assert caught.value.line == 2


def test_swallowed_rows_that_fit_are_counted(read, caplog):
    found = read('q,p\n"half open,b\nc,d\nthe 5",e\n"one\ntwo lines",p\n')
    assert len(found) == 2
    assert "in 1 rows (the first begins on line 2) a quoted cell runs over lines" in caplog.text


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("null", r"column p: found nothing \(null\), expected a text or a list of texts"),
        ("3", r"column p: found 3 \(int\)"),
        ('["a", null]', r"column p\[1\]: found nothing"),
        ('["a", [""]]', r"column p\[1\]: found \[''\] \(list\)"),
        ('""', "column p: found the empty text"),
        ('{"text": "a"}', r"column p: found {'text': 'a'} \(dict\)"),
    ],
)
def test_cells_that_are_refused(read, cell, message):
    with pytest.raises(DataError, match=message) as caught:
        read(f'{{"q": "a", "p": "b"}}\n{{"q": "a", "p": {cell}}}\n', "train.jsonl")
    assert caught.value.line == 2


def test_a_list_of_questions_is_refused(read):
    with pytest.raises(DataError, match=r"column q: found \['a'\] \(list\), expected a text"):
        read('{"q": ["a"], "p": "b"}\n', "train.jsonl")


def test_keys_that_drift_are_refused(read):
    assert len(read('{"q": "a", "p": "b"}\n\n{"p": "c", "q": "d"}\n', "train.jsonl")) == 2
    with pytest.raises(DataError, match=r"p missing; pos added; expected .* \(q, p\)") as caught:
        read('{"q": "a", "p": "b"}\n{"q": "a", "pos": "b"}\n', "train.jsonl")
    assert caught.value.line == 2


def test_cut_gzip(tmp_path):
    path = tmp_path / "train.csv.gz"
    rows = "".join(f"{i * i},{i * 7919 % 1009}\n" for i in range(5000))
    path.write_bytes(gzip.compress(f"q,p\n{rows}".encode())[:-500])
    with pytest.raises(DataError, match="cut off") as caught:
        list(numbered_text_columns(path))
    assert caught.value.path == path


def test_unknown_ending(read):
    with pytest.raises(DataError, match="tells the format"):
        read("q,p\na,b\n", "train.txt")


def test_names_that_say_nothing(read, tmp_path):
    assert len(read('{"q": "a", "p": "b"}\n', "train.txt")) == 1
    path = write_table(tmp_path / "part-0", anchor=["a"], p=["b"])
    assert looks_like_text_columns(path, b"PAR1")
    assert len(list(numbered_text_columns(path))) == 1


def test_parquet_types(tmp_path):
    lists = pyarrow.array([["n", "m"], []], pyarrow.large_list(pyarrow.large_string()))
    path = write_table(
        tmp_path / "train.parquet",
        q=pyarrow.array(["a", "a"]).dictionary_encode(),
        p=pyarrow.array(["b", "c"], pyarrow.large_string()),
        n=lists,
        number=pyarrow.array([1, 2]),
    )
    columns = {"question": "q", "positive": "p", "negatives": "n", "id": "number"}
    found = list(numbered_text_columns(path, columns=columns))
    assert [line for line, _ in found] == [1, 2]
    assert [texts_of(example) for _, example in found] == [
        ("a", ["b"], ["n", "m"]),
        ("a", ["c"], []),
    ]
    assert [example.id for _, example in found] == ["1", "2"]
    with pytest.raises(DataError, match="column number: found the type int64, expected string"):
        list(numbered_text_columns(path))


@pytest.mark.parametrize(
    "kind", [pyarrow.binary(), pyarrow.float32(), pyarrow.struct({"text": pyarrow.string()})]
)
def test_parquet_types_that_are_refused(tmp_path, kind):
    path = write_table(tmp_path / "t.parquet", q=["a"], p=pyarrow.array([None], kind))
    with pytest.raises(DataError, match="column p: found the type"):
        list(numbered_text_columns(path))


def test_parquet_faults_name_the_row(tmp_path):
    path = write_table(tmp_path / "t.parquet", q=["a"] * 3000, p=["b"] * 2500 + [None] * 500)
    with pytest.raises(DataError, match=r"column p: found nothing \(null\)") as caught:
        list(numbered_text_columns(path))
    assert caught.value.line == 2501
    wrong = pyarrow.array([b"ok", b"x\xff"]).view(pyarrow.string())
    path = write_table(tmp_path / "t.parquet", q=["a", "b"], p=wrong)
    with pytest.raises(DataError, match=r"column p: byte 2 of this cell \(0xff\)") as caught:
        list(numbered_text_columns(path))
    assert caught.value.line == 2


def test_parquet_with_two_columns_of_one_name(tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["q", "q"])
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(DataError, match="two columns are named 'q'"):
        list(numbered_text_columns(tmp_path / "t.parquet"))


def test_cut_and_damaged_parquet(tmp_path):
    path = tmp_path / "t.parquet"
    rows = [(f"question {i * i}", [f"p {i}"], [f"n {i * 31}"]) for i in range(500)]
    write_text_columns(path, examples_of(rows, path.name))
    whole = path.read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-1], b"q,p\na,b\n"):
        path.write_bytes(content)
        assert looks_like_text_columns(path, content[:100])
        with pytest.raises(DataError, match="cut off or damaged") as caught:
            list(numbered_text_columns(path))
        assert caught.value.path == path
    # Damage inside of a page shows by its checksum.
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="cut off or damaged"):
        list(numbered_text_columns(path))
    path.write_bytes(whole.replace(b"negative", b"negat\xffve"))
    with pytest.raises(DataError, match="cut off or damaged"):
        list(numbered_text_columns(path))
    path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        list(numbered_text_columns(path))


def test_parquet_is_read_one_row_group_after_the_other(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    monkeypatch.setattr(parquet_rows, "_GROUP_ROWS", 10)
    rows = ((f"q{i}", [f"p{i}"], []) for i in range(35))
    write_text_columns(path, examples_of(rows, path.name))
    asked = []
    original = parquet.ParquetFile.iter_batches

    def iter_batches(self, **arguments):
        asked.append(arguments["row_groups"])
        return original(self, **arguments)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", iter_batches)
    found = []
    for line, example_ in numbered_text_columns(path):
        found.append(example_.question)
        assert asked == [[group] for group in range((line - 1) // 10 + 1)]
    assert found == [f"q{i}" for i in range(35)]
    assert len(asked) == parquet.ParquetFile(path).num_row_groups == 4


def test_row_groups_are_cut_by_size_too(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_rows, "_GROUP_CHARACTERS", 50)
    path = tmp_path / "t.parquet"
    write_text_columns(path, examples_of([("q" * 30, ["p" * 30], [])] * 3, path.name))
    assert parquet.ParquetFile(path).num_row_groups == 3


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": ("x",)}, "has answers"),
        ({"random_negatives": (Passage("", "", "x"),)}, "has random negatives"),
        ({"positives": (Passage("", "T", "x"),)}, "has titles of passages"),
        ({"question": " "}, "has an empty question or passage"),
    ],
)
def test_what_a_table_cannot_hold_is_refused(tmp_path, ending, changes, message):
    fields = {"id": "7", "question": "q", "answers": (), "positives": (Passage("", "", "p"),)}
    path = tmp_path / f"t{ending}"
    with pytest.raises(DataError, match=rf"example '7' {message}.* write DPR training JSON"):
        write_text_columns(path, [TrainingExample(**(fields | changes))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "row", "negatives", "message"),
    [
        ("t.csv", ("q", ["a", "b"], []), None, r"2 positives .* write \.jsonl or \.parquet"),
        ("t.tsv", ("q", [], []), None, "0 positives"),
        ("t.csv", ("q", ["a"], ["b", "c"]), 1, "at most 1 in this table; raise negatives"),
        ("t.csv", ("q\0", ["a"], []), None, "a zero byte"),
        ("t.jsonl", ("q", ["a"], ["b"]), 2, "leave negatives out to write lists"),
        ("t.parquet", ("q", ["a", "b"], []), 0, "2 positives"),
        ("t.jsonl", ("\ud800", ["a"], []), None, "half of a character"),
        ("t.csv", ("\ud800", ["a"], []), None, "half of a character"),
        ("t.parquet", ("\ud800", ["a"], []), None, "half of a character"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, name, row, negatives, message):
    with pytest.raises(DataError, match=message):
        write_text_columns(tmp_path / name, examples_of([row], name), negatives=negatives)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_of_the_writer(tmp_path):
    with pytest.raises(ValueError, match="negatives=-1"):
        write_text_columns(tmp_path / "t.csv", [], negatives=-1)
    for name in ("t.txt", "t.parquet.gz"):
        with pytest.raises(ValueError, match="does not tell the format"):
            write_text_columns(tmp_path / name, [])


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, name):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        write_text_columns(tmp_path / name, examples_of([("q", ["p"], [])], name))
    assert list(tmp_path.iterdir()) == []


def test_ids_left_out_are_counted(tmp_path, caplog):
    written = TrainingExample("own", "q", (), (Passage("p7", "", "p"),))
    with caplog.at_level(logging.INFO):
        write_text_columns(tmp_path / "t.jsonl", [written])
    assert "ids of 1 examples, ids of 1 passages" in caplog.text


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("t.csv", "anchor,positive\n", True),
        ("t.csv.gz", '"Query","answer","negative"\n', True),
        ("t.csv", "sentence1,sentence2,label\n", True),
        ("t.csv", "\ufeffdataset_name,query,positive\n", True),
        ("t.tsv", "question\tpassage\n", True),
        ("t.tsv", "id\ttext\ttitle\n", False),
        ("t.csv", "text,title,id\n", False),
        ("t.csv", "question,answers\n", False),
        ("t.csv", "who was it?\t['Ada']\n", False),
        ("t.csv", "", False),
        ("t.txt", "anchor,positive\n", False),
        ("t.jsonl", '{"x": "a", "y": "b", "z": ["c"]}\n', True),
        ("t.jsonl.zst", '{"anchor": "a", "positive": "b", "label": 1}\n', True),
        ("t.jsonl", '{"anchor": "' + "a" * 50, True),
        ("t.jsonl", '{"_id": "' + "a" * 50, False),
        ("t.jsonl", '{"x": "a", "y": 1}\n', False),
        ("t.jsonl", '{"x": "a"}\n', False),
        ("t.jsonl", '{"query": "a", "pos": ["b"], "neg": ["c"]}\n', False),
        ("t.jsonl", '{"query": "a", "pos": ["' + "b" * 50, False),
        ("t.jsonl", '{"query_id": "1", "query": "a", "positive_passages": []}\n', False),
        ("t.jsonl", '{"question": "a", "positive_ctxs": []}\n', False),
        ("t.jsonl", '{"question": "a", "answers": ["b"]}\n', False),
        ("t.jsonl", '{"_id": "1", "title": "a", "text": "b"}\n', False),
        ("t.json", '[{"x": "a"}]', False),
    ],
)
def test_how_a_table_of_texts_is_known(tmp_path, name, head, expected):
    assert looks_like_text_columns(tmp_path / name, head.encode()) is expected


def test_how_a_parquet_table_is_known(tmp_path):
    pairs = write_table(tmp_path / "a.parquet", anchor=["a"], positive=["b"])
    passages = write_table(tmp_path / "b.parquet", id=["a"], text=["b"], title=["c"])
    assert looks_like_text_columns(pairs, b"PAR1")
    assert not looks_like_text_columns(passages, b"PAR1")
