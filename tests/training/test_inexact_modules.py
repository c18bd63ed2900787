"""Which modules make a gradient cache inexact, named by experiment."""

# ruff: noqa: NPY002  - other people's modules draw from numpy's global generator

import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from training_parts import make_model

from gc_dpr.training.gradient_check.inexact_modules import find_inexact_modules
from gc_dpr.training.gradient_check.module_state import (
    ModuleState,
    in_dtype,
    unchanged,
    without_dropout,
)


class Counter(nn.Module):
    """Its state grows with each forward, as a buffer or as a plain attribute."""

    def __init__(self, *, buffer):
        super().__init__()
        self.buffer = buffer
        self.calls = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.buffer:
            self.count += 1
        else:
            self.calls += 1
        return x


class Noise(nn.Module):
    """Adds noise from one of several sources."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        if source == "torch generator":
            self.generator = torch.Generator().manual_seed(1)
        elif source == "numpy generator":
            self.generator = np.random.default_rng(1)
        elif source == "python generator":
            self.generator = random.Random(1)

    def draw(self, shape):
        if self.source == "torch generator":
            return torch.randn(shape, generator=self.generator)
        if self.source == "numpy generator":
            return torch.from_numpy(self.generator.standard_normal(shape)).float()
        if self.source == "numpy":
            return torch.from_numpy(np.random.standard_normal(shape)).float()
        if self.source == "fresh":
            return torch.from_numpy(np.random.default_rng().standard_normal(shape)).float()
        if self.source == "python generator":
            return torch.full(shape, self.generator.random())
        if self.source == "python":
            return torch.full(shape, random.random())
        return torch.randn(shape)

    def forward(self, x):
        return x + self.draw(x.shape)


class MeanOverRows(nn.Module):
    """Mixes rows in its own forward, between two children that do not."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.before(x)
        return self.after(x - x.mean(dim=0))


class OnlyEarlierRows(nn.Module):
    """The first row never sees the others."""

    def forward(self, x):
        return x.cumsum(dim=0)


def stacked(*modules):
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*modules), nn.Linear(4, 2))


def chunk(rows=5):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def found(encoder, inputs=None, **options):
    findings = find_inexact_modules(encoder, chunk() if inputs is None else inputs, **options)
    return [(f.module, f.type, f.cause) for f in findings]


def test_bert_with_dropout_gives_no_finding(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir, dropout=0.3, double=False)
    tokens = model.tokenize_questions(["who built the old tower", "the king", "salt"]).tokens
    inputs = tokens.pad(torch.arange(3), pad_token_id=0)
    assert found(model.question_encoder, inputs) == []
    assert found(model.question_encoder, UserDict(inputs)) == []
    assert found(model.question_encoder, [*inputs.values()]) == []
    with_none = ([inputs["input_ids"]], {"attention_mask": inputs["attention_mask"]})
    assert found(model.question_encoder, with_none) == []
    output = model.question_encoder.transformer  # a ModelOutput with None inside
    assert found(output, inputs | {"token_type_ids": None, "position_ids": None}) == []


@pytest.mark.parametrize(
    "harmless",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        Noise("torch"),
        Noise("python"),
        nn.ReLU(inplace=True),
        nn.Identity(),
    ],
    ids=repr,
)
def test_what_is_replayed_gives_no_finding(harmless):
    assert found(stacked(harmless)) == []


def test_batch_norm_is_named_with_its_path_and_both_causes():
    assert found(stacked(nn.ReLU(), nn.BatchNorm1d(4))) == [
        ("1.1", "BatchNorm1d", "state"),
        ("1.1", "BatchNorm1d", "rows"),
    ]
    findings = find_inexact_modules(stacked(nn.BatchNorm1d(4)), chunk())
    assert "running_mean, running_var, num_batches_tracked" in findings[0].reason
    assert "LayerNorm" in str(findings[1])
    assert str(findings[1]).startswith("1.0 (BatchNorm1d): the result of a text depends on")


def test_batch_norm_without_statistics_mixes_rows_all_the_same():
    layers = nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, momentum=None)
    assert found(stacked(*layers)) == [
        ("1.1", "BatchNorm1d", "state"),
        ("1.0", "BatchNorm1d", "rows"),
        ("1.1", "BatchNorm1d", "rows"),
    ]


def test_batch_norm_frozen_in_an_encoder_that_is_taken_as_it_is():
    encoder = stacked(nn.BatchNorm1d(4), nn.Dropout(0.5))
    encoder.train()
    encoder[1][0].eval()
    assert found(encoder, training=False) == []
    assert found(encoder) == []  # the cure that the message advises is seen
    assert not encoder[1][0].training
    assert found(encoder.eval()) != []  # as training would put it
    assert not encoder.training


def test_a_module_that_mixes_rows_between_its_children_is_named_itself():
    assert found(stacked(MeanOverRows())) == [("1.0", "MeanOverRows", "rows")]
    assert found(stacked(nn.Dropout(0.5), OnlyEarlierRows())) == [
        ("1.1", "OnlyEarlierRows", "rows")
    ]
    assert found(MeanOverRows()) == [("", "MeanOverRows", "rows")]
    finding = find_inexact_modules(MeanOverRows(), chunk())[0]
    assert str(finding).startswith("the encoder (MeanOverRows): ")


def test_rows_are_followed_through_folded_tokens():
    """(C, L, D) folded to (C * L, D), as for a batch norm over tokens."""

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, track_running_stats=False)

        def forward(self, x):
            return self.norm(x.reshape(-1, 4)).reshape(x.shape).mean(dim=1)

    assert found(Folded(), torch.randn(5, 3, 4)) == [("norm", "BatchNorm1d", "rows")]


@pytest.mark.parametrize("buffer", [True, False])
def test_a_counter_is_named(buffer):
    encoder = stacked(nn.ReLU(), Counter(buffer=buffer))
    assert found(encoder) == [("1.1", "Counter", "state")]
    assert (encoder[1][1].calls, float(encoder[1][1].count)) == (0, 0.0)
    finding = find_inexact_modules(encoder, chunk())[0]
    assert ("changes count," if buffer else "changes calls,") in finding.reason


def test_what_only_the_first_forward_computes_is_no_state():
    class Remembers(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(4.0)
            return x + self.table

    encoder = stacked(Remembers())
    assert found(encoder) == []
    assert encoder[1][0].table is None


def test_spectral_norm_changes_with_each_forward():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    (finding,) = find_inexact_modules(stacked(layer), chunk())
    assert finding.cause == "state"
    assert finding.module == "1.0.parametrizations.weight.0"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("torch generator", "its own Generator"),
        ("numpy generator", "its own Generator"),
        ("python generator", "its own Random"),
        ("numpy", "numpy's generator"),
        ("fresh", "a source of its own"),
    ],
)
def test_a_random_source_that_is_not_replayed_is_named(source, named):
    noise = Noise(source)
    encoder = stacked(nn.Dropout(0.3), noise, nn.Linear(4, 4))
    first = ModuleState(encoder)
    np.random.seed(3)
    position = np.random.get_state()[2]
    assert found(encoder) == [("1.1", "Noise", "randomness")]
    (finding,) = find_inexact_modules(encoder, chunk())
    assert f"it draws from {named}, which is not replayed" in finding.reason
    assert np.random.get_state()[2] == position
    if source.endswith("generator"):
        twin = Noise(source)
        assert torch.equal(noise.draw((3,)), twin.draw((3,)))  # its own generator has not moved
    first.restore()


def test_the_encoder_is_afterwards_as_before():
    encoder = stacked(nn.BatchNorm1d(4), Counter(buffer=False), Noise("torch generator"))
    encoder.eval()
    weight = encoder[0].weight
    weight.grad = gradient = torch.ones_like(weight)
    state = {name: value.clone() for name, value in encoder.state_dict().items()}
    random_state = torch.get_rng_state()
    find_inexact_modules(encoder, chunk())
    assert not any(module.training for module in encoder.modules())
    assert all(torch.equal(state[name], value) for name, value in encoder.state_dict().items())
    assert weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in encoder.modules())


def test_a_single_row_shows_no_influence():
    assert found(stacked(MeanOverRows()), chunk(1)) == []


def test_in_dtype_gives_the_very_same_tensors_back():
    encoder = stacked(nn.BatchNorm1d(4))
    encoder[1].scale = torch.ones(4)
    parameters = {name: (p, p.data.data_ptr()) for name, p in encoder.named_parameters()}
    buffers = dict(encoder.named_buffers())
    with in_dtype(encoder, torch.float64):
        assert encoder(chunk().double()).dtype == torch.float64
        assert encoder[1].scale.dtype == torch.float64
        encoder(chunk().double()).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameters[name] == (parameter, parameter.data_ptr())
        assert parameter.dtype == torch.float32
        assert parameter.grad is None
    assert all(buffers[name] is value for name, value in encoder.named_buffers())
    assert encoder[1].scale.dtype == torch.float32


def test_without_dropout_reaches_every_kind(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir, dropout=0.5, double=False).train()
    layers = nn.ModuleList(
        [nn.Dropout2d(0.2), nn.LSTM(4, 4, 2, dropout=0.3), nn.MultiheadAttention(4, 2, dropout=0.1)]
    )
    inputs = model.tokenize_questions(["who built the tower"] * 2).tokens
    inputs = inputs.pad(torch.arange(2), pad_token_id=0)
    with unchanged(model), without_dropout(model, layers):
        one, other = model.question_encoder(**inputs)
        assert torch.equal(one, other)
        assert (layers[0].p, layers[1].dropout, layers[2].dropout) == (0.0, 0.0, 0.0)
    one, other = model.question_encoder(**inputs)
    assert not torch.equal(one, other)
    assert (layers[0].p, layers[1].dropout, layers[2].dropout) == (0.2, 0.3, 0.1)


def test_a_forward_that_changes_a_parameter_is_noticed():
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.key = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            self.key.data.mul_(0.9)
            return x

    assert found(stacked(Momentum())) == [("1.0", "Momentum", "state")]
