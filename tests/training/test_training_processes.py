"""Two processes train as one does; starting them takes most of the time, so they do all cases."""

import pytest
import torch
from distributed_run import run_distributed
from training_parts import examples, largest_difference, make_model, parameters_of, train

from gc_dpr.distributed import rank

# name: (questions, options). With batches of 5 the shares are 2 and 3; of 7 questions in batches of
# 3 the last batch has one question: rank 0 then has none.
CASES = {
    "unequal shares": (10, {"batch_size": 5, "epochs": 2}),
    "a process without rows": (7, {"batch_size": 3, "epochs": 1, "chunk_rows": 1}),
    "last batch dropped": (7, {"batch_size": 4, "epochs": 2, "last_batch": "drop"}),
    "one question at a time": (3, {"batch_size": 1}),
    "clipped": (8, {"batch_size": 8, "epochs": 2, "max_grad_norm": 0.1, "temperature": 0.5}),
    "shared encoder": (6, {"batch_size": 5, "shared": True}),
    "nothing masked": (6, {"batch_size": 6, "mask_known_positives": False}),
}
SUMMED = (
    "loss", "in_batch_accuracy", "candidates", "questions", "grad_norm", "learning_rate",
    "masked_negatives", "fewer_negatives", "passed_over_negatives", "truncated_questions",
)  # fmt: skip


def one_case(folder, questions, *, shared=False, **options):
    """Records, the parameters after each step, and the parameters at the end."""
    model = make_model(folder, shared=shared)
    if rank() > 0:  # rank 0's parameters are the ones that count
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    states = []

    def remember(record):
        # bit for bit, so that a drift between the processes cannot hide
        states.append([value.clone() for value in parameters_of(model).values()])

    _, records = train(
        model, examples(questions), after_step=remember, learning_rate=2e-3, **options
    )
    return records, states, parameters_of(model)


def all_cases(folder):
    return {
        name: one_case(folder, questions, **options) for name, (questions, options) in CASES.items()
    }


@pytest.fixture(scope="module")
def one_process(tiny_encoder_dir):
    return all_cases(tiny_encoder_dir)


@pytest.fixture(scope="module")
def two_processes(tiny_encoder_dir):
    return run_distributed(all_cases, 2, tiny_encoder_dir)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(one_process, two_processes, name):
    """TRAPS B33, B22: the same losses, gradient norms and parameters, hard negatives and all."""
    records, _, end = one_process[name]
    for other_records, _, other_end in (process[name] for process in two_processes):
        assert len(records) == len(other_records) > 0
        found = [[record[key] for key in SUMMED] for record in other_records]
        expected = [[record[key] for key in SUMMED] for record in records]
        torch.testing.assert_close(
            torch.tensor(found, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-8, atol=1e-8,
        )  # fmt: skip
        assert largest_difference(end, other_end) < 1e-8


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_parameters_are_bit_identical_after_every_step(two_processes, name):
    """TRAPS B36."""
    (_, first, _), (_, second, _) = (process[name] for process in two_processes)
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_cases_are_what_they_say(one_process):
    assert [r["questions"] for r in one_process["a process without rows"][0]] == [3, 3, 1]
    assert [r["questions"] for r in one_process["last batch dropped"][0]] == [4, 4]
    assert all(record["grad_norm"] > 0.1 for record in one_process["clipped"][0])
    assert sum(r["masked_negatives"] for r in one_process["unequal shares"][0]) > 0
    moved = one_process["unequal shares"][1]
    assert any(not torch.equal(a, b) for a, b in zip(moved[0], moved[-1], strict=True))
