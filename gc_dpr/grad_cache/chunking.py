"""Cutting the input of a model into chunks by rows, for class GradCache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def split_rows(model_input: Any, chunk_size: int) -> list[Any]:
    """Cut a model's input into chunks of ``chunk_size`` rows, each of the same kind as the input.

    Args:
        model_input: A tensor; a list of tensors (positional arguments); a mapping of names to
            tensors, also a ``UserDict`` such as a tokenizer returns (keyword arguments); or a tuple
            (list, dict) of both. The first dimension of every tensor is the rows.
        chunk_size: Rows of a chunk; the last one may have fewer.

    Returns:
        The chunks, in order; mappings come back as plain dicts. Tensors are views.

    Raises:
        ValueError: Chunk size below 1, no tensor at all, or tensors with different numbers of rows.
        TypeError: Another kind of input: it needs a ``split_input_fn``.

    Example:
        >>> import torch
        >>> chunks = split_rows({"input_ids": torch.arange(5)}, 2)
        >>> [chunk["input_ids"].tolist() for chunk in chunks]
        [[0, 1], [2, 3], [4]]
    """
    if chunk_size < 1:
        raise ValueError(f"chunk size must be at least 1, found {chunk_size}")
    if isinstance(model_input, Tensor):
        return [args[0] for args, _ in _split_call([model_input], {}, chunk_size)]
    if isinstance(model_input, list):
        return [args for args, _ in _split_call(model_input, {}, chunk_size)]
    if isinstance(model_input, Mapping):  # dict, UserDict, BatchEncoding
        return [kwargs for _, kwargs in _split_call([], model_input, chunk_size)]
    if isinstance(model_input, tuple) and [*map(type, model_input)] == [list, dict]:
        return _split_call(model_input[0], model_input[1], chunk_size)
    raise TypeError(
        f"cannot split an input of type {type(model_input).__name__}: expected a tensor, a list of "
        "tensors, a mapping of tensors or a tuple (list, dict); pass split_input_fn for other types"
    )


def _split_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], chunk_size: int
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Cut positional and keyword tensors alike; they must agree in the number of rows."""
    named = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        if not isinstance(value, Tensor) or value.dim() == 0:
            kind = "a tensor without dimensions" if isinstance(value, Tensor) else type(value)
            raise TypeError(
                f"cannot split input {name!r}: expected a tensor whose first dimension is the "
                f"rows, found {kind}; pass split_input_fn for other types"
            )
    rows = {name: len(value) for name, value in named}
    if len(set(rows.values())) != 1:
        raise ValueError(f"all tensors of an input must have the same number of rows, found {rows}")
    num_rows = next(iter(rows.values()))
    # An input without rows stays one chunk without rows, so that the model still gives the width.
    slices = [slice(i, i + chunk_size) for i in range(0, max(num_rows, 1), chunk_size)]
    return [([a[s] for a in args], {name: v[s] for name, v in kwargs.items()}) for s in slices]
