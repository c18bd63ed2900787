import pytest
import torch

from gc_dpr.ragged import RaggedTokens, length_sorted_chunks

ROWS = [[5, 0, 7], [1], [9, 9, 9, 9, 9], [2, 3]]  # 0 is also the pad token
TOKENS = RaggedTokens.from_lists(ROWS)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1], [2], [1, 1, 0], []])
def test_pad_against_a_loop(rows, side):
    chunk = TOKENS.pad(torch.tensor(rows, dtype=torch.int64), pad_token_id=0, side=side)
    width = max((len(ROWS[row]) for row in rows), default=0)
    for name, filler, values in (
        ("input_ids", 0, [ROWS[row] for row in rows]),
        ("attention_mask", 0, [[1] * len(ROWS[row]) for row in rows]),
    ):
        pads = [[filler] * (width - len(value)) for value in values]
        expected = [
            v + pad if side == "right" else pad + v for v, pad in zip(values, pads, strict=True)
        ]
        assert chunk[name].tolist() == expected
        assert chunk[name].shape == (len(rows), width)
        assert chunk[name].dtype == torch.int64


def test_pad_token_fills_and_device_is_kept():
    chunk = TOKENS.pad(torch.tensor([1, 3]), pad_token_id=77, device="cpu")
    assert chunk["input_ids"].tolist() == [[1, 77], [2, 3]]
    with pytest.raises(ValueError, match="side"):
        TOKENS.pad(torch.tensor([1]), pad_token_id=0, side="middle")


def test_select_and_length():
    picked = TOKENS.select(torch.tensor([3, 0, 3]))
    assert len(TOKENS) == 4
    assert len(picked) == 3
    assert picked.ids.tolist() == [2, 3, 5, 0, 7, 2, 3]
    assert picked.lengths.tolist() == [2, 3, 2]
    assert picked.pad(torch.tensor([2]), pad_token_id=0)["input_ids"].tolist() == [[2, 3]]
    assert len(TOKENS.select(torch.tensor([], dtype=torch.int64))) == 0


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.tensor([3]), "ids must be a 1-D int64"),
        (torch.zeros(3, dtype=torch.int64), torch.tensor([[3]]), "lengths must be a 1-D int64"),
        (torch.zeros(3, dtype=torch.int64), torch.tensor([1, 1]), "sum to 2, there are 3"),
        (torch.zeros(3, dtype=torch.int64), torch.tensor([4, -1]), "must be >= 0"),
    ],
)
def test_ragged_tokens_are_checked(ids, lengths, message):
    with pytest.raises(ValueError, match=message):
        RaggedTokens(ids, lengths)


def lengths_of(count, seed=0):
    return torch.randint(1, 40, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("max_tokens", [1, 39, 100, 10**9])
@pytest.mark.parametrize("max_rows", [None, 1, 7])
def test_chunks_keep_the_budget_and_lose_nothing(count, max_tokens, max_rows):
    lengths = lengths_of(count)
    chunks = length_sorted_chunks(lengths, max_tokens=max_tokens, max_rows=max_rows)
    rows = [row for chunk in chunks for row in chunk.tolist()]
    assert sorted(rows) == list(range(count))
    in_order = [int(lengths[row]) for row in rows]
    assert in_order == sorted(in_order, reverse=True)
    for chunk in chunks:
        assert len(chunk) <= (max_rows or count)
        assert len(chunk) == 1 or len(chunk) * int(lengths[chunk].max()) <= max_tokens


def test_equal_lengths_keep_their_order_and_a_long_text_stands_alone():
    lengths = torch.tensor([3, 3, 50, 3])
    chunks = length_sorted_chunks(lengths, max_tokens=6)
    assert [chunk.tolist() for chunk in chunks] == [[2], [0, 1], [3]]


@pytest.mark.parametrize("budget", [{"max_tokens": 0}, {"max_tokens": 5, "max_rows": 0}])
def test_budgets_below_one_are_refused(budget):
    with pytest.raises(ValueError, match="must be at least 1"):
        length_sorted_chunks(torch.tensor([1]), **budget)
