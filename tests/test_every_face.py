"""Every face of the gradient cache against the gradient of the undivided batch, dropout on.

The class, the decorators, the step that the pipeline is made of and JAX run the same small encoder.
Its dropout draws row by row, so that all rows at once draw what the chunks draw one after the
other: the comparison is with plain autograd on the batch in one piece. The pipeline's own step with
a BERT, whose layers draw in turn, is held to one graph through the same chunks.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from training_parts import examples, make_batches, make_model

from gc_dpr.grad_cache import (
    GradCache,
    Tower,
    cached,
    cached_step,
    cat_input_tensor,
)
from gc_dpr.losses import in_batch_nll
from gc_dpr.ragged import RaggedTokens, length_sorted_chunks
from gc_dpr.training import ChunkBudget, batch_gradients

CPU = torch.device("cpu")
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
QUESTIONS, PASSAGES, LENGTH, WORDS = 8, 16, 5, 11
KEEP = 0.7
POSITIVES = torch.arange(0, PASSAGES, 2)


class RowDropout(nn.Module):
    """Dropout whose numbers come one after the other, whatever the size of the chunk."""

    def forward(self, inputs):
        numbers = torch.tensor([torch.rand(()).item() for _ in range(inputs.numel())])
        return inputs * (numbers.view_as(inputs) < KEEP) / KEEP


class Encoder(nn.Module):
    def __init__(self, seed, dtype):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.words = nn.Embedding(WORDS, 6, dtype=dtype)
            self.hidden = nn.Linear(6, 4, dtype=dtype)
        self.dropout = RowDropout()

    def forward(self, input_ids, attention_mask=None):
        return torch.tanh(self.hidden(self.dropout(self.words(input_ids).mean(1))))


def token_ids():
    generator = torch.Generator().manual_seed(3)
    sizes = (QUESTIONS, LENGTH), (PASSAGES, LENGTH)
    return [torch.randint(0, WORDS, size, generator=generator) for size in sizes]


def nll(question_reps, passage_reps):
    return F.cross_entropy(question_reps @ passage_reps.T, POSITIVES)


def in_blocks(question_reps, passage_reps):
    return in_batch_nll(
        question_reps, passage_reps, POSITIVES, question_block=3, passage_block=5
    ).loss


def gradients(encoders):
    found = [parameter.grad.numpy() for encoder in encoders for parameter in encoder.parameters()]
    for encoder in encoders:
        encoder.zero_grad()
    return found


def undivided(encoders, inputs):
    """Both sides in one piece, plain autograd."""
    loss = nll(*(encoder(ids) for encoder, ids in zip(encoders, inputs, strict=True)))
    loss.backward()
    return loss.detach()


def with_class(encoders, inputs, chunk):
    return GradCache(encoders, chunk, in_blocks)(*inputs)


def with_decorators(encoders, inputs, chunk):
    @cached
    def encode(encoder, ids):
        return encoder(ids)

    @cat_input_tensor
    def loss_of(question_reps, *, passages):
        return in_blocks(question_reps, passages)

    sides = [
        [encode(encoder, ids) for ids in side.split(chunk)]
        for encoder, side in zip(encoders, inputs, strict=True)
    ]
    reps = [[rep for rep, _ in side] for side in sides]
    loss = loss_of(reps[0], passages=reps[1])
    loss.backward()
    for side in sides:
        for rep, closure in side:
            closure(rep)
    return loss.detach()


def with_towers(encoders, inputs, chunk, kept=0):
    towers = []
    for encoder, ids in zip(encoders, inputs, strict=True):
        tokens = RaggedTokens.from_lists(ids.tolist())
        towers.append(
            Tower(
                encode=lambda batch, encoder=encoder: encoder(**batch),
                chunks=length_sorted_chunks(tokens.lengths, max_tokens=chunk * LENGTH),
                pad=partial(tokens.pad, pad_token_id=0),
                num_rows=len(tokens),
                embedding_dim=4,
                devices=[CPU],
                kept_graphs=kept,
            )
        )
    return cached_step(towers, in_blocks)


FACES = {
    "class": with_class,
    "decorators": with_decorators,
    "pipeline": with_towers,
    "pipeline, graphs kept": partial(with_towers, kept=2),
}


def assert_equal(found, expected, dtype):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(other) > 0
        assert np.linalg.norm(one - other) <= TOLERANCES[dtype] * np.linalg.norm(other)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
@pytest.mark.parametrize("face", [*FACES, "jax"])
def test_equals_the_undivided_batch(face, chunk, tied, dtype):
    encoders = [Encoder(1, getattr(torch, dtype)), Encoder(2, getattr(torch, dtype))]
    encoders = encoders[:1] * 2 if tied else encoders
    if face == "jax":
        if chunk > QUESTIONS:
            pytest.skip("equal chunks: the same as one chunk of 8")
        assert_equal(*jax_gradients(encoders, chunk, dtype), dtype)
        return
    inputs = token_ids()
    torch.manual_seed(9)
    expected_loss = undivided(encoders, inputs)
    distinct = list(dict.fromkeys(encoders))
    expected = gradients(distinct)
    torch.manual_seed(9)
    loss = FACES[face](encoders, inputs, chunk)
    assert float(loss) == pytest.approx(float(expected_loss), rel=TOLERANCES[dtype])
    assert_equal(gradients(distinct), expected, dtype)


def test_dropout_is_on():
    encoders, inputs = [Encoder(1, torch.float64), Encoder(2, torch.float64)], token_ids()
    assert undivided(encoders, inputs) != undivided(encoders, inputs)


def jax_gradients(encoders, chunk, dtype):
    """The same encoders and loss in JAX: gradients through the cache, and of the whole batch."""
    jax = pytest.importorskip("jax")
    from gc_dpr import cachex

    jnp = jax.numpy
    # JAX cuts into equal chunks: the nearest number of rows that divides both sides
    rows = max(size for size in (1, 2, 4, 8) if size <= chunk)
    with jax.enable_x64(dtype == "float64"):
        distinct = list(dict.fromkeys(encoders))
        params = [
            {name: jnp.asarray(p.detach().numpy()) for name, p in encoder.named_parameters()}
            for encoder in distinct
        ]
        keys = jax.random.split(jax.random.key(0), QUESTIONS + PASSAGES)
        ids = [jnp.asarray(side.numpy()) for side in token_ids()]
        sides = [
            {"ids": ids[0], "key": keys[:QUESTIONS]},
            {"ids": ids[1], "key": keys[QUESTIONS:]},
        ]

        def encode(params, batch):
            hidden = params["words.weight"][batch["ids"]].mean(1)
            mask = jax.vmap(lambda key: jax.random.bernoulli(key, KEEP, hidden.shape[1:]))
            hidden = jnp.where(mask(batch["key"]), hidden / KEEP, 0)
            return jnp.tanh(hidden @ params["hidden.weight"].T + params["hidden.bias"])

        def loss(encode, params, sides):
            question_reps, passage_reps = encode(params[0], sides[0]), encode(params[-1], sides[1])
            scores = jax.nn.log_softmax(question_reps @ passage_reps.T)
            return -scores[jnp.arange(QUESTIONS), jnp.asarray(POSITIVES.numpy())].mean()

        chunked = [cachex.tree_chunk(side, len(side["ids"]) // rows) for side in sides]
        found = jax.jit(jax.grad(partial(loss, cachex.grad_cached(encode))))(params, chunked)
        expected = jax.jit(jax.grad(partial(loss, encode)))(params, sides)
        flat = [[np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (found, expected)]
        assert flat[0][0].dtype == dtype
    return flat


# --------------------------------------------------------------------- the pipeline's step, a BERT


def one_graph(model, batch, budget):
    """Autograd through the same chunks in the same order, and a dense loss."""
    reps = []
    for encoder, tokens in (
        (model.question_encoder, batch.questions),
        (model.passage_encoder, batch.passages),
    ):
        chunks = length_sorted_chunks(tokens.lengths, max_tokens=budget.tokens)
        encoded = [encoder(**tokens.pad(rows, pad_token_id=0)) for rows in chunks]
        reps.append(torch.cat(encoded)[torch.cat(chunks).argsort()])
    scores = reps[0][batch.question_rows] @ reps[1][batch.passage_rows].T
    loss = F.cross_entropy(scores, batch.positive_index)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("tokens", "kept"), [(20, 0), (100, 0), (100, 2), (10**6, 0)])
def test_a_bert_in_the_pipeline(tiny_encoder_dir, tokens, kept, shared, dtype):
    model = make_model(tiny_encoder_dir, dropout=0.3, shared=shared, double=dtype == "float64")
    model.train()
    batch = next(iter(make_batches(model, examples(9), batch_size=9)[0]))
    budget = ChunkBudget(tokens, kept=kept)
    torch.manual_seed(4)
    expected_loss = one_graph(model, batch, budget)
    expected = gradients([model])
    torch.manual_seed(4)
    outcome = batch_gradients(
        model, batch, question_budget=budget, passage_budget=budget, device=CPU,
        mask_known_positives=False,
    )  # fmt: skip
    assert float(outcome.loss) == pytest.approx(float(expected_loss), rel=TOLERANCES[dtype])
    # key biases have no gradient in theory, so what they have is noise: compare with all together
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in expected))
    for one, other in zip(gradients([model]), expected, strict=True):
        assert np.linalg.norm(one - other) <= TOLERANCES[dtype] * whole
