"""The pipeline's step on one batch: a normal model passes, each mistake and cause is found."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn
from training_parts import CPU, example, examples, make_batches, make_model

from gc_dpr.grad_cache import RandContext
from gc_dpr.grad_cache import step as cache_step
from gc_dpr.training import two_passes
from gc_dpr.training.batch_step import batch_gradients
from gc_dpr.training.chunk_budget import ChunkBudget
from gc_dpr.training.gradient_check import batch_check
from gc_dpr.training.gradient_check.batch_check import check_gradients
from gc_dpr.training.gradient_check.comparison import GradientError

SMALL = ChunkBudget(10**6, 2)


def batch_of(model, data):
    return next(iter(make_batches(model, data, batch_size=len(data))[0]))


def check(model, *, data=None, budget=SMALL, **options):
    return check_gradients(
        model,
        batch_of(model, examples(7) if data is None else data),
        question_budget=budget,
        passage_budget=budget,
        device=CPU,
        **options,
    )


@pytest.fixture
def model(tiny_encoder_dir):
    return make_model(tiny_encoder_dir, double=False, dropout=0.2)


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
def test_bert_with_dropout_passes_in_every_precision(model, precision):
    found = check(model, autocast_dtype=precision)
    assert found.passed
    assert found.findings == ()
    assert found.in_one_piece
    assert found.divided == ()
    assert found.chunks["question"] == 4
    assert (found.exact.dtype, found.exact.tolerance) == (torch.float64, 1e-12)
    assert found.as_trained.dtype == (precision or torch.float32)
    for comparison in (found.exact, found.as_trained):
        assert [tower.tower for tower in comparison.towers] == ["question", "passage"]
        assert all(tower.parameters == 37 for tower in comparison.towers)
    # dropout is off in one comparison and on in the other
    assert found.exact.cached_loss != pytest.approx(found.as_trained.cached_loss, rel=1e-3)
    assert found.as_trained.worst.difference < 1e-6  # same chunks, same numbers: hardly a rounding


def test_a_shared_encoder_is_reported_once(tiny_encoder_dir):
    found = check(make_model(tiny_encoder_dir, double=False, dropout=0.2, shared=True))
    assert found.passed
    assert [tower.tower for tower in found.exact.towers] == ["shared"]


def test_a_frozen_tower(model):
    model.question_encoder.requires_grad_(False)
    found = check(model)
    assert found.passed
    assert {t.tower: t.parameters for t in found.exact.towers} == {"question": 0, "passage": 37}


def test_a_budget_of_one_chunk_is_made_smaller(model):
    found = check(model, budget=ChunkBudget(10**6, None, kept=9))
    assert found.divided == ("question", "passage")
    assert found.chunks == {"question": 3, "passage": 3}
    assert found.passed
    alone = check(model, data=[example(2)], budget=ChunkBudget(10**6))
    assert alone.chunks["question"] == 1  # one text cannot be divided
    assert alone.divided == ("passage",)


def test_temperature_and_known_positives_are_those_of_the_run(model):
    data = [example(1, positives=[1, 5]), example(5), example(2), example(3)]
    masked = check(model, data=data, temperature=0.5)
    plain = check(model, data=data, temperature=0.5, mask_known_positives=False)
    assert masked.passed
    assert plain.passed
    assert masked.exact.cached_loss < plain.exact.cached_loss
    outcome = batch_gradients(
        make_double(model),
        batch_of(model, data),
        question_budget=SMALL,
        passage_budget=SMALL,
        device=CPU,
        temperature=0.5,
    )
    assert masked.exact.undivided_loss == pytest.approx(float(outcome.loss), rel=1e-12)


def make_double(model):
    """A twin without dropout in float64."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


def test_rounding_of_large_scores_is_allowed_for(model):
    found = check(model, temperature=1e-4)
    assert found.passed
    assert found.exact.tolerance > 1e-12


def test_the_model_is_afterwards_as_before(model):
    model.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    batch = batch_of(model, examples(5))
    random_state = torch.get_rng_state()
    check_gradients(model, batch, question_budget=SMALL, passage_budget=SMALL, device=CPU)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.question_encoder.transformer.config.hidden_dropout_prob == 0.2


# ------------------------------------------------------------------------------------- mistakes


def test_another_dropout_mask_in_the_replay_is_seen(model):
    class NotReplayed(RandContext):
        def __enter__(self):
            super().__enter__()
            torch.manual_seed(99)
            return self

    with mock.patch.object(cache_step, "RandContext", NotReplayed):
        found = check(model)
    assert found.exact.passed  # there is no dropout in it
    assert not found.as_trained.passed
    assert found.as_trained.loss_difference == 0
    assert all(tower.difference > 0.01 for tower in found.as_trained.towers)


def test_a_tower_with_scaled_gradients_is_seen(model):
    def scaled(model, *arguments, **options):
        outcome = batch_gradients(model, *arguments, **options)
        for parameter in model.passage_encoder.parameters():
            parameter.grad /= 8
        return outcome

    with mock.patch.object(batch_check, "batch_gradients", scaled):
        found = check(model)
    for comparison in (found.exact, found.as_trained):
        question, passage = comparison.towers
        assert question.difference <= comparison.tolerance
        assert passage.difference == pytest.approx(7 / 8, rel=1e-4)
    assert not found.passed


def test_only_the_last_chunk_is_seen(model):
    replay = two_passes.backward_chunk

    def last_only(encoded, step, gradient, *arguments):
        if step.chunk == len(encoded.tower.chunks) - 1:
            replay(encoded, step, gradient, *arguments)

    with mock.patch.object(two_passes, "backward_chunk", last_only):
        found = check(model)
    assert not found.exact.passed
    assert not found.as_trained.passed
    assert all(tower.difference > 0.1 for tower in found.exact.towers)


# --------------------------------------------------------------------------------------- causes


class TokenNorm(nn.Module):
    """A batch norm over all tokens of a chunk."""

    def __init__(self, features):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def test_batch_norm_is_seen_and_named(model):
    layer = model.passage_encoder.transformer.encoder.layer[1].output
    layer.LayerNorm = TokenNorm(32)
    running = layer.LayerNorm.norm.running_mean.clone()
    found = check(model)
    assert not found.exact.passed
    assert found.exact.worst.tower == "passage" or found.exact.loss_difference > 1e-3
    path = "passage_encoder.transformer.encoder.layer.1.output.LayerNorm.norm"
    assert {(f.module, f.type, f.cause) for f in found.findings} == {
        (path, "BatchNorm1d", "state"), (path, "BatchNorm1d", "rows"),
    }  # fmt: skip
    assert torch.equal(layer.LayerNorm.norm.running_mean, running)
    assert int(layer.LayerNorm.norm.num_batches_tracked) == 0


class Noisy(nn.Module):
    """A layer behind noise."""

    def __init__(self, layer, generator):
        super().__init__()
        self.layer, self.generator = layer, generator

    def forward(self, hidden):
        noise = torch.randn(hidden.shape, generator=self.generator, dtype=hidden.dtype)
        return self.layer(hidden) + 0.3 * noise


def test_a_generator_of_its_own_is_seen_and_named(model):
    inner = model.question_encoder.transformer.encoder.layer[0].output
    inner.LayerNorm = Noisy(inner.LayerNorm, torch.Generator().manual_seed(4))
    before = inner.LayerNorm.generator.get_state()
    found = check(model)
    assert not found.in_one_piece
    assert not found.exact.passed
    assert not found.as_trained.passed
    (finding,) = found.findings
    path = "question_encoder.transformer.encoder.layer.0.output.LayerNorm"
    assert (finding.module, finding.type, finding.cause) == (path, "Noisy", "randomness")
    assert torch.equal(inner.LayerNorm.generator.get_state(), before)


def test_noise_from_the_replayed_generator_is_exact_through_the_same_chunks(model):
    inner = model.question_encoder.transformer.encoder.layer[0].output
    inner.LayerNorm = Noisy(inner.LayerNorm, None)
    found = check(model)
    assert not found.in_one_piece
    assert found.findings == ()
    assert found.passed
    assert found.exact.worst.difference < 1e-13


def test_a_counter_is_named_but_does_not_fail(model):
    class Counted(nn.LayerNorm):
        calls = 0

        def forward(self, hidden):
            self.calls += 1
            return super().forward(hidden)

    norm = model.question_encoder.transformer.embeddings.LayerNorm
    norm.__class__ = Counted
    norm.calls = 5
    found = check(model)
    assert found.passed
    assert [(f.module, f.cause) for f in found.findings] == [
        ("question_encoder.transformer.embeddings.LayerNorm", "state")
    ]
    assert norm.calls == 5


def test_a_pooling_that_sees_the_padding_is_named(model):
    encoder = model.passage_encoder

    class Careless(type(encoder)):
        def forward(self, input_ids, attention_mask):
            output = self.transformer(input_ids=input_ids, attention_mask=attention_mask)
            return output.last_hidden_state.mean(dim=1)

    encoder.__class__ = Careless
    found = check(model)
    assert not found.exact.passed
    assert [(f.module, f.cause) for f in found.findings] == [("passage_encoder", "padding")]


class Float32(nn.Module):
    """Computes in float32 whatever comes."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return self.layer(hidden).to(torch.float32).to(hidden.dtype)


def test_float32_inside_the_encoder_sets_the_tolerance(model):
    inner = model.question_encoder.transformer.encoder.layer[0].output
    inner.LayerNorm = Float32(inner.LayerNorm)
    found = check(model)
    assert found.exact.dtype == torch.float32
    assert found.exact.tolerance >= 1e-5
    assert found.passed


def test_an_encoder_without_float64_is_compared_in_its_own_precision(model, caplog):
    class Strict(nn.LayerNorm):
        def forward(self, hidden):
            if hidden.dtype == torch.float64:
                raise RuntimeError("kernel is not implemented for Double")
            return super().forward(hidden)

    model.question_encoder.transformer.embeddings.LayerNorm.__class__ = Strict
    found = check(model)
    assert "do not run in float64 (kernel is not implemented for Double)" in caplog.text
    assert found.exact.dtype == torch.float32
    assert found.passed


# ------------------------------------------------------------------------------------ bad input


def test_what_cannot_be_checked_is_said(model):
    with pytest.raises(ValueError, match="at least one question and two candidates, found 1 and 1"):
        check(model, data=[example(1, hard_negatives=[])])
    with pytest.raises(ValueError, match="no tower has a parameter that requires a gradient"):
        check(model.requires_grad_(False))


def test_a_batch_without_gradient_is_said(model):
    batch = batch_of(model, [example(0), example(1)])
    known = dataclasses.replace(  # every passage is a positive of every question
        batch,
        known_positive_keys=batch.passage_keys.repeat(2),
        known_positive_counts=torch.full((2,), len(batch.passage_keys)),
    )
    with pytest.raises(GradientError, match="gradient is zero in every parameter"):
        check_gradients(model, known, question_budget=SMALL, passage_budget=SMALL, device=CPU)


def test_a_loss_that_is_not_finite_does_not_pass(model):
    with torch.no_grad():
        model.question_encoder.transformer.embeddings.LayerNorm.weight[0] = torch.nan
    found = check(model)
    assert not found.passed
    assert found.exact.loss_difference == float("inf")
