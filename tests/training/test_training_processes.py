"""1, 2, 3 and 4 processes train as a plain loop over the undivided batch does.

Starting processes takes most of the time, so each number of them is started once for all checks.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed_run import run_distributed
from training_parts import (
    CPU,
    Records,
    make_batches,
    make_model,
    make_trainer,
    parameters_of,
)
from undivided import batch_loss, gradients_of, largest_error, questions, watch_collectives

from gc_dpr.data.sampler import epoch_batches
from gc_dpr.distributed import rank, sum_gradients, sum_over_processes
from gc_dpr.training.batch_step import ChunkBudget, batch_gradients
from gc_dpr.training.optim import build_optimizer

pytestmark = pytest.mark.distributed

SEED, STEPS, LEARNING_RATE = 3, 3, 2e-3
# torch 2.13 renamed it.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
# name: what is not as usual. Batches of 7 are shares of 3 and 4, of 2, 2 and 3, or of 1, 2, 2 and
# 2; batches of 2 leave two of four processes without a question.
CASES = {
    "unequal shares": {"batch_size": 7},
    "processes without rows": {"batch_size": 2},
    "one question at a time": {"batch_size": 1},
    "clipped": {"batch_size": 7, "max_grad_norm": 0.1, "temperature": 0.5},
    "one encoder": {"batch_size": 7, "shared": True},
    "nothing masked": {"batch_size": 7, "mask_known_positives": False},
}
METRICS = ("loss", "in_batch_accuracy", "candidates", "questions", "grad_norm", "learning_rate")
COUNTS = (
    "masked_negatives", "fewer_negatives", "passed_over_negatives", "truncated_questions",
    "truncated_passages",
)  # fmt: skip
# How the processes cut their shares: in tokens, in rows, in one piece; each keeps other graphs.
BUDGETS = [
    ChunkBudget(10**6, 2, 1),
    ChunkBudget(40, None, 0),
    ChunkBudget(10**6, None, 0),
    ChunkBudget(10**6, 1, 2),
]


def plain_model(folder, shared):
    """AdamW divides by the size of a gradient, and so blows up the rounding of tiny ones."""
    model = make_model(folder, shared=shared)
    optimizer = build_optimizer(model, learning_rate=LEARNING_RATE, weight_decay=0.1, epsilon=1e-4)
    return model, optimizer


def train_undivided(folder, *, batch_size, shared=False, max_grad_norm=2.0, **options):
    """The plain loop: what each step measured, its gradients, and the parameters after it."""
    model, optimizer = plain_model(folder, shared)
    data, steps = questions(), []
    for step, rows in enumerate(epoch_batches(21, batch_size=batch_size, seed=SEED, epoch=0)):
        if step == STEPS:
            break
        rate = LEARNING_RATE * (STEPS - step) / STEPS  # no warm-up, linear to 0
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss, accuracy, candidates = batch_loss(model, [data[row] for row in rows], **options)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))
        optimizer.step()
        measured = [loss.item(), accuracy, candidates, len(rows), norm, rate]
        steps.append((measured, gradients_of(model), parameters_of(model)))
    return steps


def train_share(folder, calls, *, batch_size, shared=False, **options):
    """The Trainer on this process's share; as above, and the collectives of each step."""
    model, optimizer = plain_model(folder, shared)
    if rank() > 0:  # rank 0's parameters are the ones that count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    steps, before = [], len(calls)

    def remember(record):
        nonlocal before
        measured = [record[name] for name in METRICS], [record[name] for name in COUNTS]
        steps.append((*measured, gradients_of(model), parameters_of(model), calls[before:]))
        before = len(calls)

    loader, sampler = make_batches(model, questions(), batch_size=batch_size, seed=SEED)
    trainer = make_trainer(model, total_steps=STEPS, optimizer=optimizer, **options)
    trainer.question_budget = BUDGETS[rank()]
    trainer.passage_budget = replace(BUDGETS[rank()], kept=BUDGETS[-1 - rank()].kept)
    trainer.run(loader, sampler, epochs=1, total_steps=STEPS, log=Records(remember))
    return steps


def accumulate_share(folder, calls):
    """Gradients and loss of two batches, added up once."""
    model, _ = plain_model(folder, shared=False)
    loader, sampler = make_batches(model, questions(), batch_size=7, seed=SEED)
    sampler.set_epoch(0)
    loss, chunks = torch.zeros((), dtype=torch.float64), 0
    for _, batch in zip(range(2), loader, strict=False):
        budget = BUDGETS[rank()]
        outcome = batch_gradients(
            model, batch, question_budget=budget, passage_budget=budget, device=CPU
        )
        loss, chunks = loss + outcome.loss, chunks + outcome.chunks
    before = len(calls)
    sum_gradients(model.parameters())
    summing = calls[before:]
    return sum_over_processes(loss), gradients_of(model), summing, chunks


def accumulate_undivided(folder):
    model, _ = plain_model(folder, shared=False)
    data, total = questions(), 0.0
    for rows in epoch_batches(21, batch_size=7, seed=SEED, epoch=0)[:2]:
        loss = batch_loss(model, [data[row] for row in rows])[0]
        loss.backward()
        total += loss.item()
    return total, gradients_of(model)


def everything(folder):
    calls = watch_collectives()
    trained = {name: train_share(folder, calls, **options) for name, options in CASES.items()}
    return trained, accumulate_share(folder, calls)


@pytest.fixture(scope="module")
def undivided(tiny_encoder_dir):
    return {name: train_undivided(tiny_encoder_dir, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def processes(request, tiny_encoder_dir):
    """What each of so many processes found."""
    return run_distributed(everything, request.param, tiny_encoder_dir, timeout=100)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_trains_as_one(undivided, processes, name):
    """TRAPS B22, B33: the same loss, metrics, gradients and parameters."""
    for trained, _ in processes:
        assert len(trained[name]) == len(undivided[name]) == STEPS
        for found, expected in zip(trained[name], undivided[name], strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-12, abs=1e-15)
            assert largest_error(found[2], expected[1]) < 1e-12
            assert largest_error(found[3], expected[2]) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_processes_stay_bit_identical(processes, name):
    """TRAPS B36: after every step; the same counts, too."""
    first = processes[0][0][name]
    for trained, _ in processes:
        for found, expected in zip(trained[name], first, strict=True):
            assert found[:2] == expected[:2]
            assert all(torch.equal(found[3][key], expected[3][key]) for key in expected[3])


@pytest.mark.parametrize("name", CASES)
def test_one_reduction_per_parameter_and_step(processes, name):
    """TRAPS B34: whatever the chunks, all processes exchange the same, parameters once."""
    for trained, _ in processes:
        for step, (_, _, _, parameters, calls) in enumerate(trained[name]):
            numbers = sum(value.numel() for value in parameters.values())
            own = Counter(calls)
            if len(processes) == 1:
                assert not own
                continue
            assert own == Counter(processes[0][0][name][step][4])
            assert [call for call in own if call[1] == numbers] == [("all_reduce", numbers)]
            assert own["all_reduce", numbers] == 1
            # the rest are counts, passages and their gradients: no second way for parameters
            assert sum(size for call, size in calls if call == "all_reduce") < 1.2 * numbers
            if step > 0:  # before the first, rank 0 sends its parameters
                assert {call for call, _ in own} <= {ALL_GATHER, "all_reduce"}
                assert own.total() <= 12, own


def test_accumulated_batches(tiny_encoder_dir, processes):
    total, expected = accumulate_undivided(tiny_encoder_dir)
    parameters = sum(value.numel() for value in expected.values())
    for _, (loss, gradients, calls, _) in processes:
        assert float(loss) == pytest.approx(total, rel=1e-12)
        assert largest_error(gradients, expected) < 1e-12
        sizes = [size for _, size in calls]
        assert sizes == ([] if len(processes) == 1 else [len(expected), parameters])
    if len(processes) == 4:
        assert len({chunks for _, (_, _, _, chunks) in processes}) > 2


def test_the_cases_are_what_they_say(undivided, processes):
    assert [step[0][3] for step in undivided["unequal shares"]] == [7, 7, 7]
    assert [step[0][3] for step in undivided["processes without rows"]] == [2, 2, 2]
    assert all(step[0][4] > 0.1 for step in undivided["clipped"])
    trained = processes[0][0]
    masked = sum(step[1][0] for step in trained["unequal shares"])
    assert masked > 0
    assert sum(step[1][0] for step in trained["nothing masked"]) == 0
    assert [step[0][0] for step in trained["nothing masked"]] != [
        step[0][0] for step in trained["unequal shares"]
    ]
    assert any(0 < step[0][1] < 1 for steps in undivided.values() for step in steps)
