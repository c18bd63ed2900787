import functools
import logging
import threading

import numpy as np
import pytest
import torch

from gc_dpr.data.records import Passage
from gc_dpr.errors import ArtifactError
from gc_dpr.models import BiEncoder, TokenizedTexts, encode_tokens
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks
from gc_dpr.retrieval import (
    ShardWriter,
    encode_passages_to_shard,
    finish_embeddings,
)
from gc_dpr.retrieval.progress import Progress

DIM = 3
MAX_LENGTH = 9


def corpus(count):
    """Passages of 1 to 12 words in no order of length."""
    return [
        Passage(id=f"p{row}", title="", text=" ".join(["word"] * (1 + row * 7 % 12)) + str(row))
        for row in range(count)
    ]


def token_ids(passage):
    return [1, *(ord(word[-1]) for word in passage.text.split()), len(passage.id)]


def fake_tokenize(passages):
    lists = [token_ids(passage) for passage in passages]
    cut = tuple(row for row, line in enumerate(lists) if len(line) > MAX_LENGTH)
    return TokenizedTexts(RaggedTokens.from_lists([line[:MAX_LENGTH] for line in lists]), cut)


def embed_one(ids):
    return [sum(ids), len(ids), float(ids[-1])]


def fake_encode(tokens, /, *, batch_tokens):
    """Encodes chunk by chunk and puts the rows back, as the real one does."""
    out = np.zeros((len(tokens), DIM), np.float32)
    for rows in length_sorted_chunks(tokens.lengths, max_tokens=batch_tokens):
        chunk = tokens.pad(rows, pad_token_id=0)
        for row, ids, mask in zip(rows, chunk["input_ids"], chunk["attention_mask"], strict=True):
            out[row] = embed_one(ids[mask.bool()].tolist())
    return out


def encode_all(folder, passages, *, num_shards=1, rows=None, dim=DIM, **options):
    options = {"tokenize": fake_tokenize, "encode": fake_encode, "batch_tokens": 40} | options
    counts = []
    for shard in range(num_shards):
        with ShardWriter.open(
            folder,
            shard=shard,
            num_shards=num_shards,
            corpus_rows=len(passages) if rows is None else rows,
            dim=dim,
            model_fingerprint="m",
        ) as writer:
            # a fresh iterator for each, as every process reads the file by itself
            counts.append(encode_passages_to_shard(iter(passages), writer=writer, **options))
    return finish_embeddings(folder, num_shards=num_shards), counts


def contents(store):
    blocks = list(store.iter_blocks(1000))
    return np.concatenate([b for b, _ in blocks]), [i for _, ids in blocks for i in ids]


@pytest.mark.parametrize("num_shards", [1, 3, 60])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_every_passage_gets_its_own_embedding(tmp_path, num_shards, window):
    passages = corpus(50)
    store, counts = encode_all(tmp_path, passages, num_shards=num_shards, window=window)
    found, ids = contents(store)
    assert ids == [passage.id for passage in passages]
    expected = [embed_one(token_ids(passage)[:MAX_LENGTH]) for passage in passages]
    np.testing.assert_array_equal(found, np.array(expected, np.float32))
    lengths = [len(token_ids(passage)) for passage in passages]
    assert sum(count.passages for count in counts) == 50
    assert sum(count.tokens for count in counts) == sum(min(n, MAX_LENGTH) for n in lengths)
    assert sum(count.truncated for count in counts) == sum(n > MAX_LENGTH for n in lengths) > 0


def test_the_real_encoder_gives_what_it_gives_for_one_passage_at_a_time(tmp_path, tiny_encoder_dir):
    model = BiEncoder.from_pretrained(tiny_encoder_dir)
    passages = [
        Passage(id=str(row), title="clock tower" * (row % 2), text="the river " * (row * 5 % 13))
        for row in range(20)
    ]
    store, counts = encode_all(
        tmp_path,
        passages,
        num_shards=3,
        dim=model.embedding_dim,
        tokenize=model.tokenize_passages,
        encode=functools.partial(encode_tokens, model.passage_encoder),
        window=4,
    )
    one_by_one = np.concatenate([model.encode_passages([passage]) for passage in passages])
    np.testing.assert_allclose(contents(store)[0], one_by_one, atol=1e-5)
    assert counts[0].passages == 7


def test_short_passages_are_not_padded_to_the_maximum(tmp_path):
    widths = []

    def encode(tokens, /, *, batch_tokens):
        chunks = length_sorted_chunks(tokens.lengths, max_tokens=batch_tokens)
        widths.extend(int(tokens.lengths[rows].max()) for rows in chunks)
        return np.ones((len(tokens), DIM))

    def tokenize(passages):
        return TokenizedTexts(RaggedTokens.from_lists([[5] * 10] * len(passages)))

    _, (counts,) = encode_all(
        tmp_path, corpus(1000), tokenize=tokenize, encode=encode, batch_tokens=2560
    )
    assert set(widths) == {10}
    assert counts.padding_share == 0
    assert counts.tokens == counts.padded_tokens == 10_000


def test_the_padding_share_is_counted(tmp_path):
    def tokenize(passages):
        lists = [[5] * (2 + 4 * row) for row in range(len(passages))]  # 2 and 6 tokens
        return TokenizedTexts(RaggedTokens.from_lists(lists))

    _, (counts,) = encode_all(tmp_path, corpus(2), tokenize=tokenize, batch_tokens=12)
    assert (counts.tokens, counts.padded_tokens) == (8, 12)
    assert counts.padding_share == pytest.approx(1 / 3)


def test_memory_is_bounded_by_two_windows(tmp_path):
    read = 0
    ahead = []

    def stream():
        nonlocal read
        for passage in corpus(100):
            read += 1
            yield passage

    encoded = 0

    def encode(tokens, /, *, batch_tokens):
        nonlocal encoded
        ahead.append(read - encoded)
        encoded += len(tokens)
        return np.ones((len(tokens), DIM))

    with ShardWriter.open(
        tmp_path, shard=0, num_shards=1, corpus_rows=100, dim=DIM, model_fingerprint="m"
    ) as writer:
        encode_passages_to_shard(
            stream(), tokenize=fake_tokenize, encode=encode, writer=writer, window=10
        )
    assert max(ahead) <= 20


def test_the_next_window_is_tokenised_while_one_is_encoded(tmp_path):
    second_window_made = threading.Event()
    calls = []

    def tokenize(passages):
        calls.append(threading.current_thread())
        if len(calls) == 2:
            second_window_made.set()
        return fake_tokenize(passages)

    def encode(tokens, /, *, batch_tokens):
        assert second_window_made.wait(timeout=10)
        return fake_encode(tokens, batch_tokens=batch_tokens)

    encode_all(tmp_path, corpus(10), tokenize=tokenize, encode=encode, window=5)
    assert threading.main_thread() not in calls


class BrokenError(RuntimeError):
    pass


@pytest.mark.parametrize(("name", "works"), [("encode", fake_encode), ("tokenize", fake_tokenize)])
def test_a_failure_in_the_third_window_leaves_nothing(tmp_path, name, works):
    calls = []

    def breaks(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise BrokenError
        return works(*args, **kwargs)

    with pytest.raises(BrokenError):
        encode_all(tmp_path, corpus(50), window=5, **{name: breaks})
    assert list(tmp_path.iterdir()) == []


def test_nan_from_the_encoder_names_the_passage(tmp_path):
    def encode(tokens, /, *, batch_tokens):
        out = fake_encode(tokens, batch_tokens=batch_tokens)
        out[2] = np.nan
        return out

    with pytest.raises(ArtifactError, match="passage 'p2'"):
        encode_all(tmp_path, corpus(5), encode=encode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_corpus_that_changed_after_it_was_counted(tmp_path, num_shards):
    with pytest.raises(ArtifactError, match="more than the 9 passages"):
        encode_all(tmp_path / "a", corpus(10), rows=9, num_shards=num_shards)
    with pytest.raises(ArtifactError, match="has shrunk"):
        encode_all(tmp_path / "b", corpus(10), rows=11, num_shards=num_shards)


def test_an_empty_last_shard_still_sees_that_the_corpus_has_grown(tmp_path):
    with pytest.raises(ArtifactError, match="more than the 2 passages"):
        encode_all(tmp_path, corpus(3), rows=2, num_shards=3)


def test_an_empty_corpus(tmp_path):
    store, (counts,) = encode_all(tmp_path, [])
    assert store.rows == counts.passages == counts.padding_share == 0


def test_embeddings_as_a_tensor(tmp_path):
    def encode(tokens, /, *, batch_tokens):
        with torch.inference_mode():
            return torch.from_numpy(fake_encode(tokens, batch_tokens=batch_tokens)) + 0

    store, _ = encode_all(tmp_path / "tensor", corpus(5), encode=encode)
    array, _ = encode_all(tmp_path / "array", corpus(5))
    np.testing.assert_array_equal(contents(store)[0], contents(array)[0])


def test_window_below_one(tmp_path):
    with pytest.raises(ValueError, match="window=0"):
        encode_all(tmp_path, corpus(2), window=0)


def test_progress_is_logged_where_there_is_no_terminal(caplog, capsys):
    caplog.set_level(logging.INFO)
    with Progress(4, what="encoding", unit="passages", enabled=True, log_seconds=0) as bar:
        for _ in range(4):
            bar.update(1)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3  # the end is the caller's to tell
    assert lines[0].startswith("encoding: 1 of 4 passages (25 %), ")
    caplog.clear()
    with Progress(4, what="encoding", unit="passages", enabled=False, log_seconds=0) as bar:
        bar.update(1)
    assert not caplog.records
    assert capsys.readouterr().err == ""
