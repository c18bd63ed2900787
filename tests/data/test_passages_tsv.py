"""Passages TSV: columns, quoting, stray quotes (TRAPS B5), headers (S17)."""

import csv
import io
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gc_dpr.data import Passage, read_passages
from gc_dpr.errors import DataError

HEADER = "id\ttext\ttitle\n"


@pytest.fixture
def read(tmp_path):
    def read_text(text, **options):
        path = tmp_path / "passages.tsv"
        path.write_bytes(text.encode())
        return list(read_passages(path, **options))

    return read_text


def test_half_open_quote_names_the_row_where_it_begins(read):
    """B5, five physical rows: a plain csv reader gives three rows and no error."""
    text = HEADER + '1\tone\tA\n2\t"half open\tB\n3\tthree\tC\n4\tfour\tD\n'
    lenient = list(csv.reader(io.StringIO(text), delimiter="\t"))
    assert len(lenient) == 3
    with pytest.raises(DataError, match=r"line 4, which is a whole row.*quoting='none'") as caught:
        read(text)
    assert caught.value.line == 3
    plain = read(text, quoting="none")
    assert [p.id for p in plain] == ["1", "2", "3", "4"]
    assert plain[1].text == '"half open'


def test_quote_closed_by_a_later_row_is_caught_too(read):
    """csv would silently make one row of three, and the result would be well formed."""
    text = HEADER + '1\t"half open\tA\n2\ttwo\tB\n3\tends with a quote"\tC\n4\tfour\tD\n'
    assert len(list(csv.reader(io.StringIO(text), delimiter="\t", strict=True))) == 3
    with pytest.raises(DataError, match="goes wrong in the row that begins here") as caught:
        read(text)
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('1\t"open in the last row\tA\n', 2, "never closed"),
        ('1\tone\t"open title\n2\ttwo\tB\n', 2, "line 3, which is a whole row"),
        ('1\t"Never" she said\tA\n', 2, "inner quote must be doubled"),
        ('1\tok\tA\n\n2\t"x\n\n3\ty\tB\n', 4, "line 6, which is a whole row"),
    ],
)
def test_other_stray_quotes(read, text, line, why):
    with pytest.raises(DataError, match=why) as caught:
        read(HEADER + text)
    assert caught.value.line == line
    assert "data.passages_quoting=none" in str(caught.value)


def test_only_the_start_of_a_file_with_a_stray_quote_is_read(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text(HEADER + '1\t"open\tA\n' + "2\ttext\tB\n" * 3, encoding="utf-8")
    with path.open("ab") as handle:
        handle.write(b"\xff not utf-8, far below\n" * 100_000)
    with pytest.raises(DataError, match="goes wrong"):
        list(read_passages(path))


def test_quoted_cell_over_lines_is_read(read):
    [passage] = read(HEADER + '5\t"A tab\there and\na line."\tTabs\n')
    assert passage == Passage("5", "Tabs", "A tab\there and\na line.")


def test_line_numbers_count_physical_lines(read):
    with pytest.raises(DataError) as caught:
        read(HEADER + '1\t"two\nlines"\tA\n\n2\tno title\n')
    assert caught.value.line == 5


def test_only_the_first_row_can_be_a_header(read):
    """S17: the peers drop every passage whose id is "id"."""
    rows = read("1\tone\tA\nid\ttext\ttitle\nid\tanother\tB\n")
    assert [p.id for p in rows] == ["1", "id", "id"]
    assert [p.id for p in read(HEADER + "id\ttext\ttitle\n")] == ["id"]


@pytest.mark.parametrize(
    "header", ["title\tid\ttext", "Title\tpassage_id\tText", '"title"\t"docid"\t"text"']
)
@pytest.mark.parametrize("quoting", ["csv", "none"])
def test_header_names_the_columns_in_any_order(read, header, quoting):
    assert read(f"{header}\nT\t7\twords\n", quoting=quoting) == [Passage("7", "T", "words")]


def test_columns_beyond_a_header_s_three_may_be_missing_in_a_row(read, caplog):
    rows = read("id\ttext\ttitle\turl\n1\ta\tA\tu\n2\tb\tB\n")
    assert [p.id for p in rows] == ["1", "2"]
    assert "1 rows have more columns" in caplog.text


@pytest.mark.parametrize("header", ["id\tcontents\ttitle", "id\ttext", "pid\ttext\tid"])
def test_header_without_the_needed_columns_is_refused(read, header):
    with pytest.raises(DataError, match="expected id, text and title") as caught:
        read(header + "\n1\ta\tA\n")
    assert caught.value.line == 1


def test_empty_id_is_refused(read):
    with pytest.raises(DataError, match="passage id is empty") as caught:
        read(HEADER + "1\ta\tA\n\tb\tB\n")
    assert caught.value.line == 3


def test_header_alone_gives_no_passage_and_long_cells_are_read(read):
    assert read(HEADER) == []
    long = 'x"' * 200_000
    [passage] = read(HEADER + '1\t"' + long.replace('"', '""') + '"\tA\n')
    assert passage.text == long


def test_rows_and_lines_are_logged(read, caplog):
    caplog.set_level(logging.INFO)
    read(HEADER + '1\t"a\nb"\tA\n\n2\tb\tB')
    assert "2 passages from 5 lines" in caplog.text


def test_reading_is_lazy_and_goes_on_over_files(tmp_path):
    (tmp_path / "p1.tsv").write_text(HEADER + "1\ta\tA\n", encoding="utf-8")
    (tmp_path / "p2.tsv").write_text("2\tb\tB\n", encoding="utf-8")
    (tmp_path / "p3.tsv").write_text("broken\n", encoding="utf-8")
    rows = read_passages(f"{tmp_path}/p*.tsv")
    assert (next(rows).id, next(rows).id) == ("1", "2")
    with pytest.raises(DataError, match="found 1 tab-separated columns"):
        next(rows)


def test_unknown_quoting(tmp_path):
    with pytest.raises(ValueError, match="expected 'csv' or 'none'"):
        read_passages(tmp_path, quoting="csvv")


# Everything but zero bytes and lone surrogates; line breaks come as "\n" since "\r\n" is read so.
CELL = st.text(
    st.one_of(st.sampled_from('"\t\n\r ab'), st.characters(exclude_categories=["Cs", "Cc"])),
    max_size=12,
).map(lambda text: text.replace("\r\n", "\n").rstrip("\r"))
ROWS = st.lists(st.tuples(CELL.map(lambda text: "i" + text), CELL, CELL), min_size=1, max_size=6)


def swallowing(rows):
    """Whether a line inside a quoted cell would pass for a row of its own."""
    written = io.StringIO()
    for row in rows:
        written.seek(0)
        written.truncate()
        csv.writer(written, delimiter="\t", lineterminator="\n").writerow(row)
        if any(line.count("\t") >= 2 for line in written.getvalue().split("\n")[1:]):
            return True
    return False


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=ROWS, quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]))
def test_what_csv_writes_is_read_back(rows, quoting, read):
    written = io.StringIO()
    csv.writer(written, delimiter="\t", quoting=quoting).writerows([("id", "text", "title"), *rows])
    text = written.getvalue()
    if swallowing(rows):
        with pytest.raises(DataError, match="which is a whole row"):
            read(text)
    else:
        assert [(p.id, p.text, p.title) for p in read(text)] == rows


LINE_CELL = st.text(st.one_of(st.sampled_from('" ab'), st.characters(exclude_categories=["C"])))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(
        st.tuples(LINE_CELL.map(lambda text: "i" + text), LINE_CELL, LINE_CELL), min_size=1
    )
)
def test_without_quoting_every_character_is_read_back(rows, read):
    text = HEADER + "".join("\t".join(row) + "\n" for row in rows)
    assert [(p.id, p.text, p.title) for p in read(text, quoting="none")] == rows
