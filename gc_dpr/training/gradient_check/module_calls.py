"""Record what goes into and out of every submodule, to find where two runs begin to differ.

Letters: C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Differences beyond this share are no rounding. Causes that matter change far more than this.
_ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-4}

# Whether two tensors of the same call agree; None = they cannot be compared.
Agree = Callable[[Tensor, Tensor], bool | None]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a submodule; its tensors in any nesting, laid out in a row."""

    module: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def record_calls(module: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """Run, and return the calls of all submodules in the order in which they end.

    Every tensor is copied: for a few short texts only.

    Args:
        module: Whose submodules are watched, itself included (under the name ``""``).
        run: Calls it.
    """
    calls: list[Call] = []
    open_inputs: list[list[Tensor]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        open_inputs.append([t.detach().clone() for t in tensors_in((args, kwargs))])

    def after(name: str) -> Callable[..., None]:
        def record(_: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            outputs = [t.detach().clone() for t in tensors_in(output)]
            calls.append(Call(name, open_inputs.pop(), outputs))

        return record

    with ExitStack() as stack:
        for name, part in module.named_modules():
            hooks = (
                part.register_forward_pre_hook(before, with_kwargs=True),
                part.register_forward_hook(after(name), with_kwargs=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        run()
    return calls


def first_difference(one: Iterable[Call], other: Iterable[Call], agree: Agree) -> str | None:
    """Name of the first submodule that made different outputs from the same inputs.

    Calls are in the order of their ends, so the innermost culprit comes first. ``None`` if there is
    none, or the two runs called different submodules before it.
    """
    for left, right in zip(one, other, strict=False):
        if left.module != right.module:
            return None
        if _agreeing(left.outputs, right.outputs, agree, unknown=True):
            continue
        if _agreeing(left.inputs, right.inputs, agree, unknown=False):
            return left.module
    return None


def _agreeing(one: list[Tensor], other: list[Tensor], agree: Agree, *, unknown: bool) -> bool:
    if len(one) != len(other):
        return unknown
    answers = [agree(left, right) for left, right in zip(one, other, strict=True)]
    return all(unknown if answer is None else answer for answer in answers)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors inside mappings, lists, tuples and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def with_rows(value: Any, rows: Tensor, size: int) -> Any:
    """Exchange the rows of every tensor with ``size`` rows, in any nesting.

    Args:
        value: A model's input.
        rows: (C,) for each row of the result, the row it is taken from.
        size: C of the input; other tensors and other things stay as they are.
    """
    if isinstance(value, Tensor):
        matches = value.dim() > 0 and len(value) == size
        return value.index_select(0, rows.to(value.device)) if matches else value
    if isinstance(value, Mapping):
        return {name: with_rows(inner, rows, size) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_rows(inner, rows, size) for inner in value]
    if isinstance(value, tuple):
        parts = [with_rows(inner, rows, size) for inner in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding."""
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    wide = torch.float64 if one.dtype == torch.float64 else torch.float32
    distance = torch.linalg.vector_norm((one - other).to(wide))
    return bool(distance <= _ROUNDING.get(one.dtype, 5e-2) * torch.linalg.vector_norm(one.to(wide)))


def agree_in_row(row: int, size: int) -> Agree:
    """Compare only one row of each tensor: as its first dimension, or folded into it."""

    def agree(one: Tensor, other: Tensor) -> bool | None:
        if one.shape != other.shape:
            return None
        if close(one, other):
            return True
        if one.dim() == 0 or len(one) % size:
            return None
        return close(one.reshape(size, -1)[row], other.reshape(size, -1)[row])

    return agree
