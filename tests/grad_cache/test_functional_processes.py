"""Decorators and class on two and three gloo processes with unequal shares against one process."""

import pytest
import torch
from distributed_run import run_distributed
from test_functional import call_model, contrastive_loss
from torch.nn.parallel import DistributedDataParallel
from toy_towers import gradients_of, largest_relative_error, make_encoder, random_tokens

from gc_dpr import distributed
from gc_dpr.grad_cache import GradCache, cached, cat_input_tensor, gather_input_tensor
from gc_dpr.losses.contrastive import DistributedContrastiveLoss

pytestmark = pytest.mark.distributed

QUESTIONS, PASSAGES = random_tokens(6, seed=3), random_tokens(12, seed=4)
SHARES = {2: (5, 1), 3: (1, 3, 2)}


def chunks_of(tokens, first, last, size):
    rows = torch.arange(first, last)
    return [tokens.pad(part, pad_token_id=0) for part in rows.split(size)]


def own_chunks(shares, size):
    rank = distributed.rank()
    first, last = sum(shares[:rank]), sum(shares[: rank + 1])
    questions = chunks_of(QUESTIONS, first, last, size)
    return questions, chunks_of(PASSAGES, 2 * first, 2 * last, 2 * size)


@cat_input_tensor
@gather_input_tensor
def gathered_loss(x, y, temperature):
    return contrastive_loss(x / temperature, y)


def step(model, shares, *, factor, sync_once):
    """The package's loop on this process's share; the last closure of all reduces."""
    questions, passages = own_chunks(shares, size=1)
    pairs = [cached(call_model)(model, chunk) for chunk in (*questions, *passages)]
    reps = [rep for rep, _ in pairs]
    cut = len(questions)
    loss = gathered_loss(reps[:cut], y=reps[cut:], temperature=torch.tensor(0.5).double()) * factor
    loss.backward()
    *early, (last_reps, last_closure) = pairs
    with distributed.without_gradient_sync(model if sync_once else None):
        for rep, closure in early:
            closure(rep)
    last_closure(last_reps)
    return loss.detach() / factor


def both_reductions():
    """DistributedDataParallel with the factor, and added gradients without it."""
    world = distributed.world_size()
    plain = make_encoder(dropout=0.0)
    wrapped = DistributedDataParallel(make_encoder(dropout=0.0), broadcast_buffers=False)
    ddp_loss = step(wrapped, SHARES[world], factor=world, sync_once=True)
    loss = step(plain, SHARES[world], factor=1, sync_once=False)
    distributed.sum_gradients(plain.parameters())
    return (ddp_loss, gradients_of(wrapped)), (loss, gradients_of(plain)), gather_columns()


def gather_columns():
    """Axis 1, integers, a process without columns, and only the own columns carry a gradient."""
    rank = distributed.rank()
    own = torch.full((2, rank), float(rank), requires_grad=True)

    @gather_input_tensor(axis=1)
    def loss_fn(x, target):
        return x, target, (x * torch.arange(x.shape[1])).sum()

    x, target, loss = loss_fn(own, target=torch.full((1, 1), rank))
    loss.backward()
    return x.detach(), target, own.grad


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_loss_has_the_gradient_of_the_joined_batch(world_size):
    encoder = make_encoder(dropout=0.0)
    reps = [
        encoder(**tokens.pad(torch.arange(len(tokens)), pad_token_id=0))
        for tokens in (QUESTIONS, PASSAGES)
    ]
    expected = contrastive_loss(reps[0] / 0.5, reps[1])
    expected.backward()
    for rank, (ddp, added, columns) in enumerate(run_distributed(both_reductions, world_size)):
        for loss, gradients in (ddp, added):
            assert abs(loss - expected) < 1e-12 * expected
            assert largest_relative_error(gradients, gradients_of(encoder)) < 1e-12
        values, target, gradient = columns
        widths = [float(r) for r in range(world_size) for _ in range(r)]
        assert values.tolist() == [widths] * 2
        assert target.tolist() == [list(range(world_size))]
        first = sum(range(rank))
        assert gradient.tolist() == [[float(first + i) for i in range(rank)]] * 2


def wrapped(encoder, kind):
    if kind == "ddp":
        return DistributedDataParallel(encoder, broadcast_buffers=False)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(encoder)


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def own_inputs(first, last):
    (questions,), (passages,) = (
        chunks_of(QUESTIONS, first, last, 6),
        chunks_of(PASSAGES, 2 * first, 2 * last, 12),
    )
    return questions, passages


def class_steps(scenarios):
    """Class and loss with the package's names: 4 and 2 questions, in two chunks each."""
    rank, found = distributed.rank(), []
    inputs = own_inputs(*((0, 4), (4, 6))[rank])
    for kind, postponed in scenarios:
        encoder = make_encoder(dropout=0.0)
        model = wrapped(encoder, kind)
        loss_fn = DistributedContrastiveLoss(n_hard_negatives=1)
        cache = GradCache([model, model], [2 - rank, 4 - 2 * rank], loss_fn)
        loss = cache(*inputs, no_sync_except_last=postponed, reduction="mean")
        found.append((loss, [whole(p.grad).clone() for p in encoder.parameters()]))
    return found


def test_class_with_models_that_reduce_gradients():
    scenarios = [(kind, postponed) for kind in ("ddp", "sharded") for postponed in (True, False)]
    encoder = make_encoder(dropout=0.0)
    reps = [
        encoder(**tokens.pad(torch.arange(len(tokens)), pad_token_id=0))
        for tokens in (QUESTIONS, PASSAGES)
    ]
    expected = contrastive_loss(*reps)
    expected.backward()
    for results in run_distributed(class_steps, 2, scenarios):
        assert len(results) == 4
        for loss, gradients in results:
            assert abs(loss - expected) < 1e-12 * expected
            assert largest_relative_error(gradients, gradients_of(encoder)) < 1e-12


def uneven_steps():
    """Rank 0 has 4 questions in chunks of 2, rank 1 has 2 in one chunk."""
    rank, found = distributed.rank(), []
    inputs = own_inputs(*((0, 4), (4, 6))[rank])
    for kind, postponed in (("ddp", False), ("sharded", True), ("ddp", True)):
        encoder = make_encoder(dropout=0.0)
        model = wrapped(encoder, kind)
        cache = GradCache([model, model], [2, 8], DistributedContrastiveLoss(1))
        try:
            cache(*inputs, no_sync_except_last=postponed)
            found.append("done")
        except ValueError as error:
            found.append(str(error))
        untouched = all(p.grad is None for p in encoder.parameters())
        assert untouched == (found[-1] != "done")
    return found


def test_different_chunk_counts_are_refused_where_they_would_hang():
    for ddp, sharded, ddp_once in run_distributed(uneven_steps, 2):
        assert "model 0 has 1 to 2 chunks" in ddp
        assert ddp.endswith("or pass no_sync_except_last=True")
        assert "model 0 has 1 to 2 chunks" in sharded
        assert sharded.endswith("as many rows")
        assert ddp_once == "done"
