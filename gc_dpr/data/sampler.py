"""The order of the examples in an epoch, and which of them each process takes.

The global batches of an epoch are a pure function of (seed, epoch); a process takes a contiguous
piece of each. So the batches are the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from gc_dpr.errors import DataError
from gc_dpr.seeding import derive_seed

LastBatch = Literal["keep", "drop"]


def number_of_batches(num_examples: int, *, batch_size: int, last_batch: LastBatch = "keep") -> int:
    """Number of global batches in an epoch.

    Args:
        num_examples: Examples of the training set, at least 1.
        batch_size: Questions of a batch over all processes.
        last_batch: ``"keep"`` trains on the last, smaller batch; ``"drop"`` leaves it out.

    Raises:
        ValueError: An argument is out of range.
        DataError: ``"drop"`` would leave no batch at all.
    """
    if last_batch not in ("keep", "drop"):
        raise ValueError(f"last_batch={last_batch!r}: expected 'keep' or 'drop'")
    if num_examples < 1 or batch_size < 1:
        raise ValueError(
            f"num_examples={num_examples}, batch_size={batch_size}: expected both at least 1"
        )
    if last_batch == "keep":
        return -(-num_examples // batch_size)
    if num_examples < batch_size:
        raise DataError(
            f"{num_examples} training examples do not fill one batch of {batch_size}, and "
            "last_batch=drop leaves the rest out; lower the batch size or keep the last batch"
        )
    return num_examples // batch_size


def epoch_batches(
    num_examples: int,
    *,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int = 0,
    world_size: int = 1,
    last_batch: LastBatch = "keep",
) -> list[NDArray[np.int64]]:
    """Positions of the examples that one process takes of each global batch of an epoch.

    Args:
        num_examples: Examples of the training set.
        batch_size: Questions of a batch over all processes.
        seed: The run's seed.
        epoch: 0-based.
        rank: Number of this process.
        world_size: Number of processes.
        last_batch: Keep or drop the last, smaller batch.

    Returns:
        One int64 array per global batch, the same number on every process. Pieces differ by at
        most one example; joined in rank order they are the global batch. A batch with fewer
        examples than processes leaves some pieces empty.

    Example:
        >>> whole = epoch_batches(5, batch_size=4, seed=1, epoch=0)
        >>> first, second = (
        ...     epoch_batches(5, batch_size=4, seed=1, epoch=0, rank=rank, world_size=2)
        ...     for rank in (0, 1)
        ... )
        >>> [len(piece) for piece in first], [len(piece) for piece in second]
        ([2, 0], [2, 1])
        >>> [*first[0], *second[0]] == list(whole[0])
        True
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not one of {world_size} processes")
    count = number_of_batches(num_examples, batch_size=batch_size, last_batch=last_batch)
    # NumPy promises the raw output of a bit generator, not permutation(), between versions.
    keys = np.random.PCG64(derive_seed(seed, "order of examples", epoch)).random_raw(num_examples)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    pieces = []
    for i in range(count):
        batch = order[i * batch_size : (i + 1) * batch_size]
        start, end = (len(batch) * r // world_size for r in (rank, rank + 1))
        pieces.append(batch[start:end])
    return pieces


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, position) pairs for a DataLoader's ``batch_sampler``.

    The epoch travels with every position, so a loader worker that lives for many epochs always
    knows which one it draws for.

    Args:
        num_examples: Examples of the training set.
        batch_size: Questions of a batch over all processes.
        seed: The run's seed.
        rank: Number of this process.
        world_size: Number of processes.
        last_batch: Keep or drop the last, smaller batch.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        last_batch: LastBatch = "keep",
    ) -> None:
        self._batches_per_epoch = number_of_batches(
            num_examples, batch_size=batch_size, last_batch=last_batch
        )
        self._num_examples = num_examples
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._last_batch: LastBatch = last_batch
        self._epoch = 0
        self._first_batch = 0

    def set_epoch(self, epoch: int, *, first_batch: int = 0) -> None:
        """Choose what the next iteration gives.

        Args:
            epoch: 0-based.
            first_batch: Batches of the epoch to leave out, for a run that resumes within it.
        """
        if not 0 <= first_batch <= self._batches_per_epoch:
            raise ValueError(
                f"first_batch={first_batch}: an epoch has {self._batches_per_epoch} batches"
            )
        self._epoch = epoch
        self._first_batch = first_batch

    def __len__(self) -> int:
        return self._batches_per_epoch - self._first_batch

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self._epoch
        batches = epoch_batches(
            self._num_examples,
            batch_size=self._batch_size,
            seed=self._seed,
            epoch=epoch,
            rank=self._rank,
            world_size=self._world_size,
            last_batch=self._last_batch,
        )
        for positions in batches[self._first_batch :]:
            yield [(epoch, position) for position in positions.tolist()]
