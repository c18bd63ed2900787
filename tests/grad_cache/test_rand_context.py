import random
from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gc_dpr.grad_cache import RandContext, devices_of
from gc_dpr.grad_cache import rand_context as rand_context_module

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Batch:
    ids: torch.Tensor


@pytest.mark.parametrize(
    ("sources", "devices"),
    [
        ((torch.ones(1),), [CPU]),
        ((nn.Linear(1, 1, device="meta"),), [META]),
        ((nn.BatchNorm1d(1, affine=False),), [CPU]),  # buffers only
        (([{"a": (torch.ones(1),)}, [torch.ones(1, device="meta")]],), [CPU, META]),
        ((UserDict(x=torch.ones(1)),), [CPU]),
        ((Batch(torch.ones(1, device="meta")),), [META]),
        ((CPU, META, CPU), [CPU, META]),
        (("text", 1, None, {"a": "b"}), []),
        ((nn.Linear(1, 1, device="meta"), torch.ones(1)), [CPU, META]),
    ],
)
def test_devices_are_found_in_any_nesting(sources, devices):
    assert devices_of(*sources) == devices


def draws():
    return [torch.rand(2).tolist(), torch.randn(3).tolist(), random.random()]


def test_replays_and_leaves_no_trace():
    context = RandContext(torch.ones(1))
    first, second = draws(), draws()
    outside = torch.get_rng_state(), random.getstate()
    for _ in range(2):  # more than once
        with context:
            assert draws() == first
            assert draws() == second
        assert torch.equal(torch.get_rng_state(), outside[0])
        assert random.getstate() == outside[1]


def test_nested_and_failing_replays_restore_too():
    first = RandContext()
    expected = draws()
    second = RandContext()
    second_expected = draws()
    outside = torch.get_rng_state()

    def replay_and_fail():
        with first:
            assert draws() == expected
            with second, first:
                assert draws() == expected
            assert draws() == second_expected
            raise KeyError

    with pytest.raises(KeyError):
        replay_and_fail()
    assert torch.equal(torch.get_rng_state(), outside)


class FakeGenerators:
    """Stands for torch.cuda: a state per device, as CPU byte tensors."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, device):
        return self.states[device].clone()

    def set_rng_state(self, state, device):
        self.states[device] = state.clone()


def test_every_accelerator_in_use_is_captured(monkeypatch):
    """B28: the generators of the devices that compute, not only the CPU's."""
    fake, gpus = FakeGenerators(), [torch.device("cuda", i) for i in range(3)]
    original = rand_context_module._generators
    monkeypatch.setattr(
        rand_context_module,
        "_generators",
        lambda device: fake if device.type == "cuda" else original(device),
    )
    fake.states = {gpu: torch.tensor([gpu.index], dtype=torch.uint8) for gpu in gpus}
    context = RandContext([gpus[0]], {"model": gpus[2]})
    fake.states = {gpu: torch.tensor([10 + gpu.index], dtype=torch.uint8) for gpu in gpus}
    with context:
        assert [int(fake.states[gpu]) for gpu in gpus] == [0, 11, 2]
    assert [int(fake.states[gpu]) for gpu in gpus] == [10, 11, 12]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dropout_on_the_gpu_is_replayed():
    model = nn.Dropout(0.5).cuda()
    x = torch.ones(1000, device="cuda")
    context = RandContext(model, x)
    first = model(x)
    after = torch.cuda.get_rng_state()
    with context:
        assert torch.equal(model(x), first)
    assert torch.equal(torch.cuda.get_rng_state(), after)
    assert not torch.equal(model(x), first)


def test_is_current_until_a_generator_moves():
    context = RandContext(torch.ones(1))
    assert context.is_current()
    torch.rand(1)
    assert not context.is_current()
    with context:
        assert context.is_current()
    context = RandContext()
    random.random()
    assert not context.is_current()
