import pytest
import torch
from torch import nn
from training_parts import make_model

from gc_dpr.errors import ConfigError
from gc_dpr.training.optim import build_optimizer, build_schedule


def names_in_group(model, optimizer, *, decay):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]
        for group in optimizer.param_groups
        if (group["weight_decay"] > 0) is decay
        for parameter in group["params"]
    }


@pytest.mark.parametrize("shared", [False, True])
def test_biases_and_norms_are_never_decayed(tiny_encoder_dir, shared):
    model = make_model(tiny_encoder_dir, shared=shared)
    optimizer = build_optimizer(model, learning_rate=0.5, weight_decay=0.1, epsilon=1e-6)
    decayed = names_in_group(model, optimizer, decay=True)
    spared = names_in_group(model, optimizer, decay=False)
    everything = {name for name, _ in model.named_parameters()}
    assert spared == {n for n in everything if n.endswith("bias") or "LayerNorm" in n}
    assert decayed == everything - spared
    assert all(group["eps"] == 1e-6 and group["lr"] == 0.5 for group in optimizer.param_groups)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == len(everything)


def test_a_spared_parameter_keeps_its_value_without_a_gradient():
    layer = nn.Linear(2, 2)
    before = layer.bias.detach().clone(), layer.weight.detach().clone()
    optimizer = build_optimizer(layer, learning_rate=0.1, weight_decay=0.5)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(layer.bias, before[0])
    torch.testing.assert_close(layer.weight.detach(), before[1] * (1 - 0.1 * 0.5))


def test_frozen_parameters_are_left_out():
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    groups = build_optimizer(layer, learning_rate=1.0).param_groups
    assert [len(group["params"]) for group in groups] == [1]
    layer.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(layer, learning_rate=1.0)


def rates(*, warmup_steps, total_steps):
    """Learning rate of each step, with a peak of 1."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    schedule = build_schedule(optimizer, warmup_steps=warmup_steps, total_steps=total_steps)
    found = []
    for _ in range(total_steps + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("warmup", "total"), [(0, 5), (2, 5), (4, 5), (3, 10)])
def test_the_rate_rises_from_0_and_falls_to_0(warmup, total):
    expected = [
        step / warmup if step < warmup else (total - step) / (total - warmup)
        for step in range(total + 1)
    ]
    assert rates(warmup_steps=warmup, total_steps=total) == pytest.approx(expected)
    assert expected[0] == (0 if warmup else 1)
    assert expected[-1] == 0


def test_a_warmup_longer_than_the_run_is_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigError, match=r"train\.warmup_steps=5 does not fit a run of 5"):
        build_schedule(optimizer, warmup_steps=5, total_steps=5)
