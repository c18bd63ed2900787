import json
import subprocess
import sys

import numpy as np
import pytest

from gc_dpr.artifacts import file_checksum, prepare_output_dir
from gc_dpr.errors import ArtifactError, ConfigError
from gc_dpr.retrieval import (
    EMBEDDING_FILES,
    EmbeddingStore,
    ShardWriter,
    finish_embeddings,
    shard_bounds,
)
from gc_dpr.retrieval.passage_ids import PassageIds, id_lines

DIM = 4


def rows(count, *, dim=DIM, seed=0):
    generator = np.random.default_rng(seed)
    scale = generator.lognormal(size=(count, 1))
    return (scale * generator.normal(size=(count, dim))).astype(np.float32)


def write_shards(folder, embeddings, ids, *, num_shards, only=None, model="model-a", **options):
    for shard in range(num_shards) if only is None else only:
        first, end = shard_bounds(len(ids), num_shards=num_shards, shard=shard)
        with ShardWriter.open(
            folder,
            shard=shard,
            num_shards=num_shards,
            corpus_rows=len(ids),
            dim=embeddings.shape[1],
            model_fingerprint=model,
            corpus_hash="corpus-a",
            **options,
        ) as writer:
            for row in range(first, end, 2):
                stop = min(row + 2, end)
                writer.write(embeddings[row:stop], ids[row:stop])


@pytest.fixture
def finished(tmp_path):
    write_shards(tmp_path, rows(8), list("abcdefgh"), num_shards=3)
    finish_embeddings(tmp_path, num_shards=3)
    return tmp_path


def contents(store, block=2):
    blocks = list(store.iter_blocks(block))
    return np.concatenate([b for b, _ in blocks]), [i for _, ids in blocks for i in ids]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("count", [0, 1, 2, 8, 10, 100])
def test_shards_cover_every_row_once(count, num_shards):
    bounds = [shard_bounds(count, num_shards=num_shards, shard=s) for s in range(num_shards)]
    assert [row for first, end in bounds for row in range(first, end)] == list(range(count))
    sizes = [end - first for first, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_the_remainder_of_the_division_is_not_lost():
    assert [shard_bounds(8, num_shards=3, shard=s) for s in range(3)] == [(0, 3), (3, 6), (6, 8)]
    with pytest.raises(ValueError, match="shard 3 of 3"):
        shard_bounds(8, num_shards=3, shard=3)


@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_every_division_holds_the_same_rows(tmp_path, num_shards):
    embeddings, ids = rows(8), ["0", "007", "ü漢", "a b", "e\u2028f", "g\r", "\x85", "h"]
    write_shards(tmp_path, embeddings, ids, num_shards=num_shards)
    store = finish_embeddings(tmp_path, num_shards=num_shards)
    found, found_ids = contents(store)
    np.testing.assert_array_equal(found, embeddings)
    assert found_ids == ids == list(store.ids())
    assert (store.rows, store.dim, store.fingerprint) == (8, DIM, "model-a")
    assert store.corpus_hash == "corpus-a"
    assert sum(shard.rows for shard in store.shards) == 8
    assert all(len(block) <= 2 for block, _ in store.iter_blocks(2))


def test_fewer_passages_than_shards(tmp_path):
    write_shards(tmp_path, rows(2), ["a", "b"], num_shards=3)
    store = finish_embeddings(tmp_path, num_shards=3)
    assert [shard.rows for shard in store.shards] == [1, 1, 0]
    assert np.load(tmp_path / "embeddings-00002-of-00003.npy").shape == (0, DIM)
    assert contents(store)[1] == ["a", "b"]


def test_files_are_plain(finished):
    array = np.load(finished / "embeddings-00001-of-00003.npy", allow_pickle=False)
    np.testing.assert_array_equal(array, rows(8)[3:6])
    assert (finished / "ids-00001-of-00003.txt").read_text() == "d\ne\nf\n"
    described = json.loads((finished / "shard-00001-of-00003.json").read_text())
    assert (described["first_row"], described["end_row"]) == (3, 6)
    for kind, name in (
        ("embeddings", "embeddings-00001-of-00003.npy"),
        ("ids", "ids-00001-of-00003.txt"),
    ):
        assert described[f"{kind}_sha256"] == file_checksum(finished / name)


def test_blocks_are_views_of_the_mapped_file(finished):
    for block, _ in EmbeddingStore.open(finished).iter_blocks(100):
        assert isinstance(block, np.memmap)
        assert not block.flags.owndata
        assert not block.flags.writeable


def test_float16_is_stored_and_overflow_is_refused(tmp_path):
    write_shards(tmp_path / "a", rows(3), list("abc"), num_shards=1, dtype="float16")
    store = finish_embeddings(tmp_path / "a", num_shards=1)
    found, _ = contents(store, 10)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, rows(3).astype(np.float16))
    with pytest.raises(ArtifactError, match=r"passage 'a' .* not finite in float16"):
        write_shards(tmp_path / "b", 1e6 * np.ones((1, 2)), ["a"], num_shards=1, dtype="float16")
    with pytest.raises(ConfigError, match="float32 or float16, not 'int8'"):
        write_shards(tmp_path / "b", rows(1), ["a"], num_shards=1, dtype="int8")


def test_a_missing_shard_is_named_and_foreign_files_are_ignored(tmp_path):
    write_shards(tmp_path, rows(8), list("abcdefgh"), num_shards=3, only=[0, 2])
    for foreign in ("emb.index", "emb_1.pkl.tmp", ".shard-00001-of-00003.json.tmp-7"):
        (tmp_path / foreign).write_bytes(b"x")
    with pytest.raises(ArtifactError, match="shard 1 of 3 is missing"):
        EmbeddingStore.open(tmp_path)
    with pytest.raises(ArtifactError, match="shard 1 of 3 is missing"):
        finish_embeddings(tmp_path, num_shards=3)
    write_shards(tmp_path, rows(8), list("abcdefgh"), num_shards=3, only=[1])
    with pytest.raises(ArtifactError, match=r"never finished.*overwrite=true"):
        EmbeddingStore.open(tmp_path)
    assert contents(finish_embeddings(tmp_path, num_shards=3))[1] == list("abcdefgh")


def test_a_folder_without_embeddings(tmp_path):
    with pytest.raises(ArtifactError, match="does not exist"):
        EmbeddingStore.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"no meta\.json"):
        EmbeddingStore.open(tmp_path)
    (tmp_path / "meta.json").write_text('{"format": "gc_dpr dense index"}')
    with pytest.raises(ArtifactError, match="does not describe embeddings"):
        EmbeddingStore.open(tmp_path)


def test_finished_embeddings_are_not_overwritten(finished):
    with pytest.raises(ArtifactError, match="holds finished embeddings"):
        write_shards(finished, rows(8), list("abcdefgh"), num_shards=3)


def damage_size(path):
    path.write_bytes(path.read_bytes()[:-1])


def add_bytes(path):
    path.write_bytes(path.read_bytes() + b"x\n")


def flip_header(path):
    data = bytearray(path.read_bytes())
    data[data.index(b"(")] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_size, add_bytes, flip_header, lambda p: p.unlink()])
def test_damaged_embeddings(finished, damage):
    damage(finished / "embeddings-00001-of-00003.npy")
    with pytest.raises(ArtifactError, match=r"embeddings-00001-of-00003\.npy is (damaged|missing)"):
        EmbeddingStore.open(finished)


@pytest.mark.parametrize("damage", [damage_size, add_bytes, lambda p: p.unlink()])
def test_damaged_ids(finished, damage):
    damage(finished / "ids-00001-of-00003.txt")
    with pytest.raises(ArtifactError, match=r"ids-00001-of-00003\.txt is (damaged|missing)"):
        EmbeddingStore.open(finished)


@pytest.mark.parametrize("name", ["embeddings-00002-of-00003.npy", "ids-00002-of-00003.txt"])
def test_a_flipped_bit_is_found_by_verifying(finished, name):
    data = bytearray((finished / name).read_bytes())
    data[-2] ^= 1
    (finished / name).write_bytes(data)
    EmbeddingStore.open(finished)
    with pytest.raises(ArtifactError, match=f"{name} is damaged: its SHA-256"):
        EmbeddingStore.open(finished, verify=True)


def test_shards_of_two_models(tmp_path):
    write_shards(tmp_path, rows(4), list("abcd"), num_shards=2, only=[0])
    write_shards(tmp_path, rows(4), list("abcd"), num_shards=2, only=[1], model="model-b")
    with pytest.raises(ArtifactError, match="shard 1 has model_fingerprint 'model-b', shard 0 has"):
        finish_embeddings(tmp_path, num_shards=2)


def test_shards_of_two_corpora(tmp_path):
    write_shards(tmp_path, rows(4), list("abcd"), num_shards=2, only=[0])
    write_shards(tmp_path, rows(5), list("abcde"), num_shards=2, only=[1])
    with pytest.raises(ArtifactError, match="shard 1 has corpus_rows 5, shard 0 has 4"):
        finish_embeddings(tmp_path, num_shards=2)


def test_a_shard_exchanged_after_finishing(finished, tmp_path):
    other = tmp_path / "other"
    write_shards(other, rows(8, seed=1), list("abcdefgh"), num_shards=3, model="model-b")
    for name in ("shard-00001-of-00003.json", "embeddings-00001-of-00003.npy"):
        (other / name).replace(finished / name)
    with pytest.raises(ArtifactError, match="shard 1 was exchanged"):
        EmbeddingStore.open(finished)


def test_duplicate_ids_across_shards(tmp_path):
    write_shards(tmp_path, rows(4), ["a", "b", "c", "b"], num_shards=2)
    with pytest.raises(ArtifactError, match=r"passage id 'b' twice \(rows 1 and 3"):
        finish_embeddings(tmp_path, num_shards=2)
    assert not (tmp_path / "meta.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 9}, "rows is 9, its shards say 8"),
        ({"format_version": 2}, "format version 2"),
        ({"shards": []}, "lists no shards"),
        ({"shards": [{}]}, "shard is None, expected a value of type int"),
    ],
)
def test_an_edited_meta_file(finished, change, message):
    path = finished / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=message):
        EmbeddingStore.open(finished)


def test_a_shard_with_other_bounds_than_its_number_says(finished):
    path = finished / "meta.json"
    meta = json.loads(path.read_text())
    meta["shards"][1]["end_row"] = 5
    path.write_text(json.dumps(meta))
    with pytest.raises(ArtifactError, match=r"holds rows 3 to 5; expected .* rows 3 to 6"):
        EmbeddingStore.open(finished)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path, bad):
    embeddings = rows(3)
    embeddings[1, 2] = bad
    with pytest.raises(ArtifactError, match=r"passage 'b' \(corpus row 1\) is not finite"):
        write_shards(tmp_path, embeddings, list("abc"), num_shards=1)
    assert list(tmp_path.iterdir()) == []


def test_zero_embeddings_are_counted(tmp_path, caplog):
    embeddings = rows(3)
    embeddings[[0, 2]] = 0
    write_shards(tmp_path, embeddings, list("abc"), num_shards=1)
    assert "2 of 3 embeddings are all zeros" in caplog.text
    assert finish_embeddings(tmp_path, num_shards=1).shards[0].zero_rows == 2


@pytest.mark.parametrize("passage_id", ["", "a\nb", "\ud800"])
def test_ids_that_no_line_can_hold(tmp_path, passage_id):
    with pytest.raises(ArtifactError, match="cannot be an id"):
        write_shards(tmp_path, rows(1), [passage_id], num_shards=1)
    assert list(tmp_path.iterdir()) == []


def test_too_few_too_many_and_misshapen_rows(tmp_path):
    def writer():
        return ShardWriter.open(
            tmp_path, shard=0, num_shards=1, corpus_rows=2, dim=DIM, model_fingerprint="m"
        )

    with pytest.raises(ArtifactError, match="1 passages came for a shard of 2"), writer() as shard:
        shard.write(rows(1), ["a"])
    with pytest.raises(ArtifactError, match="more than the 2 passages"), writer() as shard:
        shard.write(rows(3), list("abc"))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for 2 passage ids"), writer() as shard:
        shard.write(rows(2, dim=3), list("ab"))
    assert list(tmp_path.iterdir()) == []


def test_a_shard_written_again_is_not_described_by_its_old_description(tmp_path):
    write_shards(tmp_path, rows(2), list("ab"), num_shards=1)
    with (
        pytest.raises(RuntimeError),
        ShardWriter.open(
            tmp_path, shard=0, num_shards=1, corpus_rows=2, dim=DIM, model_fingerprint="m"
        ),
    ):
        raise RuntimeError
    with pytest.raises(ArtifactError, match="shard 0 of 1 is missing"):
        finish_embeddings(tmp_path, num_shards=1)


def test_a_killed_process_leaves_nothing_under_a_final_name(tmp_path):
    program = """
import os, sys
import numpy as np
from gc_dpr.retrieval import ShardWriter
with ShardWriter.open(
    sys.argv[1], shard=0, num_shards=1, corpus_rows=2, dim=2, model_fingerprint="m"
) as writer:
    writer.write(np.ones((1, 2)), ["a"])
    os.kill(os.getpid(), 9)
"""
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], timeout=60, check=False)
    assert ended.returncode == -9
    assert all(entry.name.startswith(".") for entry in tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="never finished"):
        EmbeddingStore.open(tmp_path)
    prepare_output_dir(tmp_path, overwrite=True, owned=EMBEDDING_FILES)
    assert list(tmp_path.iterdir()) == []


def test_blocks_need_a_size(finished):
    with pytest.raises(ValueError, match="blocks of 0 rows"):
        next(EmbeddingStore.open(finished).iter_blocks(0))


def test_packed_ids():
    ids = PassageIds.of(["a", "", "b"][::2])
    assert list(ids) == ["a", "b"]
    assert len(PassageIds(b"")) == 0
    for row in (-1, 2):
        with pytest.raises(IndexError):
            ids[row]
    with pytest.raises(ArtifactError, match="cut off"):
        PassageIds(b"a\nb")
    assert id_lines([]) == b""


def test_duplicates_are_decided_by_the_ids_not_by_their_hashes(monkeypatch):
    monkeypatch.setattr("gc_dpr.retrieval.passage_ids.hash", lambda line: 7, raising=False)
    assert PassageIds.of(["a", "b", "c"]).first_duplicate() is None
    assert PassageIds.of(["a", "b", "c", "b"]).first_duplicate() == ("b", 1, 3)
