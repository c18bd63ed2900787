import pytest

from gc_dpr.artifacts import (
    atomic_file,
    atomic_folder,
    file_checksum,
    prepare_output_dir,
    read_json,
    write_json,
)
from gc_dpr.errors import ArtifactError, ConfigError, DataError


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(path) as handle:
        handle.write("half of the ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_folder_is_not_there(tmp_path):
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "model") as folder:
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_appears_whole_and_is_not_replaced(tmp_path):
    with atomic_folder(tmp_path / "model") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"all")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "sub" / "weights").read_bytes() == b"all"
    with pytest.raises(ArtifactError, match="already exists"), atomic_folder(tmp_path / "model"):
        pass


def test_output_dir_is_refused_when_not_empty_and_only_owned_names_are_removed(tmp_path):
    out = tmp_path / "out"
    assert prepare_output_dir(out, overwrite=False, owned=["run.*"]) == out
    (out / "run.trec").write_text("x")
    (out / "notes.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty .*notes\.md, run\.trec.*overwrite=true"):
        prepare_output_dir(out, overwrite=False, owned=["run.*"])
    prepare_output_dir(out, overwrite=True, owned=["run.*"])
    assert [entry.name for entry in out.iterdir()] == ["notes.md"]


def test_output_dir_that_is_a_file(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        prepare_output_dir(tmp_path / "out", overwrite=True, owned=[])


def test_json_faults_name_the_file(tmp_path):
    path = write_json(tmp_path / "x.json", {"é": [1]})
    assert read_json(path, what="a test") == {"é": [1]}
    path.write_text('{"half":')
    with pytest.raises(ArtifactError, match=r"x\.json is damaged .* a test"):
        read_json(path, what="a test")
    with pytest.raises(ArtifactError, match=r"y\.json does not exist"):
        read_json(tmp_path / "y.json", what="a test")


def test_checksum_is_sha256(tmp_path):
    (tmp_path / "e").write_bytes(b"abc")
    assert file_checksum(tmp_path / "e") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_data_error_names_its_place():
    error = DataError("found 2 fields", path="/data/p.tsv", line=7)
    assert str(error) == "/data/p.tsv:7: found 2 fields"
    assert (error.path.name, error.line) == ("p.tsv", 7)
    assert isinstance(error, ValueError)
