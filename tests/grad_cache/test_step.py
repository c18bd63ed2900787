"""cached_step against autograd through the same chunks, and against the undivided batch."""

import pytest
import torch
from torch import nn
from toy_towers import (
    clear_gradients,
    gradients_of,
    largest_relative_error,
    make_encoder,
    make_tower,
    nll,
    random_tokens,
    reps_in_one_graph,
)

from gc_dpr.grad_cache import Tower, cached_step

# 7 questions with 2, 0, 1, 3, 0, 1, 2 hard negatives: 16 passages.
POSITIVE_INDEX = torch.tensor([0, 3, 4, 6, 10, 11, 13])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SIZES = (1, 3, 5, 16, 100)


def loss_fn(question_reps, passage_reps):
    return nll(question_reps, passage_reps, POSITIVE_INDEX)


def make_encoders(*, shared=False, **kwargs):
    question = make_encoder(seed=1, **kwargs)
    return question, question if shared else make_encoder(seed=2, **kwargs)


def make_towers(question_encoder, passage_encoder, *, sizes=(3, 5), **kwargs):
    return [
        make_tower(question_encoder, random_tokens(7, seed=3), max_rows=sizes[0], **kwargs),
        make_tower(passage_encoder, random_tokens(16, seed=4), max_rows=sizes[1], **kwargs),
    ]


def plain_step(towers):
    loss = loss_fn(*[reps_in_one_graph(tower) for tower in towers])
    loss.backward()
    return loss.detach()


def compare(cached, plain, encoders, tolerance, seed=5):
    """Run both from the same random state; loss, gradients and random state after must agree."""
    results = []
    for step in (cached, plain):
        clear_gradients(*encoders)
        torch.manual_seed(seed)
        loss = step()
        results.append((loss, gradients_of(*encoders), torch.get_rng_state()))
    (loss, gradients, state), (plain_loss, plain_gradients, plain_state) = results
    assert not loss.requires_grad
    assert torch.equal(state, plain_state)
    assert abs(loss - plain_loss) <= tolerance * plain_loss
    assert largest_relative_error(gradients, plain_gradients) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_equals_autograd_through_the_same_chunks(size, shared, dtype):
    encoders = make_encoders(shared=shared, dtype=dtype)
    towers = make_towers(*encoders, sizes=(size, size))
    compare(
        lambda: cached_step(towers, loss_fn), lambda: plain_step(towers), encoders, TOLERANCE[dtype]
    )


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 50])
def test_kept_graphs_change_nothing_but_the_number_of_forwards(kept):
    encoders = make_encoders()
    towers = make_towers(*encoders, sizes=(3, 5), kept_graphs=kept)  # 3 and 4 chunks
    compare(lambda: cached_step(towers, loss_fn), lambda: plain_step(towers), encoders, 1e-12)
    clear_gradients(*encoders)
    cached_step(towers, loss_fn)
    # the very last chunk of the step is always kept: its activations would be alone in memory
    assert [len(encoder.calls) for encoder in encoders] == [
        6 - min(kept, 3),
        8 - min(max(kept, 1), 4),
    ]


@pytest.mark.parametrize("budget", [1, 9, 20, 10**6])
@pytest.mark.parametrize("shared", [False, True])
def test_equals_the_undivided_batch_without_dropout(budget, shared):
    encoders = make_encoders(shared=shared, dropout=0.0)
    questions, passages = random_tokens(7, seed=3), random_tokens(16, seed=4)
    towers = [
        make_tower(encoders[0], questions, max_tokens=budget),
        make_tower(encoders[1], passages, max_tokens=2 * budget),
    ]

    def undivided():
        loss = loss_fn(
            encoders[0](**questions.pad(torch.arange(7), pad_token_id=0)),
            encoders[1](**passages.pad(torch.arange(16), pad_token_id=0)),
        )
        loss.backward()
        return loss.detach()

    compare(lambda: cached_step(towers, loss_fn), undivided, encoders, 1e-12)


def test_replay_draws_the_same_masks_and_chunks_draw_different_ones():
    encoder = make_encoder(dropout=0.5)
    tokens = random_tokens(1, seed=0)
    masks = []
    encoder.dropout.register_forward_hook(lambda module, args, out: masks.append(out.detach() != 0))

    def encode(chunk):
        masks.clear()
        reps = encoder(**chunk)
        drawn.append(masks[1].clone())
        return reps

    drawn = []
    tower = make_tower(encoder, tokens)
    same_text = Tower(
        encode=encode,
        chunks=[torch.tensor([0]), torch.tensor([1])],
        pad=lambda rows: tower.pad(torch.zeros_like(rows)),
        num_rows=2,
        embedding_dim=6,
        devices=tower.devices,
    )
    cached_step([same_text], lambda reps: reps.sum())
    first, second, first_again = drawn  # the second's graph is kept
    assert not torch.equal(first, second)
    assert torch.equal(first, first_again)


def test_gradients_add_up_over_steps():
    encoders = make_encoders(dropout=0.0)
    towers = make_towers(*encoders)
    cached_step(towers, loss_fn)
    once = gradients_of(*encoders)
    cached_step(towers, loss_fn)
    assert largest_relative_error(gradients_of(*encoders), [2 * g for g in once]) < 1e-14


def test_one_chunk_takes_one_forward():
    encoders = make_encoders()
    cached_step(make_towers(*encoders, sizes=(7, 16)), loss_fn)
    assert [encoder.calls for encoder in encoders] == [[(7, True)], [(16, True)]]


def test_forwards_of_a_chunked_batch():
    encoders = make_encoders()
    cached_step(make_towers(*encoders, sizes=(7, 10)), loss_fn)
    assert [encoder.calls for encoder in encoders] == [
        [(7, False), (7, True)],
        [(10, False), (6, True), (10, True)],
    ]


def test_frozen_tower_is_never_replayed():
    question, passage = make_encoders()
    passage.requires_grad_(False)
    towers = [
        make_towers(question, passage, sizes=(3, 5))[0],
        make_towers(question, passage, sizes=(3, 5), trainable=False)[1],
    ]
    compare(lambda: cached_step(towers, loss_fn), lambda: plain_step(towers), [question], 1e-12)
    clear_gradients(question, passage)
    cached_step(towers, loss_fn)
    assert passage.calls == [(5, False), (5, False), (5, False), (1, False)]
    assert all(parameter.grad is None for parameter in passage.parameters())
    # One chunk on the trained side is the plain path, whatever the frozen side has.
    clear_gradients(question, passage)
    cached_step([make_towers(question, passage, sizes=(7, 5))[0], towers[1]], loss_fn)
    assert question.calls == [(7, True)]


def test_all_towers_frozen_is_an_error():
    encoders = make_encoders()
    towers = make_towers(*encoders, trainable=False)
    with pytest.raises(ValueError, match="nothing that can be trained"):
        cached_step(towers, loss_fn)


def test_parameters_of_the_loss_get_their_gradient():
    encoders = make_encoders(dropout=0.0)
    towers = make_towers(*encoders)
    log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def scaled_loss(question_reps, passage_reps):
        return loss_fn(question_reps * log_scale.exp(), passage_reps)

    cached_step(towers, scaled_loss)
    found, log_scale.grad = log_scale.grad, None
    scaled_loss(*[reps_in_one_graph(tower) for tower in towers]).backward()
    assert torch.allclose(found, log_scale.grad, rtol=1e-13)


def test_tower_without_rows_gives_empty_reps():
    encoder, other = make_encoders()
    seen = []

    def loss_without_questions(question_reps, passage_reps):
        seen.append((question_reps.shape, question_reps.requires_grad, question_reps.dtype))
        return passage_reps.square().mean() + question_reps.sum()

    towers = [make_tower(encoder, random_tokens(0, seed=0)), *make_towers(encoder, other)[1:]]
    loss = cached_step(towers, loss_without_questions)
    assert seen == [((0, 6), True, torch.float64)]
    assert loss > 0
    assert encoder.calls == []


def scaler_of(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale)


@pytest.mark.parametrize("sizes", [(3, 5), (100, 100)])
def test_scaler_scales_once(sizes):
    """B43: the same unscaled gradients, loss and clipped step for any scale."""
    results = []
    for scale in (None, 1.0, 65536.0):
        encoders = make_encoders(dtype=torch.float32)
        parameters = [p for encoder in encoders for p in encoder.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = None if scale is None else scaler_of(scale)
        torch.manual_seed(0)
        loss = cached_step(make_towers(*encoders, sizes=sizes), loss_fn, scaler=scaler)
        if scaler is None:
            norm = nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        results.append((loss, norm, [p.detach().clone() for p in parameters]))
    for loss, norm, weights in results[1:]:
        assert loss == results[0][0]
        assert torch.allclose(norm, results[0][1], rtol=1e-6)
        assert largest_relative_error(weights, results[0][2]) < 1e-6


def test_scaled_overflow_skips_the_step():
    encoders = make_encoders(dtype=torch.float32)
    parameters = [p for encoder in encoders for p in encoder.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    before = [p.detach().clone() for p in parameters]
    scaler = scaler_of(65536.0)
    loss = cached_step(
        make_towers(*encoders), lambda q, p: loss_fn(q, p) * float("inf"), scaler=scaler
    )
    scaler.step(optimizer)
    scaler.update()
    assert loss == float("inf")
    assert scaler.get_scale() == 32768.0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


@pytest.mark.parametrize("outer", [False, True])
def test_bf16_encodes_in_autocast_and_loses_in_float32(outer):
    """Also when the caller has autocast on around the whole step."""
    encoders = make_encoders(dtype=torch.float32, dropout=0.0)
    towers = make_towers(*encoders)
    exact = plain_step(towers)
    exact_gradients = gradients_of(*encoders)
    clear_gradients(*encoders)
    seen = []

    def autocast():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def spying_loss(question_reps, passage_reps):
        seen.append((question_reps.dtype, (question_reps @ passage_reps.T).dtype))
        return loss_fn(question_reps, passage_reps)

    if outer:
        with autocast():
            loss = cached_step(towers, spying_loss)
    else:
        loss = cached_step(towers, spying_loss, autocast=autocast)
    assert seen == [(torch.float32, torch.float32)]
    assert loss != exact
    assert torch.allclose(loss, exact, rtol=2e-2)
    assert largest_relative_error(gradients_of(*encoders), exact_gradients) < 0.1
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in encoders[0].parameters())


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (lambda chunk: (chunk["input_ids"],), "take the representation out"),
        (lambda chunk: chunk["input_ids"].float().sum(1), r"shape \(3, D\), found \(3,\)"),
        (lambda chunk: torch.zeros(2, 4), r"shape \(3, D\), found \(2, 4\)"),
        (lambda chunk: torch.zeros(3, 4, 5), r"found \(3, 4, 5\)"),
    ],
)
@pytest.mark.parametrize("sizes", [3, 6])
def test_wrong_representations(encode, message, sizes):
    tokens = random_tokens(3, seed=0)
    chunk = torch.arange(3)
    repeated = [chunk] if sizes == 3 else [chunk, chunk + 3]
    tower = Tower(
        encode=encode,
        chunks=repeated,
        pad=lambda rows: tokens.pad(rows % 3, pad_token_id=0),
        num_rows=sizes,
        embedding_dim=4,
        devices=[torch.device("cpu")],
    )
    with pytest.raises((TypeError, ValueError), match=message):
        cached_step([tower], lambda reps: reps.sum())


@pytest.mark.parametrize("loss", [lambda q, p: q.sum(1), lambda q, p: 1.0])
def test_loss_that_is_no_scalar_touches_no_gradient(loss):
    encoders = make_encoders()
    with pytest.raises(ValueError, match="must return a scalar tensor"):
        cached_step(make_towers(*encoders), loss)
    assert all(p.grad is None for encoder in encoders for p in encoder.parameters())


def test_tower_checks_its_chunks():
    arguments = {"encode": None, "pad": None, "embedding_dim": 1, "devices": []}
    with pytest.raises(ValueError, match="hold 2 rows, the tower 3"):
        Tower(chunks=[torch.arange(2)], num_rows=3, **arguments)
    with pytest.raises(ValueError, match="kept_graphs"):
        Tower(chunks=[], num_rows=0, kept_graphs=-1, **arguments)
