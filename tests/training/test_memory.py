"""Automatic chunk budgets and kept graphs, on a device whose memory is made up."""

import pytest
import torch
from torch import nn

from gc_dpr.training.chunk_budget import TextDoesNotFitError
from gc_dpr.training.memory import (
    AUTO_TOKENS,
    MOST_TOKENS,
    SHARE,
    KeptGraphs,
    find_chunk_tokens,
    memory_of,
)

CPU = torch.device("cpu")


class Memory:
    """So many bytes, of which an encoder takes a share when it is called."""

    def __init__(self, total, held=0):
        self.total, self.held, self.highest = total, held, held

    def free(self):
        return self.total - self.held

    def allocated(self):
        return self.held

    def reset_peak(self):
        self.highest = self.held

    def peak(self):
        return self.highest

    def use(self, needed):
        """Take and give back; out of memory as torch says it."""
        if needed > self.free():
            raise torch.OutOfMemoryError("made up")
        self.highest = max(self.highest, self.held + needed)


class Encoder(nn.Module):
    """Needs 1,000 bytes, and 10 for every token."""

    def __init__(self, memory):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.memory, self.rows, self.modes = memory, [], []

    def forward(self, input_ids, attention_mask):
        self.rows.append(len(input_ids))
        self.modes.append(self.training)
        self.memory.use(1000 + 10 * input_ids.numel())
        return torch.rand(len(input_ids), 4) * self.weight


def find(total, *, length=50, reserve=0, held=0):
    encoder = Encoder(Memory(total, held)).eval()
    generator = torch.get_rng_state()
    try:
        return find_chunk_tokens(
            encoder, length=length, device=CPU, memory=encoder.memory, reserve=reserve
        ), encoder
    finally:
        assert torch.equal(torch.get_rng_state(), generator)
        assert encoder.weight.grad is None
        assert not encoder.training
        assert all(encoder.modes)  # dropout counts


@pytest.mark.parametrize(("total", "reserve", "held"), [(100_000, 0, 0), (90_000, 9_000, 5_000)])
def test_the_budget_is_what_the_free_memory_holds(total, reserve, held):
    tokens, encoder = find(total, reserve=reserve, held=held)
    room = SHARE * (total - held - reserve)
    assert tokens % 50 == 0
    assert 1000 + 10 * tokens <= room < 1000 + 10 * (tokens + 50)
    encoder.memory.use(1000 + 10 * tokens)  # it does fit


def test_a_large_memory_gives_the_largest_useful_chunk():
    assert find(10**9)[0] == MOST_TOKENS


def test_a_memory_for_hardly_one_text_gives_chunks_of_one():
    assert find(1000 + 10 * 60)[0] == 50


def test_a_memory_for_less_than_one_text_is_refused():
    with pytest.raises(TextDoesNotFitError, match="single text of 50 tokens"):
        find(1000)


def test_another_error_of_the_encoder_is_not_taken_for_a_lack_of_memory():
    class Broken(nn.Module):
        def forward(self, input_ids, attention_mask):
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        find_chunk_tokens(Broken(), length=5, device=CPU, memory=Memory(10), reserve=0)


def step(kept, *, chunk, per_token, gradients=500):
    """What a step allocates: gradients, one chunk, and what was kept."""
    allowed = kept.before_step()
    memory = kept._memory
    memory.use(gradients + per_token * (chunk + allowed))
    kept.after_step(largest_chunk=chunk, allowed=allowed, allowed_at_last=allowed)
    return allowed


def test_kept_graphs_fill_the_free_memory_from_the_second_step_on():
    memory = Memory(100_000, held=20_000)
    kept = KeptGraphs(memory)
    assert step(kept, chunk=1000, per_token=10) == 0
    memory.held = 30_000  # the optimizer's state
    allowed = step(kept, chunk=1000, per_token=10)
    assert allowed == int((SHARE * 70_000 - 10_500) * 1000 / 10_500)
    assert step(kept, chunk=1000, per_token=10) == allowed  # what was kept is not measured again


def test_no_room_keeps_nothing():
    kept = KeptGraphs(Memory(12_000))
    assert [step(kept, chunk=1000, per_token=10) for _ in range(3)] == [0, 0, 0]


def test_out_of_memory_halves_the_share_that_is_used():
    kept = KeptGraphs(Memory(100_000))
    step(kept, chunk=1000, per_token=10, gradients=0)
    first = kept.before_step()
    kept.after_step(largest_chunk=1000, allowed=first, allowed_at_last=first // 2)
    assert first == int(SHARE * 10_000 - 1000)
    assert kept.before_step() == int(SHARE / 2 * 10_000 - 1000)


def test_the_cpu_cannot_be_asked_and_has_stated_numbers():
    assert memory_of(CPU) is None
    assert AUTO_TOKENS == 2048
