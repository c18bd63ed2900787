"""A corpus in one pass: ids, counts, content; and looking passages up."""

import gzip
import subprocess
import sys

import pytest

from gc_dpr.data import Passage, corpus, passages_by_id, scan_corpus
from gc_dpr.errors import DataError

HEADER = "id\ttext\ttitle\n"


@pytest.fixture
def folder(tmp_path):
    rows = [f"{i}\ttext {i}\ttitle {i}\n" for i in range(20)]
    (tmp_path / "all.tsv").write_text(HEADER + "".join(rows), encoding="utf-8")
    (tmp_path / "part_1.tsv").write_text(HEADER + "".join(rows[:7]), encoding="utf-8")
    (tmp_path / "part_2.tsv.gz").write_bytes(gzip.compress("".join(rows[7:]).encode()))
    return tmp_path


def test_summary_does_not_depend_on_files_and_compression(folder):
    whole = scan_corpus(folder / "all.tsv")
    parts = scan_corpus(f"{folder}/part_*")
    assert (whole.rows, whole.empty_texts, whole.paths) == (20, 0, [folder / "all.tsv"])
    assert (parts.rows, parts.content_hash) == (20, whole.content_hash)
    assert [path.name for path in parts.paths] == ["part_1.tsv", "part_2.tsv.gz"]
    assert len(whole.content_hash) == 64


@pytest.mark.parametrize(
    "text", ["2\tb\tB\n1\ta\tA\n", "1\ta\tA\n2\tb\tBB\n", "1\ta\tA\n2\tbB\t\n", "1\ta\tA\n"]
)
def test_content_hash_tells_changes(tmp_path, text):
    path = tmp_path / "p.tsv"
    path.write_text("1\ta\tA\n2\tb\tB\n", encoding="utf-8")
    before = scan_corpus(path).content_hash
    path.write_text(text, encoding="utf-8")
    assert scan_corpus(path).content_hash != before


def test_repeated_id_names_both_places(folder):
    (folder / "more.tsv").write_text("a\tx\tX\n\n13\tagain\tY\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"'13' occurs a second time .*all.tsv:15\)") as caught:
        scan_corpus([folder / "all.tsv", folder / "more.tsv"])
    assert (caught.value.path, caught.value.line) == (folder / "more.tsv", 3)


def test_equal_hashes_of_different_ids_are_no_repetition(folder, monkeypatch):
    monkeypatch.setattr(corpus, "hash", lambda text: len(text), raising=False)
    assert scan_corpus(folder / "all.tsv").rows == 20


def test_ids_that_look_alike_are_different(tmp_path):
    path = tmp_path / "p.tsv"
    path.write_text("1\ta\tA\n01\tb\tB\n 1\tc\tC\n", encoding="utf-8")
    assert scan_corpus(path).rows == 3


def test_empty_corpus_and_empty_texts(tmp_path, caplog):
    path = tmp_path / "p.tsv"
    path.write_text(HEADER, encoding="utf-8")
    with pytest.raises(DataError, match="holds no passage"):
        scan_corpus(path)
    path.write_text(HEADER + "1\t\tA\n2\t \tB\n3\tc\tC\n", encoding="utf-8")
    assert scan_corpus(path).empty_texts == 2
    assert "2 of 3 passages have an empty text" in caplog.text


def test_passages_by_id(folder):
    found = passages_by_id(f"{folder}/part_*", ["19", "3", "3"])
    assert found == {
        "3": Passage("3", "title 3", "text 3"),
        "19": Passage("19", "title 19", "text 19"),
    }
    assert passages_by_id(folder / "all.tsv", []) == {}


def test_missing_passages_are_named_and_counted(folder):
    with pytest.raises(DataError, match=r"2 of 3 passage ids are not in the corpus .*'x', '21'"):
        passages_by_id(folder / "all.tsv", ["x", "1", "21"])


def test_lookup_stops_when_all_are_found(folder):
    (folder / "part_3.tsv").write_text("broken\n", encoding="utf-8")
    assert list(passages_by_id(f"{folder}/part_*", ["8"])) == ["8"]


def test_reading_data_needs_no_torch():
    code = "import sys, gc_dpr.data; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
