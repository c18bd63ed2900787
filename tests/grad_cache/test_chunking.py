from collections import UserDict

import pytest
import torch

from gc_dpr.grad_cache import split_rows

X, MASK = torch.arange(10).view(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    ("model_input", "chunks"),
    [
        (X, [X[:2], X[2:4], X[4:]]),
        ([X, MASK], [[X[:2], MASK[:2]], [X[2:4], MASK[2:4]], [X[4:], MASK[4:]]]),
        ({"x": X}, [{"x": X[:2]}, {"x": X[2:4]}, {"x": X[4:]}]),
        (UserDict(x=X), [{"x": X[:2]}, {"x": X[2:4]}, {"x": X[4:]}]),
        (
            ([X], {"mask": MASK}),
            [
                ([X[:2]], {"mask": MASK[:2]}),
                ([X[2:4]], {"mask": MASK[2:4]}),
                ([X[4:]], {"mask": MASK[4:]}),
            ],
        ),
    ],
)
def test_split_rows_keeps_the_kind(model_input, chunks):
    found = split_rows(model_input, 2)
    assert str(found) == str(chunks)  # tensors print their values; == on them would not compare
    assert len(split_rows(model_input, 5)) == len(split_rows(model_input, 100)) == 1
    assert len(split_rows(model_input, 1)) == 5


def test_input_without_rows_stays_one_chunk():
    assert [chunk.shape for chunk in split_rows(X[:0], 3)] == [(0, 2)]


@pytest.mark.parametrize(
    ("model_input", "error", "message"),
    [
        ("text", TypeError, "type str.*split_input_fn"),
        (["a", "b"], TypeError, "input 0.*str"),
        ({"x": X, "flag": True}, TypeError, "'flag'.*bool"),
        (torch.tensor(1.0), TypeError, "without dimensions"),
        ((X, X), TypeError, "type tuple"),
        ({"x": X, "mask": MASK[:3]}, ValueError, "{'x': 5, 'mask': 3}"),
        ([], ValueError, "same number of rows, found {}"),
    ],
)
def test_split_rows_refuses(model_input, error, message):
    with pytest.raises(error, match=message):
        split_rows(model_input, 2)


def test_split_rows_needs_a_size():
    with pytest.raises(ValueError, match="chunk size must be at least 1, found 0"):
        split_rows(X, 0)
