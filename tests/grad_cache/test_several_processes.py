"""Two and three gloo processes with unequal shares against one process with the joined batch."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_run import run_distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from toy_towers import (
    gradients_of,
    largest_relative_error,
    make_encoder,
    make_tower,
    nll,
    random_tokens,
)

from gc_dpr import distributed
from gc_dpr.grad_cache import GradCache, cached_step
from gc_dpr.losses import in_batch_nll

pytestmark = pytest.mark.distributed

GOLDEN = Path(__file__).parent.parent / "golden" / "distributed_loss.json"
NEGATIVES = [2, 0, 1, 3, 0, 1, 2, 0, 1]  # hard negatives of each question, ragged
SIZES = [1 + count for count in NEGATIVES]
QUESTIONS, PASSAGES = random_tokens(9, seed=3), random_tokens(sum(SIZES), seed=4)
POSITIVES = torch.tensor([sum(SIZES[:i]) for i in range(9)])
# torch 2.13 renamed the first.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = (ALL_GATHER, "all_reduce", "broadcast", "barrier", "reduce_scatter")


def share_of(shares, rank):
    """Rows of the questions and passages of a rank, and its positives' local rows."""
    first = sum(shares[:rank])
    questions = torch.arange(first, first + shares[rank])
    start = sum(SIZES[:first])
    passages = torch.arange(start, start + sum(SIZES[first : first + shares[rank]]))
    return questions, passages, POSITIVES[questions] - start


def excluded_pairs():
    """Some candidates are taken out, never a positive."""
    excluded = torch.rand(9, len(PASSAGES), generator=torch.Generator().manual_seed(0)) < 0.2
    excluded[torch.arange(9), POSITIVES] = False
    return excluded


def make_encoders(shared):
    question = make_encoder(seed=1, dropout=0.0)
    return [question, question if shared else make_encoder(seed=2, dropout=0.0)]


def train(encoders, step, parameters):
    """Three optimizer steps; loss and gradients of each, and the final parameters."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    history = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step()
        history.append((loss, gradients_of(*encoders)))
        optimizer.step()
    return history, [p.detach() for p in parameters]


def parameters_of(encoders):
    return list(dict.fromkeys(p for encoder in encoders for p in encoder.parameters()))


def train_on_one(shared):
    """The undivided batch, no chunks, no gc_dpr loss."""
    encoders = make_encoders(shared)

    def step():
        question_reps = encoders[0](**QUESTIONS.pad(torch.arange(9), pad_token_id=0))
        passage_reps = encoders[1](**PASSAGES.pad(torch.arange(len(PASSAGES)), pad_token_id=0))
        scores = question_reps @ passage_reps.T
        scores = scores.masked_fill(excluded_pairs(), -torch.inf)
        picked = scores[torch.arange(9), POSITIVES]
        loss = (torch.logsumexp(scores, 1) - picked).mean()
        loss.backward()
        return loss.detach()

    return train(encoders, step, parameters_of(encoders))


def train_on_share(shares, shared):
    """cached_step on this rank's share; chunk sizes differ between the ranks."""
    rank = distributed.rank()
    encoders = make_encoders(shared)
    if rank > 0:
        with torch.no_grad():
            encoders[0].output.weight.add_(1.0)
    for encoder in encoders:
        distributed.broadcast_parameters(encoder)
    question_rows, passage_rows, positive_index = share_of(shares, rank)
    towers = [
        make_tower(encoders[0], QUESTIONS.select(question_rows), max_rows=2 + rank),
        make_tower(encoders[1], PASSAGES.select(passage_rows), max_rows=4 - rank, kept_graphs=rank),
    ]
    counts, parts, restore = [], [], count_collectives()

    def loss_fn(question_reps, passage_reps):
        excluded = excluded_pairs()[question_rows]
        parts.append(in_batch_nll(question_reps, passage_reps, positive_index, excluded=excluded))
        return parts[-1].loss

    def step():
        before = dict(calls)
        loss = cached_step(towers, loss_fn)
        reductions = distributed.sum_gradients(parameters_of(encoders))
        counts.append(({name: calls[name] - before[name] for name in calls}, reductions))
        return distributed.sum_over_processes(loss)

    calls = restore.calls
    try:
        history, weights = train(encoders, step, parameters_of(encoders))
    finally:
        restore()
    sizes = [(part.questions, part.candidates) for part in parts]
    correct = [int(distributed.sum_over_processes(part.correct)) for part in parts]
    return history, weights, counts, sizes, correct


def count_collectives():
    """Count every collective of torch.distributed from now on, until the result is called."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    calls = dict.fromkeys(COLLECTIVES, 0)

    def counted(name, *args, **kwargs):
        calls[name] += 1
        return originals[name](*args, **kwargs)

    for name in COLLECTIVES:
        setattr(dist, name, partial(counted, name))

    def restore():
        for name, original in originals.items():
            setattr(dist, name, original)

    restore.calls = calls
    return restore


def golden_loss(cases):
    """This rank's share of the recorded cases, and the gradients of its vectors."""
    found = []
    for case in cases:
        own = case["per_rank"][distributed.rank()]
        questions = torch.tensor(own["q"], requires_grad=True)
        passages = torch.tensor(own["ctx"], requires_grad=True)
        result = in_batch_nll(questions, passages, torch.tensor(own["positive_idx"]))
        result.loss.backward()
        loss = distributed.sum_over_processes(result.loss)
        correct = distributed.sum_over_processes(result.correct)
        found.append((loss, correct, questions.grad, passages.grad, result.questions))
    return found


def labels_of_b22():
    """Two questions with one hard negative each per rank; scores that tell the label's column."""
    width = 4 * distributed.world_size()
    columns = torch.eye(width, dtype=torch.float64)[4 * distributed.rank() :][:4]
    questions = torch.zeros(2, width, dtype=torch.float64, requires_grad=True)
    in_batch_nll(questions, columns, torch.tensor([0, 2])).loss.backward()
    return (questions.grad < 0).nonzero()[:, 1].tolist()  # only the label's column is raised


def everything(scenarios, cases):
    trained = [train_on_share(*scenario) for scenario in scenarios]
    return trained, golden_loss(cases), labels_of_b22()


@pytest.mark.parametrize(
    ("world_size", "scenarios"),
    [
        (2, [((6, 3), False), ((9, 0), False), ((0, 9), True)]),
        (3, [((5, 0, 4), False), ((1, 2, 6), True)]),
    ],
)
def test_unequal_shares_equal_the_joined_batch(world_size, scenarios):
    cases = [c for c in json.loads(GOLDEN.read_text())["cases"] if c["world_size"] == world_size]
    results = run_distributed(everything, world_size, scenarios, cases)
    for index, (_, shared) in enumerate(scenarios):
        check_training([trained[index] for trained, _, _ in results], shared)
    check_golden([golden for _, golden, _ in results], cases)
    columns = [column for _, _, labels in results for column in labels]
    assert columns == [0, 2, 4, 6, 8, 10][: 2 * world_size]


def check_training(per_rank, shared):
    one_history, one_weights = train_on_one(shared)
    for history, weights, counts, sizes, correct in per_rank:
        for (loss, gradients), (one_loss, one_gradients) in zip(history, one_history, strict=True):
            assert abs(loss - one_loss) < 1e-12 * one_loss
            assert largest_relative_error(gradients, one_gradients) < 1e-12
        assert largest_relative_error(weights, one_weights) < 1e-12
        # B36: the same bits on all ranks.
        same = zip(weights, per_rank[0][1], strict=True)
        assert all(torch.equal(own, first) for own, first in same)
        assert sizes == [(9, len(PASSAGES))] * 3
        assert correct == per_rank[0][4]
        # B34: three exchanges forward, one reduction of passage gradients, two for the parameters,
        # however many chunks a rank has and whether it has any rows.
        expected = {ALL_GATHER: 3, "all_reduce": 1 + 2}
        assert counts == [({**dict.fromkeys(COLLECTIVES, 0), **expected}, 2)] * 3


def check_golden(per_rank, cases):
    """DPR: every rank computes the loss of all questions, gradients only through its own vectors.

    Those gradients are right as they stand, and ours are the same. DPR's fault comes after: DDP
    averages the parameter gradients, which leaves 1 / world size of the right ones. Ours are added.
    """
    for index, case in enumerate(cases):
        assert case["gradients_equal_single_process"]
        for rank, recorded in enumerate(case["per_rank"]):
            loss, correct, grad_q, grad_ctx, questions = per_rank[rank][index]
            assert float(loss) == pytest.approx(recorded["loss"], rel=1e-5)
            assert int(correct) == recorded["correct"]
            assert questions == sum(len(own["q"]) for own in case["per_rank"])
            for found, name in ((grad_q, "grad_q"), (grad_ctx, "grad_ctx")):
                expected = torch.tensor(recorded[name])
                assert (found - expected).norm() <= 1e-5 * expected.norm()


def padded_rows(tokens, rows):
    return tokens.pad(rows, pad_token_id=0)


def train_ddp(shared):
    """Class GradCache on models in DDP, 6 and 9 passages in chunks of 4 (2 and 3 chunks)."""
    rank, reductions = distributed.rank(), []
    encoders = make_encoders(shared)
    wrapped = {encoder: DistributedDataParallel(encoder) for encoder in dict.fromkeys(encoders)}
    for model in wrapped.values():
        model.register_comm_hook(reductions, counting_hook)
    first, last, passages = [(0, 3, 6), (3, 8, 9)][rank]
    question_rows = torch.arange(first, last)
    start = 6 * rank
    passage_rows = torch.arange(start, start + passages)
    index = DDP_POSITIVES[first:last] - start

    def loss_fn(question_reps, passage_reps, positive_index):
        return in_batch_nll(
            question_reps, passage_reps, positive_index, gradient_reduction="mean"
        ).loss

    cache = GradCache([wrapped[encoder] for encoder in encoders], [2, 4], loss_fn)
    inputs = padded_rows(QUESTIONS, question_rows), padded_rows(PASSAGES, passage_rows)

    def step():
        reductions.append("step")
        loss = cache(*inputs, no_sync_except_last=True, positive_index=index)
        return distributed.sum_over_processes(loss) / 2

    history, _ = train(encoders, step, parameters_of(encoders))
    return history, reductions


def counting_hook(reductions, bucket):
    reductions.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)


DDP_POSITIVES = torch.tensor([0, 2, 5, 6, 7, 9, 12, 14])


def train_ddp_on_one(shared):
    encoders = make_encoders(shared)

    def step():
        loss = nll(
            encoders[0](**padded_rows(QUESTIONS, torch.arange(8))),
            encoders[1](**padded_rows(PASSAGES, torch.arange(15))),
            DDP_POSITIVES,
        )
        loss.backward()
        return loss.detach()

    return train(encoders, step, parameters_of(encoders))[0]


def both_ddp():
    return train_ddp(shared=False), train_ddp(shared=True)


def test_ddp_models_reduce_once_per_step():
    results = run_distributed(both_ddp, 2)
    for index, shared in enumerate((False, True)):
        one_history = train_ddp_on_one(shared)
        total = sum(p.numel() for p in make_encoder().parameters())
        for history, reductions in (result[index] for result in results):
            for (loss, found), (one_loss, expected) in zip(history, one_history, strict=True):
                assert abs(loss - one_loss) < 1e-12 * one_loss
                assert largest_relative_error(found, expected) < 1e-12
            # One reduction of all parameters per model and step, also for a model used twice.
            per_step = split_at(reductions, "step")
            assert [sum(sizes) for sizes in per_step] == [total if shared else 2 * total] * 3


def split_at(values, marker):
    groups = []
    for value in values:
        if value == marker:
            groups.append([])
        else:
            groups[-1].append(value)
    return groups
