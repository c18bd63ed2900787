import pytest
import torch

from gc_dpr.models import pool

HIDDEN = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
RIGHT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])


def test_first_token_right_padded():
    torch.testing.assert_close(pool(HIDDEN, RIGHT, "first_token"), HIDDEN[:, 0])


def test_first_token_left_padded_is_the_first_real_token():
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]])
    expected = torch.stack([HIDDEN[0, 0], HIDDEN[1, 3], HIDDEN[2, 4]])
    torch.testing.assert_close(pool(HIDDEN, mask, "first_token"), expected)


def test_mean_of_visible_tokens():
    expected = torch.stack([HIDDEN[0].mean(0), HIDDEN[1, :2].mean(0), HIDDEN[2, 0]])
    torch.testing.assert_close(pool(HIDDEN, RIGHT, "mean"), expected)


def test_mean_of_nothing_is_zero():
    assert pool(HIDDEN, torch.zeros(3, 5, dtype=torch.int64), "mean").tolist() == [[0.0] * 4] * 3


def test_mean_of_bfloat16_is_added_up_in_float32():
    ones = torch.ones(1, 1000, 1, dtype=torch.bfloat16)  # bfloat16 alone would stop counting at 256
    pooled = pool(ones, torch.ones(1, 1000), "mean")
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0


@pytest.mark.parametrize("mode", ["mean", "first_token"])
def test_float64_is_kept_and_half_becomes_float32(mode):
    assert pool(HIDDEN.double(), RIGHT, mode).dtype == torch.float64
    assert pool(HIDDEN.half(), RIGHT, mode).dtype == torch.float32


def test_unknown_mode():
    with pytest.raises(ValueError, match="first_token, mean; found 'cls'"):
        pool(HIDDEN, RIGHT, "cls")
