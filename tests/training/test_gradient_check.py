"""Two ways to one gradient: equal ones pass, each classical mistake is seen in the right tower."""

# ruff: noqa: NPY002  - other people's modules draw from numpy's global generator

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gc_dpr.errors import GcDprError
from gc_dpr.grad_cache import GradCache, RandContext
from gc_dpr.training.gradient_check.comparison import (
    SMALLEST_SHARE,
    TOLERANCES,
    GradientError,
    coarsest,
    compare_gradients,
)

ROWS, CHUNK = 6, 2


def encoder(*, dropout=0.0, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = nn.Linear(5, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4)
    return nn.Sequential(*layers).to(dtype)


def texts(seed, dtype=torch.float64):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def nll(questions, passages):
    return F.cross_entropy(questions @ passages.T, torch.arange(len(questions)))


class Loop:
    """Somebody's own loop over two encoders: a cached step with one mistake or none."""

    def __init__(self, *, mistake=None, dropout=0.0, dtype=torch.float64, shared=False):
        question = encoder(dropout=dropout, seed=1, dtype=dtype)
        passage = question if shared else encoder(dropout=dropout, seed=2, dtype=dtype)
        self.towers = {"question": question, "passage": passage}
        self.inputs = {"question": texts(3, dtype), "passage": texts(4, dtype)}
        self.mistake = mistake

    def cached(self):
        reps, states = {}, {}
        for name, tower in self.towers.items():
            states[name] = []
            pieces = []
            for chunk in self.inputs[name].split(CHUNK):
                states[name].append(RandContext(tower))
                with torch.no_grad():
                    pieces.append(tower(chunk))
            reps[name] = torch.cat(pieces).requires_grad_()
        loss = nll(reps["question"], reps["passage"])
        loss.backward()
        for name, tower in self.towers.items():
            gradient = reps[name].grad
            if name == "passage" and self.mistake == "scaled":
                gradient = gradient / 8
            replays = zip(
                self.inputs[name].split(CHUNK), gradient.split(CHUNK), states[name], strict=True
            )
            for number, (chunk, own, state) in enumerate(replays):
                if name == "passage" and self.mistake == "only the last chunk" and number < 2:
                    continue
                if name == "question" and self.mistake == "another mask":
                    tower(chunk).backward(own)
                    continue
                with state:
                    tower(chunk).backward(own)
        return loss.detach()

    def in_chunks(self):
        reps = [
            torch.cat([tower(chunk) for chunk in self.inputs[name].split(CHUNK)])
            for name, tower in self.towers.items()
        ]
        loss = nll(*reps)
        loss.backward()
        return loss

    def undivided(self):
        return nll(*(tower(self.inputs[name]) for name, tower in self.towers.items()))

    def compare(self, undivided=None, **options):
        return compare_gradients(
            self.towers, cached=self.cached, undivided=undivided or self.in_chunks, **options
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_right_loop_passes(dtype, dropout):
    check = Loop(dropout=dropout, dtype=dtype).compare()
    assert check.passed
    assert [tower.tower for tower in check.towers] == ["question", "passage"]
    assert all(tower.parameters == 4 and tower.parameter for tower in check.towers)
    assert (check.dtype, check.tolerance) == (dtype, TOLERANCES[dtype])
    assert check.cached_loss == pytest.approx(check.undivided_loss, rel=check.tolerance)


def test_without_dropout_the_batch_in_one_piece_gives_the_same():
    loop = Loop()
    assert loop.compare(undivided=loop.undivided).passed
    loop = Loop()
    for tower in loop.towers.values():  # two of them in a row draw other masks in one piece
        tower.extend([nn.Dropout(0.4), nn.Dropout(0.4)])
    assert loop.compare().passed
    assert not loop.compare(undivided=loop.undivided).passed


@pytest.mark.parametrize(
    ("mistake", "tower", "size"),
    [
        ("scaled", "passage", 7 / 8),
        ("only the last chunk", "passage", None),
        ("another mask", "question", None),
    ],
)
def test_a_mistake_is_seen_in_its_tower(mistake, tower, size):
    check = Loop(mistake=mistake, dropout=0.4).compare()
    assert not check.passed
    assert check.worst.tower == tower
    wrong = {t.tower: t.difference > check.tolerance for t in check.towers}
    assert wrong == {"question": tower == "question", "passage": tower == "passage"}
    assert check.worst.difference > 0.1
    if size is not None:
        assert check.worst.difference == pytest.approx(size, rel=1e-9)
    assert check.loss_difference <= check.tolerance  # such mistakes do not show in the loss


def test_the_difference_is_the_one_computed_by_hand():
    loop = Loop()
    weight = loop.towers["passage"][0].weight

    def slightly_wrong():
        loss = loop.cached()
        weight.grad[1, 2] += 0.125
        return loss

    loop.in_chunks()
    expected = 0.125 / float(weight.grad.norm())
    check = compare_gradients(loop.towers, cached=slightly_wrong, undivided=loop.in_chunks)
    worst = check.worst
    assert (worst.tower, worst.parameter) == ("passage", "0.weight")
    assert worst.difference == pytest.approx(expected, rel=1e-9)


def test_a_gradient_that_is_zero_in_theory_is_measured_by_its_tower():
    tower = nn.ParameterDict({"real": torch.ones(3), "noise": torch.zeros(1)}).double()

    def way(noise):
        def run():
            tower["real"].grad = torch.full((3,), 2.0, dtype=torch.float64)
            tower["noise"].grad = torch.tensor([noise], dtype=torch.float64)
            return torch.tensor(1.0)

        return run

    check = compare_gradients({"t": tower}, cached=way(1e-17), undivided=way(-3e-17))
    norm = math.sqrt(12 + 9e-34)
    assert check.worst.difference == pytest.approx(4e-17 / (SMALLEST_SHARE * norm))
    assert check.passed


def test_shared_parameters_are_reported_once():
    check = Loop(shared=True, dropout=0.3).compare()
    assert [tower.tower for tower in check.towers] == ["shared"]
    assert check.passed
    loop = Loop(dropout=0.3)
    loop.towers["passage"][0] = loop.towers["question"][0]  # only one layer in common
    check = loop.compare()
    assert {t.tower: t.parameters for t in check.towers} == {
        "question": 2, "passage": 2, "shared": 2,
    }  # fmt: skip
    assert check.passed


def test_a_frozen_tower_has_nothing_to_compare():
    loop = Loop()
    loop.towers["passage"].requires_grad_(False)
    check = compare_gradients(
        loop.towers,
        cached=lambda: GradCache([*loop.towers.values()], CHUNK, nll)(*loop.inputs.values()),
        undivided=loop.undivided,
    )
    assert [(t.tower, t.parameters, t.parameter) for t in check.towers][1] == ("passage", 0, "")
    assert check.passed
    loop.towers["question"].requires_grad_(False)
    with pytest.raises(ValueError, match="no tower has a parameter that requires a gradient"):
        loop.compare()


def test_the_class_of_the_grad_cache_package_against_plain_autograd():
    loop = Loop()
    cache = GradCache([*loop.towers.values()], [2, 4], nll)
    check = compare_gradients(
        loop.towers, cached=lambda: cache(*loop.inputs.values()), undivided=loop.undivided
    )
    assert check.passed


def test_a_gradient_that_is_not_finite_never_passes():
    loop = Loop()

    def broken():
        loss = loop.cached()
        loop.towers["question"][3].bias.grad[0] = math.nan
        return loss

    check = compare_gradients(loop.towers, cached=broken, undivided=loop.in_chunks)
    assert not check.passed
    assert (check.worst.tower, check.worst.difference) == ("question", math.inf)
    loss_only = compare_gradients(
        loop.towers, cached=lambda: loop.cached() * math.nan, undivided=loop.in_chunks
    )
    assert not loss_only.passed
    assert loss_only.loss_difference == math.inf


def test_what_cannot_be_compared_is_said():
    loop = Loop()
    with pytest.raises(GradientError, match="the cached way left no gradient") as caught:
        compare_gradients(loop.towers, cached=lambda: torch.tensor(1.0), undivided=loop.in_chunks)
    assert isinstance(caught.value, GcDprError)
    with pytest.raises(GradientError, match="gradient is zero in every parameter"):
        compare_gradients(
            loop.towers,
            cached=lambda: loop.undivided() * 0,
            undivided=lambda: loop.undivided() * 0,
        )


def test_a_missing_gradient_counts_as_zeros():
    loop = Loop()

    def without_bias():
        loss = loop.cached()
        loop.towers["question"][3].bias.grad = None
        return loss

    check = compare_gradients(loop.towers, cached=without_bias, undivided=loop.in_chunks)
    assert (check.worst.tower, check.worst.parameter) == ("question", "3.bias")
    assert check.worst.difference == pytest.approx(1.0)


def test_tolerance_and_dtype_can_be_given():
    loop = Loop(dtype=torch.float32)
    assert loop.compare(dtype=torch.bfloat16).tolerance == 1e-2
    assert loop.compare(tolerance=0.5).tolerance == 0.5
    assert coarsest(torch.float64, torch.bfloat16, torch.float32) == torch.bfloat16


def test_everything_is_afterwards_as_before():
    loop = Loop(dropout=0.4)
    loop.towers["passage"].append(nn.BatchNorm1d(4).double())
    norm = loop.towers["passage"][-1]
    before_grads = {}
    for tower in loop.towers.values():
        for parameter in tower.parameters():
            parameter.grad = torch.randn_like(parameter)
            before_grads[parameter] = (parameter.grad, parameter.grad.clone())
    loop.towers["question"].eval()
    buffers = {name: value.clone() for name, value in norm.named_buffers()}
    weights = {p: p.detach().clone() for p in before_grads}
    torch.manual_seed(5), random.seed(6), np.random.seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def cached():
        np.random.rand(), random.random()
        return loop.cached()

    compare_gradients(loop.towers, cached=cached, undivided=loop.in_chunks)

    for parameter, (gradient, content) in before_grads.items():
        assert parameter.grad is gradient
        assert torch.equal(gradient, content)
        assert torch.equal(parameter, weights[parameter])
    assert all(torch.equal(buffers[name], value) for name, value in norm.named_buffers())
    assert not loop.towers["question"].training
    assert loop.towers["passage"].training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


def test_everything_is_put_back_after_an_error_too():
    loop = Loop()
    weight = loop.towers["question"][0].weight
    weight.grad = gradient = torch.ones_like(weight)

    def fails():
        loop.cached()
        raise RuntimeError("the loop breaks")

    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="the loop breaks"):
        compare_gradients(loop.towers, cached=fails, undivided=loop.in_chunks)
    assert weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
