"""Gradients of large embeddings: the same numbers, without a vocabulary of zeros per chunk."""

import pytest
import torch
from torch import nn

from gc_dpr.training.embedding_gradients import embeddings_added_in_place

WORDS = 5000


def backward(embedding, chunks):
    for ids in chunks:
        (embedding(ids) * torch.linspace(1, 2, 3)).sum().backward()


@pytest.mark.parametrize("before", [False, True])
def test_gives_the_dense_gradient(before):
    torch.manual_seed(0)
    dense, sparse = nn.Embedding(WORDS, 3, padding_idx=0), nn.Embedding(WORDS, 3, padding_idx=0)
    chunks = [torch.randint(0, 50, (7, 4)) for _ in range(3)]
    for embedding in (dense, sparse):
        embedding.weight.grad = torch.ones_like(embedding.weight) if before else None
    backward(dense, chunks)
    with embeddings_added_in_place(nn.Sequential(sparse)):
        assert sparse.sparse
        backward(sparse, chunks)
    assert not sparse.sparse
    assert not sparse.weight.grad.is_sparse
    torch.testing.assert_close(sparse.weight.grad, dense.weight.grad)
    assert sparse.weight.grad[0].eq(float(before)).all()  # padding gives none


def test_no_gradient_of_the_whole_vocabulary_is_made():
    embedding, made = nn.Embedding(WORDS, 3), []
    embedding.weight.register_hook(lambda gradient: made.append(gradient.is_sparse))
    with embeddings_added_in_place(embedding):
        backward(embedding, [torch.tensor([[4, 5]])])
    assert made == [True]


def test_small_frozen_and_already_sparse_embeddings_are_left_alone():
    small, frozen = nn.Embedding(10, 3), nn.Embedding(WORDS, 3).requires_grad_(False)
    own = nn.Embedding(WORDS, 3, sparse=True)
    parts = nn.ModuleList([small, frozen, own])
    with embeddings_added_in_place(parts):
        assert [part.sparse for part in parts] == [False, False, True]
        assert [part.weight.grad for part in parts] == [None] * 3
    assert own.sparse


def test_an_error_leaves_no_gradient_behind():
    embedding = nn.Embedding(WORDS, 3)
    with pytest.raises(RuntimeError), embeddings_added_in_place(embedding):
        raise RuntimeError("made up")
    assert embedding.weight.grad is None
    assert not embedding.sparse
