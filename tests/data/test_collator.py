"""Batches: columns of the positives (TRAPS B7), known positives (B19, B21), loader workers."""

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch

from gc_dpr.data import Passage, TrainingExample
from gc_dpr.data.collator import Collator, build_loader
from gc_dpr.data.identity import passage_key
from gc_dpr.data.known_positives import KnownPositives
from gc_dpr.data.sampler import EpochBatchSampler
from gc_dpr.ragged import RaggedTokens


@dataclass
class Tokenized:
    tokens: RaggedTokens
    truncated_rows: list[int]


LIMIT = 12


def tokenize(texts):
    assert texts, "tokenizers refuse an empty list"
    rows = [[ord(letter) for letter in text] for text in texts]
    return Tokenized(
        RaggedTokens.from_lists([row[:LIMIT] for row in rows]),
        [number for number, row in enumerate(rows) if len(row) > LIMIT],
    )


def tokenize_passages(passages):
    return tokenize([f"{passage.title}|{passage.text}" for passage in passages])


def make(hard_negatives=2, **options):
    return Collator(tokenize, tokenize_passages, seed=5, hard_negatives=hard_negatives, **options)


def example(name, hard=(), positives=None, other=()):
    def passages(texts):
        return tuple(Passage("", "", text) for text in texts)

    positives = [f"{name}+"] if positives is None else positives
    return TrainingExample(
        name, f"{name}?", (), passages(positives), passages(hard), passages(other)
    )


def texts(tokens):
    return ["".join(map(chr, row.tolist())) for row in tokens.ids.split(tokens.lengths.tolist())]


def mask_of(batch):
    excluded = KnownPositives(
        batch.known_positive_keys,
        batch.known_positive_counts,
        batch.passage_keys,
        batch.positive_index,
    )
    return excluded(slice(0, len(batch.positive_index)), slice(0, len(batch.passage_keys)))


def test_two_one_and_no_negatives():
    """B7: six passages, label columns 0, 3 and 5."""
    examples = [example("a", ["a1", "a2", "a3"]), example("b", ["b1"]), example("c")]
    batch = make()([(0, e) for e in examples])
    assert batch.positive_index.tolist() == [0, 3, 5]
    assert batch.positive_index.dtype == batch.passage_keys.dtype == torch.int64
    assert texts(batch.passages) == ["|a+", "|a1", "|a2", "|b+", "|b1", "|c+"]
    assert texts(batch.questions) == ["a?", "b?", "c?"]
    assert batch.example_ids == ("a", "b", "c")
    assert (batch.fewer_negatives, batch.truncated_questions, batch.truncated_passages) == (2, 0, 0)


def test_counts():
    subject = example(
        "a long question", ["short", "a long passage", "a long question+"], other=["o"]
    )
    batch = make(hard_negatives=3, random_negatives=1)([(0, subject)])
    assert texts(batch.passages) == ["|a long ques", "|short", "|a long pass", "|o"]
    assert (batch.truncated_questions, batch.truncated_passages) == (1, 2)
    assert (batch.fewer_negatives, batch.passed_over_negatives) == (1, 1)


def test_a_text_that_occurs_again_is_encoded_once_and_counted_where_it_stands():
    """Two questions alike, one of them cut; a passage that is cut stands for three candidates."""
    long = "a passage beyond the limit"
    first = example("the same question", [long])
    second = example("the same question", [], positives=[long])
    third = example("other", [long, "b"])
    batch = make()([(0, e) for e in (first, second, third)])
    assert texts(batch.questions) == ["the same que", "other?"]
    assert batch.question_rows.tolist() == [0, 0, 1]
    assert texts(batch.passages) == ["|the same qu", "|a passage b", "|other+", "|b"]
    assert batch.passage_rows.tolist() == [0, 1, 1, 2, 1, 3]
    assert (batch.truncated_questions, batch.truncated_passages) == (2, 4)
    assert len(batch.example_ids) == len(batch.positive_index) == 3


def test_no_share_gives_a_batch_without_rows():
    batch = make()([])
    assert (len(batch.questions), len(batch.passages), batch.example_ids) == (0, 0, ())
    for name in ("positive_index", "passage_keys", "known_positive_keys", "known_positive_counts"):
        assert getattr(batch, name).shape == (0,)
        assert getattr(batch, name).dtype == torch.int64
    assert mask_of(batch).shape == (0, 0)


def test_same_positive_of_two_questions_is_masked_for_both():
    """B19: without the mask the loss cannot go below ln 2."""
    batch = make()([(0, example("a", positives=["P"])), (0, example("b", positives=["P "]))])
    mask = mask_of(batch)
    assert mask.tolist() == [[False, True], [True, False]]
    perfect = torch.full((2, 2), 50.0)
    labels = batch.positive_index
    unmasked = torch.nn.functional.cross_entropy(perfect, labels)
    masked = torch.nn.functional.cross_entropy(perfect.masked_fill(mask, -torch.inf), labels)
    assert unmasked.item() == pytest.approx(np.log(2), abs=1e-6)
    assert masked.item() == 0


def test_other_positive_of_a_question_is_masked_for_it_alone():
    """B21: Q1 has {A, B} and A is drawn; Q2's positive is B."""
    batch = make()([(0, example("1", positives=["A", "B"])), (0, example("2", positives=["B"]))])
    assert batch.known_positive_counts.tolist() == [2, 1]
    assert mask_of(batch).tolist() == [[False, True], [False, False]]


def test_passage_of_another_question_as_hard_negative_is_masked():
    batch = make()([(0, example("a", positives=["P"])), (0, example("b", ["x", "P"]))])
    assert texts(batch.passages) == ["|P", "|b+", "|x"]
    assert batch.passage_rows.tolist() == [0, 1, 2, 0]
    assert mask_of(batch).tolist() == [[False, False, False, True], [False] * 4]


def test_repeated_positive_counts_once():
    batch = make()([(0, example("a", positives=["P", "P ", "Q"]))])
    keys = [passage_key(Passage("", "", text)) for text in ("P", "Q")]
    assert batch.known_positive_keys.tolist() == keys
    assert batch.known_positive_counts.tolist() == [2]


EXAMPLES = [
    example(f"q{i}", [f"q{i} n{j}" for j in range(i % 5)], positives=[f"q{i} p{j}" for j in (0, 1)])
    for i in range(23)
]


def epochs_of(workers, rank=0, world_size=1):
    """What a loader gives in two epochs, the second one begun in its middle."""
    sampler = EpochBatchSampler(
        len(EXAMPLES), batch_size=6, seed=5, rank=rank, world_size=world_size
    )
    collator = make(positive_choice="random", negative_choice="random")
    loader = build_loader(EXAMPLES, collator, sampler, workers=workers)
    batches = []
    for epoch, first_batch in ((0, 0), (1, 2)):
        sampler.set_epoch(epoch, first_batch=first_batch)
        assert len(loader) == 4 - first_batch
        batches.append(list(loader))
    return batches


def assert_same(one, other):
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, RaggedTokens):
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.lengths, b.lengths)
        elif isinstance(a, torch.Tensor):
            assert torch.equal(a, b)
        else:
            assert a == b


# Python 3.12 warns of fork in a process with threads; torch starts some.
@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_batches(workers):
    for wanted, found in zip(epochs_of(0), epochs_of(workers), strict=True):
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert_same(one, other)


def test_epochs_and_processes():
    first, second = epochs_of(0)
    assert [len(batch.questions) for batch in first] == [6, 6, 6, 5]
    assert len(second) == 2
    assert sorted(name for batch in first for name in batch.example_ids) == sorted(
        example.id for example in EXAMPLES
    )
    pieces = [epochs_of(0, rank, 3)[0] for rank in range(3)]
    for i, whole in enumerate(first):
        assert sum((piece[i].example_ids for piece in pieces), ()) == whole.example_ids
        joined = [text for piece in pieces for text in texts(piece[i].passages)]
        assert joined == texts(whole.passages)


def test_workers_must_not_be_negative():
    with pytest.raises(ValueError, match="workers=-1"):
        build_loader(EXAMPLES, make(), EpochBatchSampler(1, batch_size=1, seed=0), workers=-1)
