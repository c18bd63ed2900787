"""Naming input files, opening them, and telling a wrong kind of file."""

import gzip
import json
import os
import pickle

import numpy as np
import pytest

from gc_dpr.data import read_passages, read_questions, read_training_examples
from gc_dpr.data.readers.compression import zstd
from gc_dpr.data.readers.paths import expand_paths
from gc_dpr.data.readers.writing import open_text_for_writing
from gc_dpr.errors import DataError

READERS = {
    "training": read_training_examples,
    "passages": read_passages,
    "questions": read_questions,
}
PASSAGES = "id\ttext\ttitle\n1\ta text\ta title\n"
QUESTIONS = "who?\t['Ada']\nwhere?\t['Ulm']\n"
TRAINING = json.dumps(
    [{"question": "who?", "answers": ["Ada"], "positive_ctxs": [{"text": "Ada."}]}]
)


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_glob_is_in_natural_order_and_lists_keep_theirs(tmp_path):
    for name in ("part_10.tsv", "part_2.tsv", "part_1.tsv", "a.tsv"):
        write(tmp_path / name, PASSAGES)
    (tmp_path / "part_3.tsv").mkdir()
    names = [path.name for path in expand_paths(f"{tmp_path}/part_*.tsv")]
    assert names == ["part_1.tsv", "part_2.tsv", "part_10.tsv"]
    both = expand_paths([str(tmp_path / "part_10.tsv"), tmp_path / "a.tsv"])
    assert [path.name for path in both] == ["part_10.tsv", "a.tsv"]


def test_relative_names_and_the_home_folder(tmp_path, monkeypatch):
    write(tmp_path / "p.tsv", PASSAGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_paths("p.tsv") == expand_paths("~/p.tsv") == expand_paths("*.tsv")
    assert expand_paths("p.tsv") == [tmp_path / "p.tsv"]
    assert expand_paths("**/p.ts?") == [tmp_path / "p.tsv"]


def test_existing_name_with_brackets_is_not_a_pattern(tmp_path):
    path = write(tmp_path / "p[1].tsv", PASSAGES)
    assert expand_paths(path) == [path]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_missing_files_are_reported_before_reading_starts(reader, tmp_path):
    with pytest.raises(DataError, match=r"nothere: file not found"):
        reader(tmp_path / "nothere")
    with pytest.raises(DataError, match=r"no file matches this glob"):
        reader(tmp_path / "*.nothing")
    with pytest.raises(DataError, match=r"is a folder, expected a file"):
        reader(tmp_path)
    with pytest.raises(DataError, match="no input file is named"):
        reader([])
    with pytest.raises(DataError, match="is empty; expected a path"):
        reader("")


def test_file_named_twice_is_refused(tmp_path):
    path = write(tmp_path / "p.tsv", PASSAGES)
    with pytest.raises(DataError, match="named twice"):
        expand_paths([path, f"{tmp_path}/*.tsv"])


@pytest.mark.parametrize(
    ("reader", "content"),
    [(read_training_examples, TRAINING), (read_passages, PASSAGES), (read_questions, QUESTIONS)],
    ids=READERS,
)
def test_packing_bom_and_crlf_change_nothing(reader, content, tmp_path):
    plain = content.encode()
    wanted = list(reader(write(tmp_path / "f", plain)))
    assert wanted
    bom = b"\xef\xbb\xbf"
    for changed in (bom + plain, plain.replace(b"\n", b"\r\n"), plain.rstrip(b"\n")):
        for stored in (changed, gzip.compress(changed), zstd.compress(changed)):
            assert list(reader(write(tmp_path / "f", stored))) == wanted


@pytest.mark.parametrize(
    ("reader", "content"),
    [(read_training_examples, TRAINING), (read_passages, PASSAGES), (read_questions, QUESTIONS)],
    ids=READERS,
)
def test_truncated_and_damaged_gzip(reader, content, tmp_path):
    packed = gzip.compress(content.encode() * 50 if reader is read_passages else content.encode())
    with pytest.raises(DataError, match="f: the gzip stream ends before its end mark"):
        list(reader(write(tmp_path / "f", packed[:-10])))
    damaged = bytearray(packed)
    damaged[-6] ^= 0xFF  # the checksum
    with pytest.raises(DataError, match="the gzip stream is damaged"):
        list(reader(write(tmp_path / "f", bytes(damaged))))


@pytest.mark.parametrize(
    ("reader", "content"),
    [(read_training_examples, TRAINING), (read_passages, PASSAGES), (read_questions, QUESTIONS)],
    ids=READERS,
)
def test_truncated_and_damaged_zstandard(reader, content, tmp_path):
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = zstd.compress(content.encode(), options=checked)
    for cut in (packed[:-1], packed[:-10], packed[:5], packed + packed[:9]):
        with pytest.raises(DataError, match="f: the Zstandard stream ends before its end mark"):
            list(reader(write(tmp_path / "f", cut)))
    damaged = bytearray(packed)
    damaged[-2] ^= 0xFF  # the checksum
    for bad in (bytes(damaged), packed + b"something else"):
        with pytest.raises(DataError, match="f: the Zstandard stream is damaged"):
            list(reader(write(tmp_path / "f", bad)))


def test_zstandard_in_several_frames_and_with_a_long_window(tmp_path):
    rows = [f"{i}\ttext {i}\ttitle\n" for i in range(40_000)]
    wanted = [str(i) for i in range(40_000)]
    halves = ["".join(rows[:9]).encode(), "".join(rows[9:]).encode()]
    skippable = b"\x5f\x2a\x4d\x18\x04\x00\x00\x00abcd"  # pzstd begins with one
    long = {zstd.CompressionParameter.window_log: 28}
    packed = skippable + b"".join(zstd.compress(half, options=long) for half in halves)
    assert [p.id for p in read_passages(write(tmp_path / "f", packed))] == wanted


@pytest.mark.parametrize("outer", [gzip.compress, zstd.compress])
@pytest.mark.parametrize("inner", [gzip.compress, zstd.compress])
def test_text_that_is_packed_twice(tmp_path, inner, outer):
    path = write(tmp_path / "f", outer(inner(PASSAGES.encode())))
    with pytest.raises(DataError, match="inside another compression; decompress it once"):
        list(read_passages(path))


@pytest.mark.parametrize("ending", ["", ".gz", ".ZST"])
def test_writing_is_packed_by_name_whole_or_not_at_all_and_repeatable(tmp_path, ending):
    path = tmp_path / "new" / f"text{ending}"
    text = "caf\u00e9\n" + "row\n" * 100_000
    for _ in range(2):
        with open_text_for_writing(path) as handle:
            handle.write(text)
        first = path.read_bytes()
    with open_text_for_writing(tmp_path / f"elsewhere{ending}") as handle:
        handle.write(text)
    assert (tmp_path / f"elsewhere{ending}").read_bytes() == first
    unpack = {"": bytes, ".gz": gzip.decompress, ".ZST": zstd.decompress}[ending]
    assert unpack(first).decode() == text
    assert (len(first) < 2000) == bool(ending)
    with pytest.raises(KeyError), open_text_for_writing(path) as handle:
        handle.write("half")
        raise KeyError
    with (
        pytest.raises(DataError, match="half of a character"),
        open_text_for_writing(path) as handle,
    ):
        handle.write("\ud800")
    assert path.read_bytes() == first
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_full_disk_leaves_nothing_behind(tmp_path, ending):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / f"text{ending}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with (
            pytest.raises(DataError, match="cannot be written"),
            open_text_for_writing(path) as handle,
        ):
            handle.write(os.urandom(300_000).hex())
            handle.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("expected", "content", "looks_like", "key"),
    [
        ("training", PASSAGES, "a passages TSV", "data.passages_file"),
        ("training", "1\tsome text\ttitle\n", "a passages TSV", "data.passages_file"),
        ("training", QUESTIONS, "a questions CSV", "data.questions_file"),
        ("training", "query-id\tcorpus-id\tscore\n0\t1\t1\n", "a qrels file", None),
        ("passages", '[{"question": "q", "ctxs": []}]', "a DPR retrieval-result JSON", None),
        ("passages", TRAINING, "DPR training JSON", "data.train_file"),
        ("passages", TRAINING[1:-1], "DPR training JSON", "data.train_file"),
        ("passages", "[\n" + TRAINING[1:], "DPR training JSON", "data.train_file"),
        ("passages", QUESTIONS, "a questions CSV", "data.questions_file"),
        ("passages", '{"_id": "1", "text": "t"}\n', "JSON", None),
        ("passages", "query-id\tcorpus-id\tscore\n0\t1\t1\n", "a qrels file", None),
        ("questions", PASSAGES, "a passages TSV", "data.passages_file"),
        ("questions", "1\tsome text\ttitle\n", "a passages TSV", "data.passages_file"),
        ("questions", TRAINING, "DPR training JSON", "data.train_file"),
        ("questions", TRAINING[1:-1], "DPR training JSON", "data.train_file"),
    ],
)
def test_wrong_kind_of_text_file(expected, content, looks_like, key, tmp_path):
    with pytest.raises(DataError) as caught:
        list(READERS[expected](write(tmp_path / "f", content)))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'f'}: this looks like {looks_like}")
    assert ("did you mean " + key in message) if key else ("did you mean" not in message)
    assert "\n" not in message


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_binary_files(reader, tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "arrays.npz", np.zeros(3))
    write(tmp_path / "table.parquet", b"PAR1" + bytes(20) + b"PAR1")
    write(tmp_path / "list.pkl", pickle.dumps([1, 2], protocol=4))
    write(tmp_path / "wide.txt", "who?\t['Ada']\n".encode("utf-16"))
    write(tmp_path / "other", bytes(range(256)))
    write(tmp_path / "empty", b"")
    for name, what in (
        ("array.npy", "NumPy"),
        ("arrays.npz", "zip archive"),
        ("table.parquet", "Parquet"),
        ("list.pkl", "pickle"),
        ("wide.txt", "UTF-16"),
        ("other", "zero bytes"),
        ("empty", "the file is empty"),
    ):
        with pytest.raises(DataError, match=f"{name}: .*{what}"):
            list(reader(tmp_path / name))


@pytest.mark.parametrize(
    ("reader", "content", "line", "byte"),
    [
        (read_passages, b"id\ttext\ttitle\n1\tcaf\xe9\tT\n", 2, 6),
        (read_questions, b"who?\t['a']\nwh\xe9re?\t['b']\n", 2, 3),
        (read_training_examples, b'[\n{"question": "caf\xe9"}]', 2, 20),
    ],
    ids=["passages", "questions", "training"],
)
def test_text_in_another_encoding_names_line_and_byte(reader, content, line, byte, tmp_path):
    with pytest.raises(DataError, match=f"byte {byte} .*0xe9.* is not UTF-8") as caught:
        list(reader(write(tmp_path / "f", content)))
    assert caught.value.line == line


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path):
    path = write(tmp_path / "f", PASSAGES)
    path.chmod(0)
    with pytest.raises(DataError, match="cannot be read"):
        list(read_passages(path))


def test_question_that_begins_with_a_bracket_is_not_json(tmp_path):
    path = write(tmp_path / "f", "[CLS] who?\t['Ada']\n{who} else\t[]\n")
    assert [q.text for q in read_questions(path)] == ["[CLS] who?", "{who} else"]


def test_passage_text_that_begins_with_a_bracket_is_not_a_list_of_answers(tmp_path):
    path = write(tmp_path / "f", "1\t(born 1900) a person\tT\n2\t['a'] is a list\tT\n")
    assert [p.id for p in read_passages(path)] == ["1", "2"]
