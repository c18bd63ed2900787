"""in_batch_nll in small blocks on three processes with unequal shares, against the dense loss."""

import pytest
import torch
from dense_loss import dense_nll, random_case, relative_error
from distributed_run import run_distributed

from gc_dpr import distributed
from gc_dpr.losses import in_batch_nll

QUESTIONS, PASSAGES = (4, 0, 5), (6, 3, 11)  # of each process


def joined_batch():
    """Every question's positive is on its own process."""
    questions, passages, _, mask = random_case(1, sum(QUESTIONS), sum(PASSAGES), masked=0.3)
    labels = torch.tensor([0, 2, 2, 5, 9, 19, 12, 10, 18])
    mask[torch.arange(len(labels)), labels] = False
    mask[7] = True  # a lone question
    mask[7, labels[7]] = False
    return questions, passages, labels, mask


def share_of_loss(blocks, as_function):
    rank = distributed.rank()
    questions, passages, labels, mask = joined_batch()
    rows, columns = (
        slice(sum(counts[:rank]), sum(counts[: rank + 1])) for counts in (QUESTIONS, PASSAGES)
    )
    own = [
        reps.detach()[part].requires_grad_()
        for reps, part in ((questions, rows), (passages, columns))
    ]
    mask = mask[rows]
    result = in_batch_nll(
        *own,
        labels[rows] - columns.start,
        temperature=0.5,
        excluded=(lambda r, c: mask[r, c]) if as_function else mask,
        question_block=blocks[0],
        passage_block=blocks[1],
    )
    result.loss.backward()
    numbers = result.loss, result.correct, result.excluded_pairs, result.lone_questions
    summed = [distributed.sum_over_processes(number) for number in numbers]
    return [float(x) for x in summed], result.questions, result.candidates, [x.grad for x in own]


def all_cases(cases):
    return [share_of_loss(*case) for case in cases]


@pytest.mark.distributed
def test_shares_in_blocks_add_up_to_the_dense_loss():
    questions, passages, labels, mask = joined_batch()
    expected = dense_nll(questions, passages, labels, mask, 0.5).mean()
    expected.backward()
    scores = (questions @ passages.T).masked_fill(mask, -torch.inf)
    correct = int((scores.argmax(1) == labels).sum())
    cases = [((2, 3), True), ((1, 100), False), ((None, None), True)]
    per_rank = run_distributed(all_cases, 3, cases)
    for results in zip(*per_rank, strict=True):
        for summed, count, candidates, _ in results:
            assert summed[0] == pytest.approx(float(expected.detach()), rel=1e-12)
            assert summed[1:] == [correct, int(mask.sum()), 1]
            assert (count, candidates) == (9, 20)
        for side, reps in enumerate((questions, passages)):
            found = torch.cat([gradients[side] for *_, gradients in results])
            assert relative_error(found, reps.grad) < 1e-12


def wrong_on_rank_1():
    reps = torch.eye(3)
    positives = torch.tensor([0, 1, 7]) if distributed.rank() == 1 else torch.arange(3)
    try:
        in_batch_nll(reps, reps, positives)
    except ValueError as error:
        return str(error)
    return "no error"


def test_wrong_arguments_on_one_process_raise_on_all():
    """Else the others would wait for it forever."""
    other, own = run_distributed(wrong_on_rank_1, 2, timeout=30)
    assert "positive_index must lie in 0..2" in own
    assert "1 other process" in other
