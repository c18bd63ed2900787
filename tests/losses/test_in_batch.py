"""in_batch_nll on one process: the values, the checks, the counts.

Its blocks: test_blockwise.py. Several processes: test_loss_processes.py and the whole step in
tests/grad_cache/test_several_processes.py.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from gc_dpr.losses import in_batch_nll

CASES = json.loads((Path(__file__).parent.parent / "golden" / "biencoder_loss.json").read_text())


@pytest.mark.parametrize("case", CASES["loss_cases"], ids=lambda case: case["name"])
def test_golden_loss_of_dpr(case):
    """DPR's loss_scale multiplies the loss; DPR ignores a scale of 0, which is its fault."""
    scale = case["loss_scale"] or 1.0
    questions = torch.tensor(case["q"], requires_grad=True)
    passages = torch.tensor(case["ctx"], requires_grad=True)
    result = in_batch_nll(questions, passages, torch.tensor(case["positive_idx_per_question"]))
    (result.loss * scale).backward()
    assert float(result.loss.detach()) * scale == pytest.approx(case["loss"], rel=1e-5)
    assert int(result.correct) == case["correct"]
    assert (result.questions, result.candidates) == (len(case["q"]), len(case["ctx"]))
    for found, name in ((questions.grad, "grad_q"), (passages.grad, "grad_ctx")):
        expected = torch.tensor(case[name])
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def by_hand(questions, passages, positives, temperature=1.0, excluded=None):
    """Mean of -log(exp(s_pos) / sum exp(s_j)) in plain Python floats."""
    losses = []
    for i, question in enumerate(questions.tolist()):
        scores = [
            sum(a * b for a, b in zip(question, passage, strict=True)) / temperature
            for passage in passages.tolist()
        ]
        kept = [s for j, s in enumerate(scores) if excluded is None or not excluded[i][j]]
        losses.append(math.log(sum(map(math.exp, kept))) - scores[positives[i]])
    return sum(losses) / len(losses)


def reps_of(count, dim=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=dtype)


QUESTIONS, PASSAGES = reps_of(3, seed=1), reps_of(6, seed=2)
POSITIVES = torch.tensor([0, 3, 5])  # B7: 2, 1 and 0 hard negatives


@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_against_a_loop(temperature):
    result = in_batch_nll(QUESTIONS, PASSAGES, POSITIVES, temperature=temperature)
    expected = by_hand(QUESTIONS, PASSAGES, POSITIVES.tolist(), temperature)
    assert float(result.loss) == pytest.approx(expected, rel=1e-12)
    assert result.loss.dtype == torch.float64
    assert int(result.correct) == sum(
        (PASSAGES @ question).argmax() == positive
        for question, positive in zip(QUESTIONS, POSITIVES, strict=True)
    )


def test_excluded_columns_are_no_candidates_and_get_no_gradient():
    excluded = torch.zeros(3, 6, dtype=torch.bool)
    excluded[0, 3] = excluded[0, 5] = excluded[2, 3] = excluded[1, 3 - 1] = True
    excluded[:, 4] = True
    passages = PASSAGES.clone().requires_grad_()
    result = in_batch_nll(QUESTIONS, passages, POSITIVES, excluded=excluded)
    expected = by_hand(QUESTIONS, PASSAGES, POSITIVES.tolist(), excluded=excluded.tolist())
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-12)
    result.loss.backward()
    assert passages.grad[4].abs().max() == 0
    assert passages.grad[0].abs().max() > 0
    assert result.candidates == 6


def test_shared_positive_can_be_learned_when_the_copy_is_excluded():
    """B19: without the mask the loss never falls below ln 2."""
    questions = 100 * torch.eye(4)[:2].sum(0).repeat(2, 1)
    passages = questions / 100
    index = torch.tensor([0, 1])
    unmasked = in_batch_nll(questions, passages, index)
    masked = in_batch_nll(questions, passages, index, excluded=~torch.eye(2, dtype=torch.bool))
    assert float(unmasked.loss) == pytest.approx(math.log(2))
    assert float(masked.loss) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_lifted_to_float32(dtype):
    questions, passages = QUESTIONS.to(dtype), PASSAGES.to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = in_batch_nll(questions, passages, POSITIVES)
    assert result.loss.dtype == torch.float32
    expected = by_hand(questions.double(), passages.detach().double(), POSITIVES.tolist())
    assert float(result.loss.detach()) == pytest.approx(expected, rel=1e-5)
    result.loss.backward()
    assert passages.grad.dtype == dtype


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_ten_thousand_do_not_overflow(sign):
    questions = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    passages = torch.tensor([[100.0], [-100.0]])
    index = torch.tensor([0, 1] if sign > 0 else [1, 0])
    result = in_batch_nll(questions, passages, index)
    result.loss.backward()
    assert float(result.loss.detach()) == (0.0 if sign > 0 else 20000.0)
    assert torch.isfinite(questions.grad).all()


@pytest.mark.parametrize("as_function", [False, True])
def test_counts_of_excluded_pairs_and_lone_questions(as_function):
    dense = torch.tensor(
        [
            [False, True, True, True, True, True],  # lone
            [True, False, False, False, False, True],
            [True, True, False, True, True, False],
        ]
    )
    excluded = (lambda rows, columns: dense[rows, columns]) if as_function else dense
    for block in (1, 2, 100):
        result = in_batch_nll(
            QUESTIONS,
            PASSAGES,
            POSITIVES,
            excluded=excluded,
            question_block=block,
            passage_block=block,
        )
        assert (int(result.excluded_pairs), int(result.lone_questions)) == (11, 1)
        assert result.excluded_pairs.dtype == result.lone_questions.dtype == torch.int64
    assert in_batch_nll(QUESTIONS, PASSAGES, POSITIVES)[-2:] == (0, 0)


def test_a_lone_question_has_no_loss_and_no_gradient():
    questions = QUESTIONS[:1].clone().requires_grad_()
    for passages, excluded in (
        (PASSAGES[:1], None),
        (PASSAGES[:3], torch.tensor([[False, True, True]])),
    ):
        result = in_batch_nll(questions, passages, torch.tensor([0]), excluded=excluded)
        result.loss.backward()
        assert (float(result.loss.detach()), int(result.lone_questions)) == (0.0, 1)
        assert questions.grad.abs().max() == 0


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_can_be_learned(shape, dtype):
    temperature = torch.full(shape, 0.5, dtype=dtype, requires_grad=True)
    result = in_batch_nll(QUESTIONS, PASSAGES, POSITIVES, temperature=temperature)
    assert result.loss.dtype == torch.float64
    assert float(result.loss.detach()) == pytest.approx(
        by_hand(QUESTIONS, PASSAGES, POSITIVES.tolist(), 0.5), rel=1e-12
    )
    result.loss.backward()
    above, below = (
        by_hand(QUESTIONS, PASSAGES, POSITIVES.tolist(), 0.5 + shift) for shift in (1e-5, -1e-5)
    )
    assert temperature.grad.shape == shape
    assert float(temperature.grad) == pytest.approx((above - below) / 2e-5, rel=1e-6)


def test_loss_that_is_not_finite_is_shown():
    questions = QUESTIONS.clone()
    questions[1, 0] = float("nan")
    assert in_batch_nll(questions, PASSAGES, POSITIVES).loss.isnan()


def test_one_candidate_is_the_callers_check():
    result = in_batch_nll(QUESTIONS[:1], PASSAGES[:1], torch.tensor([0]))
    assert (float(result.loss), int(result.correct), result.candidates) == (0.0, 1, 1)


def test_mean_and_sum_are_one_on_one_process():
    losses = [
        in_batch_nll(QUESTIONS, PASSAGES, POSITIVES, gradient_reduction=reduction).loss
        for reduction in ("sum", "mean")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question_reps": QUESTIONS[0]}, r"question_reps must be \(N, D\), found shape \(4,\)"),
        ({"passage_reps": PASSAGES[None]}, r"passage_reps must be \(N, D\)"),
        ({"passage_reps": PASSAGES[:, :3]}, "found 4 and 3"),
        ({"positive_index": POSITIVES[:2]}, r"int64 of shape \(3,\), found torch.int64 of shape"),
        ({"positive_index": POSITIVES.int()}, "found torch.int32"),
        ({"positive_index": torch.tensor([0, 3, 6])}, "in 0..5, .* from 0 to 6"),
        ({"positive_index": torch.tensor([-1, 3, 5])}, "from -1 to 5"),
        ({"temperature": 0.0}, "above 0, found 0.0"),
        ({"temperature": math.nan}, "found nan"),
        ({"temperature": math.inf}, "found inf"),
        ({"temperature": torch.tensor(-1.0)}, "above 0, found -1.0"),
        ({"temperature": torch.ones(2)}, r"one number, found shape \(2,\)"),
        ({"gradient_reduction": "average"}, "'sum' or 'mean'"),
        ({"question_block": 0}, "question_block must be at least 1, found 0"),
        ({"passage_block": -1}, "passage_block must be at least 1, found -1"),
        ({"excluded": torch.zeros(3, 6)}, "excluded must be bool"),
        ({"excluded": torch.zeros(3, 5, dtype=torch.bool)}, r"shape \(3, 6\)"),
        ({"excluded": torch.arange(18).view(3, 6) == 9}, r"itself of questions \[1\]"),
        (
            {"question_reps": QUESTIONS[:0], "positive_index": POSITIVES[:0]},
            "a question on at least one process",
        ),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {
        "question_reps": QUESTIONS,
        "passage_reps": PASSAGES,
        "positive_index": POSITIVES,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        in_batch_nll(**arguments)
