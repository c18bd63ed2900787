"""A small text encoder with dropout, ragged batches for it, and the gradient without any cache."""

import torch
from torch import nn

from gc_dpr.grad_cache import Tower, devices_of
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks

VOCABULARY = 23


class ToyEncoder(nn.Module):
    """Masked mean of embeddings, a hidden layer with dropout; counts its forward calls."""

    def __init__(self, dim=6, dropout=0.3, seed=0):
        super().__init__()
        generator = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 16)
        self.output = nn.Linear(16, dim)
        self.dropout = nn.Dropout(dropout)
        torch.random.set_rng_state(generator)
        self.calls = []

    def forward(self, input_ids, attention_mask):
        self.calls.append((len(input_ids), torch.is_grad_enabled()))
        mask = attention_mask.unsqueeze(-1).to(self.embedding.weight.dtype)
        words = self.dropout(self.embedding(input_ids)) * mask
        mean = words.sum(1) / mask.sum(1)
        return self.output(self.dropout(torch.tanh(self.hidden(mean))))


def make_encoder(dtype=torch.float64, **kwargs):
    return ToyEncoder(**kwargs).to(dtype)


def random_tokens(count, seed, longest=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    ids = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=generator)
    return RaggedTokens(ids, lengths)


def make_tower(encoder, tokens, *, max_rows=None, max_tokens=10**6, **kwargs):
    def pad(rows):
        return tokens.pad(rows, pad_token_id=0)

    return Tower(
        encode=lambda chunk: encoder(**chunk),
        chunks=length_sorted_chunks(tokens.lengths, max_tokens=max_tokens, max_rows=max_rows),
        pad=pad,
        num_rows=len(tokens),
        embedding_dim=encoder.output.out_features,
        devices=devices_of(encoder),
        dtype=encoder.output.weight.dtype,
        **kwargs,
    )


def reps_in_one_graph(tower):
    """Every chunk with its graph, put back in order row by row."""
    by_row = {}
    for rows in tower.chunks:
        for row, rep in zip(rows.tolist(), tower.encode(tower.pad(rows)), strict=True):
            by_row[row] = rep
    return torch.stack([by_row[row] for row in range(tower.num_rows)])


def nll(question_reps, passage_reps, positive_index):
    """Written out, so that it shares nothing with gc_dpr.losses."""
    scores = question_reps @ passage_reps.T
    picked = scores[torch.arange(len(scores)), positive_index]
    return (torch.logsumexp(scores, 1) - picked).mean()


def gradients_of(*modules):
    """A flat list of the gradients of all parameters, clones."""
    return [p.grad.clone() for module in modules for p in module.parameters()]


def clear_gradients(*modules):
    for module in modules:
        module.zero_grad(set_to_none=True)
        module.calls = []


def largest_relative_error(found, expected):
    """Largest over parameters of |found - expected| / |expected|, by 2-norms.

    Some gradients are zero but for rounding (a bias of the passage encoder moves all scores of a
    question alike): |expected| counts as at least a tenth of the largest of all.
    """
    floor = max(float(b.norm()) for b in expected) / 10
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm()) / max(float(b.norm()), floor) for a, b in pairs)
