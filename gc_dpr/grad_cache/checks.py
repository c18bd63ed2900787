"""What class GradCache refuses before it encodes anything, so that no gradient has been touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import nn

from gc_dpr.distributed import is_fully_sharded, largest_over_processes, world_size
from gc_dpr.grad_cache.encoded_model import is_trainable, reduces_gradients
from gc_dpr.grad_cache.rand_context import devices_of


def chunk_size_per_model(chunk_sizes: int | Sequence[int], num_models: int) -> list[int]:
    """Return one chunk size per model.

    Raises:
        TypeError: A size is not a whole number.
        ValueError: No model, a size below 1, or a number of sizes that is not that of the models.
    """
    if num_models == 0:
        raise ValueError("models is empty: GradCache needs at least one")
    many = isinstance(chunk_sizes, Sequence)
    sizes: list[Any] = [*chunk_sizes] if many else [chunk_sizes] * num_models  # type: ignore[misc]
    if any(isinstance(size, bool) or not isinstance(size, Integral) for size in sizes):
        raise TypeError(f"chunk_sizes must be whole numbers of rows, found {chunk_sizes!r}")
    if len(sizes) != num_models:
        raise ValueError(
            f"chunk_sizes must be one number or one per model, found {len(sizes)} sizes "
            f"for {num_models} models"
        )
    if any(size < 1 for size in sizes):
        raise ValueError(f"chunk_sizes must be at least 1, found {chunk_sizes!r}")
    return [int(size) for size in sizes]


def check_number_of_inputs(num_inputs: int, num_models: int) -> None:
    """Check that there is one input per model.

    Raises:
        ValueError: There is not.
    """
    if num_inputs != num_models:
        raise ValueError(
            f"cache_step takes one input per model, found {num_inputs} inputs "
            f"for {num_models} models"
        )


def check_step(
    models: Sequence[Any],
    chunks: Sequence[Sequence[Any]],
    trains: Sequence[bool],
    *,
    postponed: bool,
) -> None:
    """Check that there is something to encode, and that no process waits forever.

    Every forward of a fully sharded model is a collective, and so is every backward of one in
    DistributedDataParallel whose reduction is not postponed. Only then this takes a collective
    itself: one small one, which raises on all processes what would hang.

    Args:
        models: The encoders.
        chunks: The chunks of each model's input.
        trains: Which of the models have a gradient to add.
        postponed: Gradient reduction is to be put off to the last chunk: ``no_sync_except_last``.

    Raises:
        ValueError: An input without chunk, a trained model that cannot postpone its reduction, or
            different numbers of chunks where processes meet in each of them.
    """
    for i, parts in enumerate(chunks):
        if not parts:
            raise ValueError(
                f"input {i} was split into no chunk at all: without rows give one chunk of 0 rows"
            )
    for i, model in enumerate(models):
        if postponed and trains[i] and is_trainable(model) and not reduces_gradients(model):
            raise ValueError(
                f"no_sync_except_last=True, but model {i} ({type(model).__name__}) has no no_sync: "
                "wrap it in DistributedDataParallel, apply fully_shard to it, or leave the option "
                "off"
            )
    meeting = [
        i
        for i, model in enumerate(models)
        if is_fully_sharded(model) or (trains[i] and reduces_gradients(model) and not postponed)
    ]
    if meeting and world_size() > 1:
        _check_same_counts(models, {i: len(chunks[i]) for i in meeting})


def check_something_trains(trains: Sequence[bool], loss_fn: Any) -> None:
    """Check that there is a gradient to compute; a loss with parameters is one, too.

    Raises:
        ValueError: There is none.
    """
    if not any(trains) and not (isinstance(loss_fn, nn.Module) and is_trainable(loss_fn)):
        raise ValueError("no model has a parameter that requires a gradient: nothing to train")


def _check_same_counts(models: Sequence[Any], counts: Mapping[int, int]) -> None:
    """Check that every process has as many chunks for these models."""
    device = devices_of(*(models[i] for i in counts))[-1]  # "cuda" sorts behind "cpu"
    own = [*counts.values()]
    extremes = largest_over_processes([*own, *(-count for count in own)], device)
    for i, most, least in zip(counts, extremes, extremes[len(own) :], strict=False):
        if most != -least:
            remedy = "" if is_fully_sharded(models[i]) else ", or pass no_sync_except_last=True"
            raise ValueError(
                f"model {i} has {-least} to {most} chunks on the processes, which would wait for "
                f"each other forever: give every process as many rows{remedy}"
            )
