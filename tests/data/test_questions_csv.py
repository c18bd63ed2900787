"""Questions: literals that are never evaluated (TRAPS S1), ids, columns, JSONL."""

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gc_dpr.data import read_questions
from gc_dpr.errors import DataError


@pytest.fixture
def read(tmp_path):
    def read_text(text, name="questions.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode())
        return list(read_questions(path))

    return read_text


@pytest.mark.parametrize(
    "answers",
    [
        "['O'Hara']",
        "1999",
        "'Velmora'",
        "Velmora",
        "{'only'}",
        "{'a': 1}",
        "[str(20 + 22)]",
        "__import__('os').getcwd()",
        "[b'bytes']",
        "[f'{1}']",
        "[None]",
        "[['nested']]",
        "",
        "[" * 500 + "]" * 500,
        "['a'",
        "[" + "-" * 5000 + "1]",
    ],
)
def test_what_is_not_a_list_of_strings_is_refused_with_its_line(read, answers):
    with pytest.raises(DataError, match="expected a list of strings") as caught:
        read(f"first\t['a']\nsecond\t{answers}\n")
    assert caught.value.line == 2
    assert str(caught.value).count("\n") == 0


def test_number_in_a_list_comes_with_advice(read):
    with pytest.raises(DataError, match=r"hold a int \(1999\), put it in quotes"):
        read("when\t[1999]\n")


def test_code_is_not_run(read, tmp_path):
    marker = tmp_path / "ran"
    with pytest.raises(DataError):
        read(f"q\t[open({str(marker)!r}, 'w').close()]\n")
    assert not marker.exists()


def test_very_long_answers_are_refused(read):
    with pytest.raises(DataError, match="at most 1,000,000 are read"):
        read("q\t['" + "a" * 1_000_001 + "']\n")


def test_patterns_with_a_backslash_do_not_warn(read):
    [question] = read("q\t['19\\d{2}', r'\\bten\\b']\n")
    assert question.answers == (r"19\d{2}", r"\bten\b")


def test_rows_with_and_without_answers_cannot_be_mixed(read):
    with pytest.raises(DataError, match="a question and its answers; write ") as caught:
        read("a\t['x']\nb\n")
    assert caught.value.line == 2
    with pytest.raises(DataError, match="have a question only"):
        read("a\nb\t['x']\n")


def test_header_is_known_by_its_second_column_in_the_first_row_only(read):
    [question] = read("question\tanswers\nwho?\t['Ada']\n")
    assert (question.id, question.text) == ("0", "who?")
    with pytest.raises(DataError, match="no Python literal"):
        read("who?\t['Ada']\nquestion\tanswers\n")


def test_ids_count_questions_over_all_files_not_lines(tmp_path):
    (tmp_path / "1.csv").write_text("a\t[]\n\nb\t[]\n", encoding="utf-8")
    (tmp_path / "2.csv").write_text("c\t[]\n", encoding="utf-8")
    assert [q.id for q in read_questions(f"{tmp_path}/*.csv")] == ["0", "1", "2"]


def test_extra_columns_are_counted(read, caplog):
    [question] = read("a\t['x']\tmore\tand more\n")
    assert question.answers == ("x",)
    assert "columns after the second ignored in 1 rows" in caplog.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ok\t[]\n\"half open\t['a']\nsecond\t['b']\n", 2),
        ("\"half open\t['a']\nsecond\t[\"O'Brien\"]\n", 1),
        ("\"half open\t['a']\nwho said \"no\"\t['b']\n", 1),
        ("\"half open\t['a']\nsecond\t\"['b']\"\n", 1),
        ("\"half open\t[]\nnext\"\t['b']\n", 1),
    ],
)
def test_stray_quotes_name_the_row_where_they_begin(read, text, line):
    with pytest.raises(DataError, match="goes wrong in the row that begins here") as caught:
        read(text)
    assert caught.value.line == line


def test_jsonl_questions(read):
    records = [
        {"id": 3, "question": "a", "answers": ["x"]},
        {"question": "b"},
        {"id": "z", "question": "c", "answers": None},
    ]
    text = "\n".join(json.dumps(record) for record in records) + "\n\n"
    read_back = [(q.id, q.text, q.answers) for q in read(text)]
    assert read_back == [("3", "a", ("x",)), ("1", "b", ()), ("z", "c", ())]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "b", ', r"broken JSON at column 1\d"),
        ('{"question": 5}', "the string key question"),
        ('["question"]', "the string key question"),
        ('{"question": "b", "answers": "x"}', "answers is not a list"),
        ('{"question": "b", "answers": [1]}', "put it in quotes"),
        ('{"question": "b", "id": [1]}', "a string or a whole number"),
        ('{"question": "b", "id": "0"}', "'0' occurs a second time"),
    ],
)
def test_faults_in_jsonl_name_the_line(read, line, problem):
    with pytest.raises(DataError, match=problem) as caught:
        read('{"question": "a"}\n' + line + "\n")
    assert caught.value.line == 2


def test_repeated_ids_name_both_places(read):
    with pytest.raises(DataError, match=r"questions.csv:1\); ids must be unique") as caught:
        read('{"question": "a", "id": "x"}\n{"question": "b", "id": "x"}\n')
    assert caught.value.line == 2


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(lambda t: "w" + t)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(TEXT, st.lists(st.text(max_size=8), max_size=3)), min_size=1))
def test_what_dpr_s_format_writes_is_read_back(rows, read):
    written = io.StringIO()
    csv.writer(written, delimiter="\t").writerows((text, repr(answers)) for text, answers in rows)
    read_back = [(question.text, list(question.answers)) for question in read(written.getvalue())]
    assert read_back == rows
