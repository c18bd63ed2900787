"""The order of an epoch and the pieces that each process takes."""

import numpy as np
import pytest

from gc_dpr.data.sampler import EpochBatchSampler, epoch_batches, number_of_batches
from gc_dpr.errors import DataError


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("num_examples", "batch_size"), [(1, 1), (5, 4), (33, 10), (40, 8), (7, 7)]
)
def test_pieces_join_to_the_same_global_batches(num_examples, batch_size, world_size, last_batch):
    options = {"batch_size": batch_size, "seed": 3, "epoch": 2, "last_batch": last_batch}
    whole = epoch_batches(num_examples, **options)
    pieces = [
        epoch_batches(num_examples, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    count = number_of_batches(num_examples, batch_size=batch_size, last_batch=last_batch)
    assert {len(whole), *map(len, pieces)} == {count}
    for i, batch in enumerate(whole):
        assert batch.dtype == np.int64
        np.testing.assert_array_equal(np.concatenate([piece[i] for piece in pieces]), batch)
        sizes = [len(piece[i]) for piece in pieces]
        assert max(sizes) - min(sizes) <= 1
    seen = np.concatenate(whole).tolist()
    assert (
        len(set(seen))
        == len(seen)
        == (num_examples if last_batch == "keep" else num_examples // batch_size * batch_size)
    )


def order(seed, epoch, n=1000):
    return np.concatenate(epoch_batches(n, batch_size=64, seed=seed, epoch=epoch))


def test_order_is_a_function_of_seed_and_epoch():
    np.testing.assert_array_equal(order(1, 0), order(1, 0))
    assert sorted(order(1, 0)) == list(range(1000))
    # Two independent permutations share about one place.
    for other in (order(1, 1), order(2, 0), np.arange(1000)):
        assert (order(1, 0) == other).sum() < 10
    # (epoch 0, seed 1) and (epoch 1, seed 0) must not be the same draw.
    assert (order(0, 1) == order(1, 0)).sum() < 10


def test_order_is_the_same_on_every_machine():
    """Computed once; a change here would change every run that is resumed."""
    assert order(42, 0, n=10).tolist() == [5, 6, 9, 7, 0, 3, 2, 4, 8, 1]


def test_number_of_batches():
    assert number_of_batches(10, batch_size=4) == 3
    assert number_of_batches(10, batch_size=4, last_batch="drop") == 2
    with pytest.raises(DataError, match="3 training examples do not fill one batch of 4"):
        number_of_batches(3, batch_size=4, last_batch="drop")
    with pytest.raises(ValueError, match="expected both at least 1"):
        number_of_batches(0, batch_size=4)
    with pytest.raises(ValueError, match="expected 'keep' or 'drop'"):
        number_of_batches(3, batch_size=4, last_batch="pad")
    with pytest.raises(ValueError, match="rank=2 is not one of 2 processes"):
        epoch_batches(3, batch_size=4, seed=0, epoch=0, rank=2, world_size=2)


def test_sampler_gives_epoch_and_position_and_can_begin_within_an_epoch():
    sampler = EpochBatchSampler(10, batch_size=4, seed=7, rank=1, world_size=2)
    for epoch in (0, 5):
        sampler.set_epoch(epoch)
        pieces = epoch_batches(10, batch_size=4, seed=7, epoch=epoch, rank=1, world_size=2)
        wanted = [[(epoch, int(position)) for position in piece] for piece in pieces]
        assert list(sampler) == wanted
        assert len(sampler) == 3
        sampler.set_epoch(epoch, first_batch=2)
        assert list(sampler) == wanted[2:]
        assert len(sampler) == 1
    with pytest.raises(ValueError, match="an epoch has 3 batches"):
        sampler.set_epoch(0, first_batch=4)
