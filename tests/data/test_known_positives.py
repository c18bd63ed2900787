"""KnownPositives block by block, against the definition; with real batches: test_collator.py."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gc_dpr.data.known_positives import KnownPositives


def integers(values):
    return torch.tensor(values, dtype=torch.int64)


def known_positives(rows, columns, labels):
    return KnownPositives(
        integers([key for row in rows for key in row]),
        integers([len(row) for row in rows]),
        integers(columns),
        integers(labels),
    )


def by_definition(rows, columns, labels):
    mask = [
        [column in row and place != label for place, column in enumerate(columns)]
        for row, label in zip(rows, labels, strict=True)
    ]
    return torch.tensor(mask, dtype=torch.bool).view(len(rows), len(columns))


def slices(count, size):
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@settings(deadline=None)
@given(data=st.data())
def test_blocks_equal_the_definition(data):
    keys = st.integers(-3, 8) | st.sampled_from([-(2**63), 2**63 - 1])
    columns = data.draw(st.lists(keys, min_size=1, max_size=12))
    rows = data.draw(st.lists(st.lists(keys, max_size=4), max_size=6))
    labels = [data.draw(st.integers(0, len(columns) - 1)) for _ in rows]
    excluded = known_positives(rows, columns, labels)
    expected = by_definition(rows, columns, labels)
    for height, width in ((1, 1), (2, 3), (5, 4), (100, 100)):
        for r in slices(len(rows), height):
            for c in slices(len(columns), width):
                block = excluded(r, c)
                assert block.dtype == torch.bool
                assert torch.equal(block, expected[r, c])


def test_whole_axes_and_empty_blocks():
    excluded = known_positives([[7, 8], [8]], [7, 8, 7], [0, 1])
    assert excluded(slice(None), slice(None)).tolist() == [[False, True, True], [False] * 3]
    assert excluded(slice(1, 1), slice(0, 3)).shape == (0, 3)
    assert excluded(slice(0, 2), slice(3, 3)).shape == (2, 0)


@pytest.mark.parametrize(("rows", "columns"), [([], []), ([], [3, 3])])
def test_no_rows(rows, columns):
    block = known_positives(rows, columns, [])(slice(0, 0), slice(0, len(columns)))
    assert block.shape == (0, len(columns))


def test_survives_pickling():
    excluded = known_positives([[7, 8], [8]], [7, 8, 7], [0, 1])
    copy = pickle.loads(pickle.dumps(excluded))
    whole = slice(0, 2), slice(0, 3)
    assert torch.equal(copy(*whole), excluded(*whole))


def test_what_is_held_grows_with_the_batch_not_with_the_pairs():
    """All passages are the positive of all questions: every pair but the labels is excluded."""
    count = 2000
    excluded = known_positives([[5]] * count, [5] * count, range(count))
    assert len(pickle.dumps(excluded)) < 100 * count  # the mask of all pairs has count ** 2 bytes
    block = excluded(slice(10, 14), slice(12, 18))
    assert block.sum() == 4 * 6 - 2


@pytest.mark.parametrize(
    ("counts", "labels", "message"),
    [([1, 1], [0, 0], "add up to the 3 keys, found 2"), ([1, 2], [0], r"2 rows, found shape \(1,")],
)
def test_wrong_arguments(counts, labels, message):
    with pytest.raises(ValueError, match=message):
        KnownPositives(integers([1, 2, 3]), integers(counts), integers([1]), integers(labels))
