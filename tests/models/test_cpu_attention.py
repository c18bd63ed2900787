"""Attention on a CPU under autocast."""

import pytest
import torch
from torch.nn import functional as F

from gc_dpr.models.cpu_attention import cpu_attention

CPU = torch.device("cpu")


def attend(dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    query.requires_grad_()
    with cpu_attention(CPU):
        output = F.scaled_dot_product_attention(
            query.to(dtype), key.to(dtype), value=value.to(dtype), **options
        )
    return query, output


@pytest.mark.parametrize("masked", [False, True])
def test_computes_in_float32_and_gives_back_what_came(masked):
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, :, 3:] = False
    options = {"attn_mask": mask} if masked else {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query, output = attend(torch.bfloat16, **options)
    _, expected = attend(**options)
    assert output.dtype == torch.bfloat16
    # the inputs were rounded to bfloat16, the result once more, nothing between
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)
    output.float().sum().backward()
    assert torch.isfinite(query.grad).all()


def test_is_seen_by_autograd_as_float32():
    """The backward pass is the one of float32: that is what saves the time."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, output = attend(torch.bfloat16)
    cast = output.grad_fn
    assert cast.name() == "ToCopyBackward0"
    assert "Attention" in cast.next_functions[0][0].name()


def test_without_autocast_nothing_is_touched():
    with cpu_attention(CPU) as mode:
        assert mode is None
    with torch.autocast("cpu", dtype=torch.bfloat16), cpu_attention(torch.device("meta")) as mode:
        assert mode is None
    _, output = attend()
    assert output.dtype == torch.float32
    assert "Attention" in output.grad_fn.name()
