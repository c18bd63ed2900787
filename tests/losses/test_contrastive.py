"""The package's loss objects against cross entropy, on one and on several processes."""

import pytest
import torch
from distributed_run import run_distributed
from torch.nn import functional as F

from gc_dpr import distributed
from gc_dpr.losses.contrastive import DistributedContrastiveLoss, SimpleContrastiveLoss

BOTH = [SimpleContrastiveLoss, DistributedContrastiveLoss]


def random_reps(questions, passages, dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, dim, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (questions, passages)
    ]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("negatives", [0, 2])
def test_against_cross_entropy(kind, reduction, negatives):
    x, y = random_reps(4, 4 * (1 + negatives))
    weights = torch.arange(1.0, 5.0) if reduction == "none" else torch.tensor(1.0)
    found = []
    for loss in (
        kind(negatives)(x, y, reduction=reduction),
        F.cross_entropy(x @ y.T, torch.arange(4) * (1 + negatives), reduction=reduction),
    ):
        gradients = torch.autograd.grad((loss * weights).sum(), [x, y])
        found.append((loss, *gradients))
    for own, expected in zip(*found, strict=True):
        assert own.shape == expected.shape
        assert torch.allclose(own, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", BOTH)
def test_target_and_dtype(kind):
    x, y = (reps.detach().bfloat16() for reps in random_reps(3, 7))
    target = torch.tensor([6, 0, 6])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = kind()(x, y, target)
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, F.cross_entropy(x.float() @ y.float().T, target))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("sizes", "arguments", "message"),
    [
        ((2, 3), {}, "2 questions with n_hard_negatives=0 need 2 passages, found 3"),
        ((2, 2), {"reduction": "average"}, "'mean', 'sum' or 'none', found 'average'"),
        ((2, 2), {"target": torch.tensor([0])}, r"target must be int64 of shape \(2,\)"),
        ((2, 2), {"target": torch.tensor([0, 1], dtype=torch.int32)}, "found torch.int32"),
        ((2, 2), {"target": torch.tensor([0, 2])}, r"lie in 0\.\.1.* from 0 to 2"),
        ((2, 2), {"target": torch.tensor([-1, 1])}, "from -1 to 1"),
        ((0, 0), {}, "at least one question"),
    ],
)
def test_misuse(kind, sizes, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind()(*random_reps(*sizes), **arguments)


def test_shapes_and_negative_counts():
    x, _ = random_reps(2, 2)
    for wrong in (torch.ones(2, 3), torch.ones(5)):
        with pytest.raises(ValueError, match=r"must be \(Q, D\) and \(P, D\)"):
            SimpleContrastiveLoss()(x, wrong)
    with pytest.raises(ValueError, match="at least 0, found -1"):
        DistributedContrastiveLoss(-1)


SHARES = {2: (3, 2), 3: (0, 4, 1)}


def losses_of_a_share(target):
    rank, shares = distributed.rank(), SHARES[distributed.world_size()]
    first, last = sum(shares[:rank]), sum(shares[: rank + 1])
    found = []
    for options in ({}, {"reduction": "sum"}, {"target": target}):
        x, y = (reps.detach() for reps in random_reps(5, 10))
        x = x[first:last].requires_grad_()
        y = y[2 * first : 2 * last].requires_grad_()
        loss = DistributedContrastiveLoss(n_hard_negatives=1)(x, y, **options)
        loss.backward()
        # DistributedDataParallel's mean over processes, taken here where the gradient is made.
        found.append((loss.detach(), *(t.grad / distributed.world_size() for t in (x, y))))
    x, y = random_reps(2, 2)
    local = SimpleContrastiveLoss()(x * (1 + rank), y)  # knows nothing of the other processes
    return found, (float(local), float(F.cross_entropy((1 + rank) * x @ y.T, torch.arange(2))))


def none_over_processes():
    try:
        DistributedContrastiveLoss()(*random_reps(2, 2), reduction="none")
    except ValueError as error:
        return str(error)
    return "no error"


def wrong_target_over_processes():
    try:
        DistributedContrastiveLoss()(*random_reps(2, 2), target=torch.arange(2))
    except ValueError as error:
        return str(error)
    return "no error"


def all_of_it(target):
    return losses_of_a_share(target), none_over_processes(), wrong_target_over_processes()


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_unequal_shares_give_the_gradient_of_the_joined_batch(world_size):
    target = torch.tensor([1, 2, 5, 6, 9])  # within each process's passages
    results = run_distributed(all_of_it, world_size, target)
    for index, options in enumerate(({}, {"reduction": "sum"}, {"target": target})):
        x, y = random_reps(5, 10)
        labels = {"target": torch.arange(0, 10, 2), **options}
        expected = F.cross_entropy(x @ y.T, **labels)
        expected.backward()
        per_rank = [losses[index] for (losses, _), _, _ in results]
        for loss, _, _ in per_rank:
            assert torch.allclose(loss, expected, rtol=1e-12)
        for place, reps in ((1, x), (2, y)):
            joined = torch.cat([found[place] for found in per_rank])
            assert torch.allclose(joined, reps.grad, rtol=1e-12, atol=1e-14)
    for (_, (local, expected)), none, wrong in results:
        assert local == pytest.approx(expected, rel=1e-12)
        assert "no meaning over several processes" in none
        assert f"of shape ({2 * world_size},), one per question of all processes" in wrong
