"""The loss in blocks against the dense one: values, gradients, extremes, memory."""

import math

import pytest
import torch
from dense_loss import dense_nll, random_case, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

from gc_dpr.losses import in_batch_nll
from gc_dpr.losses.blockwise import blockwise_nll

BLOCKS = [(1, 1), (3, 7), (7, 3), (1, 100), (100, 1), (4, 13), (100, 100), (None, None)]


def sized(blocks):
    return {"question_block": blocks[0], "passage_block": blocks[1]}


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("masking", ["nothing", "tensor", "function"])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_equals_the_dense_loss(blocks, masking, temperature):
    questions, passages, labels, mask = random_case(1, 9, 26, masked=0.3)
    mask = None if masking == "nothing" else mask
    excluded = (lambda rows, columns: mask[rows, columns]) if masking == "function" else mask
    result = in_batch_nll(
        questions, passages, labels, temperature=temperature, excluded=excluded, **sized(blocks)
    )
    expected = dense_nll(questions, passages, labels, mask, temperature).mean()
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    found = torch.autograd.grad(result.loss, (questions, passages))
    for ours, dense in zip(
        found, torch.autograd.grad(expected, (questions, passages)), strict=True
    ):
        assert relative_error(ours, dense) < 1e-12
    scores = (questions @ passages.T).detach()
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf)
        assert result.excluded_pairs == mask.sum()
    assert result.correct == (scores.argmax(1) == labels).sum()


@pytest.mark.parametrize("seed", range(40))
def test_random_shapes_masks_and_incoming_gradients(seed):
    draw = torch.Generator().manual_seed(seed)

    def integer(high):
        return int(torch.randint(1, high, (1,), generator=draw))

    questions, passages, labels, mask = random_case(
        seed,
        integer(12),
        integer(30),
        integer(6),
        masked=float(torch.rand((), generator=draw)),
        scale=[0.1, 1.0, 10.0][seed % 3],
    )
    incoming = torch.randn(len(labels), generator=draw, dtype=torch.float64)
    result = blockwise_nll(
        questions, passages, labels, excluded=mask, **sized((integer(14), integer(34)))
    )
    expected = dense_nll(questions, passages, labels, mask)
    torch.testing.assert_close(result.nll, expected, rtol=1e-12, atol=1e-13)
    pairs = [
        torch.autograd.grad(nll, (questions, passages), incoming) for nll in (result.nll, expected)
    ]
    for ours, dense in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-11, atol=1e-12)
    dense_scores = (questions @ passages.T).masked_fill(mask, -math.inf)
    assert torch.equal(result.correct, dense_scores.argmax(1) == labels)
    assert torch.equal(result.excluded, mask.sum(1))


@pytest.mark.parametrize("blocks", [(2, 3), (100, 100)])
def test_gradcheck(blocks):
    questions, passages, labels, mask = random_case(3, 5, 8, 3, masked=0.2)

    def nll(*reps):
        return blockwise_nll(*reps, labels, excluded=mask, **sized(blocks)).nll

    assert torch.autograd.gradcheck(nll, (questions, passages))


@pytest.mark.parametrize("blocks", [(2, 3), (100, 100)])
@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_gradient_goes_only_where_it_is_needed(blocks, needs):
    questions, passages, labels, _ = random_case(4, 5, 8)
    expected = torch.autograd.grad(
        dense_nll(questions, passages, labels).sum(), (questions, passages)
    )
    leaves = [
        reps.detach().requires_grad_(need)
        for reps, need in zip((questions, passages), needs, strict=True)
    ]
    blockwise_nll(*leaves, labels, **sized(blocks)).nll.sum().backward()
    for leaf, need, dense in zip(leaves, needs, expected, strict=True):
        assert (leaf.grad is not None) == need
        assert not need or relative_error(leaf.grad, dense) < 1e-12


@pytest.mark.parametrize("blocks", [(2, 3), (100, 100)])
def test_backward_may_run_twice_on_a_kept_graph_but_not_be_differentiated(blocks):
    questions, passages, labels, _ = random_case(5, 5, 8)
    loss = blockwise_nll(questions, passages, labels, **sized(blocks)).nll.sum()
    once, again = (torch.autograd.grad(loss, passages, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(loss, questions, create_graph=True)


@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (100, 100)])
@pytest.mark.parametrize(("size", "dtype"), [(1e4, torch.float32), (1e30, torch.float32)])
def test_huge_scores(blocks, size, dtype):
    """Scores +size or -size; the label has the highest, the lowest, one of two highest."""
    questions = torch.full((3, 1), math.sqrt(size), dtype=dtype, requires_grad=True)
    passages = torch.tensor([[1.0], [-1.0], [-1.0], [1.0]], dtype=dtype) * math.sqrt(size)
    passages.requires_grad_()
    excluded = torch.zeros(3, 4, dtype=torch.bool)
    excluded[:2, 3] = True  # for the first two only one passage has the highest score
    labels = torch.tensor([0, 1, 3])
    result = blockwise_nll(questions, passages, labels, excluded=excluded, **sized(blocks))
    highest = float((questions[0] * passages[0]).detach())
    assert result.nll.tolist() == [0.0, 2 * highest, pytest.approx(math.log(2))]
    assert result.correct.tolist() == [True, False, False]
    result.nll.sum().backward()
    assert torch.isfinite(questions.grad).all()
    assert torch.isfinite(passages.grad).all()
    # question 0: none; question 1: from 1 to 0; question 2: half from 0 to 3
    step = float(questions[0].detach())
    assert passages.grad[:, 0].tolist() == pytest.approx([1.5 * step, -step, 0.0, -0.5 * step])


@pytest.mark.parametrize("blocks", [(1, 1), (2, 3), (3, 4), (5, 20)])
@pytest.mark.parametrize("left", [True, False])
def test_whole_blocks_excluded(blocks, left):
    """Of 16 passages only the last (or first) two count, so that many blocks are empty."""
    questions, passages, labels, mask = random_case(6, 5, 16)
    kept = slice(14, 16) if left else slice(0, 2)
    labels = torch.tensor([0, 1, 0, 1, 1]) + kept.start
    mask[:] = True
    mask[:, kept] = False
    result = blockwise_nll(questions, passages, labels, excluded=mask, **sized(blocks))
    expected = dense_nll(questions, passages, labels, mask)
    torch.testing.assert_close(result.nll, expected, rtol=1e-12, atol=1e-13)
    assert result.excluded.tolist() == [14] * 5
    result.nll.sum().backward()
    assert torch.isfinite(questions.grad).all()
    outside = torch.ones(16, dtype=torch.bool)
    outside[kept] = False
    assert passages.grad[outside].abs().max() == 0
    assert passages.grad[kept].abs().min() > 0


@pytest.mark.parametrize("blocks", [(1, 1), (2, 3), (100, 100)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_returned_as_it_is(blocks, value, side):
    questions, passages, labels, _ = random_case(7, 4, 9)
    with torch.no_grad():
        (questions, passages)[side][2, 0] = value
    result = blockwise_nll(questions, passages, labels, **sized(blocks))
    expected = dense_nll(questions, passages, labels)
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(result.nll), finite)
    torch.testing.assert_close(result.nll[finite], expected[finite], rtol=1e-12, atol=1e-13)
    assert not torch.isfinite(in_batch_nll(questions, passages, labels, **sized(blocks)).loss)


@pytest.mark.parametrize("blocks", [(1, 1), (2, 2), (2, 3), (100, 100)])
def test_the_first_of_equal_scores_counts_as_the_highest(blocks):
    scores = torch.tensor([[1.0, 3, 3, 0, 3], [3, 3, 3, 3, 3], [0, 1, 2, 2, 1]])
    for columns in torch.cartesian_prod(*[torch.arange(5)] * 3)[::7]:
        correct = blockwise_nll(torch.eye(3), scores.T, columns, **sized(blocks)).correct
        assert torch.equal(correct, scores.argmax(1) == columns)


def test_no_questions_still_give_a_gradient():
    questions, passages, labels, _ = random_case(8, 4, 6)
    with torch.no_grad():
        none, labels = questions[:0], labels[:0]
    none.requires_grad_()
    blockwise_nll(none, passages, labels).nll.sum().backward()
    assert none.grad.shape == (0, 5)
    assert torch.equal(passages.grad, torch.zeros_like(passages))


@pytest.mark.parametrize("blocks", [(2, 3), (100, 100)])
def test_autocast_around_both_passes_changes_nothing(blocks):
    questions, passages, labels, _ = random_case(9, 5, 8)
    reps = [x.detach().float().requires_grad_() for x in (questions, passages)]
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = blockwise_nll(*reps, labels, **sized(blocks)).nll.sum()
            gradients.append(torch.autograd.grad(loss, reps))
    assert all(torch.equal(off, on) for off, on in zip(*gradients, strict=True))


class Largest(TorchDispatchMode):
    """Notes the largest number of elements of any tensor that an operation gives."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else (result,)
        sizes = [x.numel() for x in results if isinstance(x, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def test_no_tensor_is_larger_than_a_block_or_the_inputs():
    questions, passages, labels, _ = random_case(10, 400, 600, 4)
    asked = []

    def excluded(rows, columns):
        asked.append((rows, columns))
        columns_of_block = torch.arange(columns.start, columns.stop)
        own = columns_of_block == labels[rows, None]
        return (columns_of_block % 3 == 0) & ~own

    kept = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(x.numel()) or x, lambda x: x
        ),
    ):
        loss = in_batch_nll(
            questions,
            passages,
            labels,
            temperature=0.7,
            excluded=excluded,
            question_block=30,
            passage_block=80,
        ).loss
        loss.backward()
    inputs = 600 * 4
    assert largest.elements <= max(30 * 80, inputs)
    assert max(kept) <= inputs
    assert len(asked) == 2 * 14 * 8  # each block once per pass
    assert all(c.stop - c.start <= 80 and r.stop - r.start <= 30 for r, c in asked)
    with Largest() as largest:
        dense_nll(questions, passages, labels).sum()
    assert largest.elements == 400 * 600  # the dense loss is seen by the same means


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (lambda r, c: None, TypeError, "must return a tensor, found NoneType"),
        (lambda r, c: torch.zeros(2, 3), ValueError, "bool of shape .2, 3.*found torch.float32"),
        (lambda r, c: torch.zeros(3, 2) > 1, ValueError, r"bool of shape \(2, 3\).*\(3, 2\)"),
        (lambda r, c: torch.zeros(1, 1) > 1, ValueError, r"bool of shape \(2, 3\).*\(1, 1\)"),
        (
            lambda r, c: torch.arange(c.start, c.stop).expand(r.stop - r.start, -1) == 4,
            ValueError,
            r"the positive itself of questions \[1, 3\]: a label column can never be excluded",
        ),
    ],
)
def test_wrong_functions(block, error, message):
    questions, passages, _, _ = random_case(11, 4, 6)
    labels = torch.tensor([0, 4, 2, 4])
    with pytest.raises(error, match=message):
        blockwise_nll(questions, passages, labels, excluded=block, **sized((2, 3)))


def test_dtypes_must_agree():
    questions, passages, labels, _ = random_case(12, 4, 6)
    with pytest.raises(ValueError, match=r"same dtype, found torch.float32 and torch.float64"):
        blockwise_nll(questions.float(), passages, labels)


@pytest.mark.parametrize("labels", [[0, -1, 1], [0, 3, 1]])
def test_labels_that_are_no_columns_are_refused(labels):
    with pytest.raises(ValueError, match=r"labels must be columns, 0\.\.2"):
        blockwise_nll(torch.eye(3), torch.eye(3), torch.tensor(labels))
    with pytest.raises(ValueError, match="int64"):
        blockwise_nll(torch.eye(3), torch.eye(3), torch.tensor([0, 1, 2], dtype=torch.int32))


def test_half_precision_is_refused():
    reps = torch.eye(3).half()
    with pytest.raises(ValueError, match="float32 or float64"):
        blockwise_nll(reps, reps, torch.arange(3))
