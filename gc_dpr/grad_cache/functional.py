"""Decorators for your own training loop: the gradient cache around a function that calls a model.

Names and behaviour are those of the GradCache package. A batch is collected from small ones:

    @cached
    def call_model(model, inputs):
        return model(**inputs).last_hidden_state[:, 0]

    @cat_input_tensor
    def contrastive_loss(questions, passages):
        return F.cross_entropy(questions @ passages.T, torch.arange(len(questions)))

    reps, closures = zip(*[call_model(model, inputs) for inputs in small_batches])
    ... the same for the passages ...
    contrastive_loss(list(reps), list(passage_reps)).backward()
    for closure, rep in zip(closures, reps): closure(rep)

Letters: N rows, D dims, C chunk, W world size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn

from gc_dpr.distributed import gather_rows_own_gradient
from gc_dpr.grad_cache.call_state import (
    autocast_off,
    capture_autocast,
    started_accelerators,
    with_graph,
)
from gc_dpr.grad_cache.rand_context import devices_of
from gc_dpr.grad_cache.step import check_reps, encode_without_graph, replay_chunk

P = ParamSpec("P")
Result = TypeVar("Result")
Closure: TypeAlias = Callable[[Tensor | Sequence[Tensor]], None]


@overload
def cached(func: Callable[P, Tensor]) -> Callable[P, tuple[Tensor, Closure]]: ...
@overload
def cached(func: Callable[P, Sequence[Tensor]]) -> Callable[P, tuple[Any, ...]]: ...
def cached(func: Callable[P, Any]) -> Callable[P, tuple[Any, ...]]:
    """Let a function that calls a model encode a chunk now and be differentiated later.

    The decorated function encodes without a graph. It returns the representations as leaves of a
    new graph, and a closure. After the loss of all chunks' representations has been back-propagated
    ``closure(representations)`` encodes the chunk again, with the same random numbers and under the
    same autocast as the first time wherever it is called, and adds the chunk's share to the
    parameters' ``.grad``. A loss scaled by a ``GradScaler`` gives scaled gradients.

    The representations keep the dtype that ``func`` gave them. The first call under
    ``torch.no_grad()``, or with modules in sight of which no parameter needs a gradient, gives
    representations that need none, and a closure that does nothing.

    A model in DistributedDataParallel reduces its gradients in every closure; call all but the last
    of a step inside ``with gc_dpr.distributed.without_gradient_sync(model):`` to do so once.

    Args:
        func: Calls the model; returns the representations (C, D), or several such tensors as tuple
            or list. It is called twice with the same arguments, so it must not change them. A
            method will do.

    Returns:
        The decorated function. It returns the representations followed by the closure, as one flat
        tuple. The closure takes the representations (several as a tuple) and raises ValueError if
        they are not its own, have no gradient yet, or if it was called before.

    Raises:
        TypeError: The decorated function: ``func`` returned something other than tensors.
        ValueError: The decorated function: representations that are not (C, D) or not floating
            point.

    Example:
        >>> encoder = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1))
        >>> call_model = cached(lambda inputs: encoder(inputs))
        >>> reps, closure = call_model(torch.ones(3, 4))
        >>> reps.square().sum().backward()
        >>> closure(reps)
        >>> encoder[0].weight.grad.shape
        torch.Size([2, 4])
    """

    @wraps(func)
    def encode(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        owner = getattr(func, "__self__", None)  # of a bound method
        call = _CachedCall(partial(func, *args, **kwargs), in_sight=[owner, *args, kwargs])
        return (*call.reps, call.back_propagate)

    return encode


class _CachedCall:
    """One call of a cached function: its representations, and the way back through them."""

    def __init__(self, encode: Callable[[], Any], *, in_sight: Sequence[Any]) -> None:
        self._encode: Callable[[], Any] | None = encode
        self._autocast = capture_autocast()
        outputs: list[Tensor] = []
        # What seems frozen is encoded with grad mode on: if it is, no graph comes of it, and if a
        # parameter out of sight is not, the graph shows that, and is dropped.
        seems_frozen = torch.is_grad_enabled() and _seems_frozen(in_sight)

        def forward() -> Tensor:
            with torch.set_grad_enabled(seems_frozen):
                outputs.extend(self._forward())
            return _joined(outputs)

        devices = [*devices_of(*in_sight), *started_accelerators()]
        _, self._state = encode_without_graph(forward, devices)
        proven_frozen = seems_frozen and not any(rep.requires_grad for rep in outputs)
        self._trains = torch.is_grad_enabled() and not proven_frozen
        self.reps = tuple(rep.detach().requires_grad_(self._trains) for rep in outputs)

    def back_propagate(self, reps: Tensor | Sequence[Tensor]) -> None:
        """Encode again and back-propagate the gradient of the representations: the closure."""
        given = (reps,) if isinstance(reps, Tensor) else tuple(reps)
        if [*map(id, given)] != [*map(id, self.reps)]:
            raise ValueError(
                "the closure was given other representations than the ones returned with it: "
                "pass those, and keep closures and representations in the same order"
            )
        if not self._trains:
            return
        if self._encode is None:
            raise ValueError(
                "the closure was called before: this chunk's gradient has been added already"
            )
        if all(rep.grad is None for rep in self.reps):
            raise ValueError(
                "the representations have no gradient: call loss.backward() before the closure "
                "(one whose representations the loss does not use need not be called)"
            )
        gradients = [torch.zeros_like(r) if r.grad is None else r.grad for r in self.reps]
        with torch.enable_grad(), autocast_off():
            replay_chunk(self._joined_with_graph, self._state.random, _joined(gradients))
        self._encode = None  # the chunk's inputs may be freed

    def _forward(self) -> list[Tensor]:
        assert self._encode is not None
        with self._autocast():
            output = self._encode()
        outputs = output if isinstance(output, tuple | list) and output else [output]
        for reps in outputs:
            if not check_reps(reps).is_floating_point():
                raise ValueError(f"representations must be floating point, found {reps.dtype}")
        return list(outputs)

    def _joined_with_graph(self) -> Tensor:
        return with_graph(_joined(self._forward()))


def _joined(reps: Sequence[Tensor]) -> Tensor:
    """One tensor (C, D) as it is; several become one row, so that all share one backward pass."""
    if len(reps) == 1:
        return reps[0]
    return torch.cat([rep.reshape(1, -1).to(reps[0].device) for rep in reps], dim=1)


def _seems_frozen(in_sight: Sequence[Any]) -> bool:
    """Whether there is a module in sight, and nothing in sight that needs a gradient."""
    found_module, waiting = False, list(in_sight)
    # The attributes of an object whose method is called, such as a trainer that holds the model.
    attributes = [value for x in in_sight for value in getattr(x, "__dict__", {}).values()]
    waiting.extend(value for value in attributes if isinstance(value, nn.Module))
    while waiting:
        source = waiting.pop()
        if isinstance(source, nn.Module):
            found_module = True
            waiting.extend(source.parameters())
        elif isinstance(source, Tensor) and source.requires_grad:
            return False
        elif isinstance(source, Mapping):
            waiting.extend(source.values())
        elif isinstance(source, list | tuple):
            waiting.extend(source)
    return found_module


def cat_input_tensor(func: Callable[..., Result]) -> Callable[..., Result]:
    """Let a loss function take lists of tensors, one per chunk, where it expects one tensor.

    Each positional or keyword argument that is a list or tuple of tensors is concatenated along
    dimension 0. Everything else is passed on untouched.

    Args:
        func: A loss function.

    Returns:
        The decorated function. It raises ValueError for an empty list or tuple: nothing was
        collected, and nothing tells D. A process without rows passes ``[torch.empty(0, D)]``.

    Example:
        >>> @cat_input_tensor
        ... def count_rows(questions, passages):
        ...     return len(questions), len(passages)
        >>> count_rows([torch.ones(2, 3), torch.ones(1, 3)], passages=[torch.ones(4, 3)])
        (3, 4)
    """

    @wraps(func)
    def with_joined(*args: Any, **kwargs: Any) -> Result:
        return func(
            *[_concatenated(i, value) for i, value in enumerate(args)],
            **{name: _concatenated(name, value) for name, value in kwargs.items()},
        )

    return with_joined


def _concatenated(name: int | str, value: Any) -> Any:
    if type(value) not in (list, tuple):  # a named tuple is the function's own
        return value
    if not value:
        raise ValueError(
            f"argument {name!r} is an empty {type(value).__name__}: no representations were "
            "collected (a process without rows passes one tensor of 0 rows)"
        )
    return torch.cat(list(value)) if _all_tensors(value) else value


def _all_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


@overload
def gather_input_tensor(func: Callable[..., Result], axis: int = 0) -> Callable[..., Result]: ...
@overload
def gather_input_tensor(
    func: None = None, axis: int = 0
) -> Callable[[Callable[..., Result]], Callable[..., Result]]: ...
def gather_input_tensor(func: Callable[..., Any] | None = None, axis: int = 0) -> Any:
    """Let a loss function see the tensors of all processes, in rank order, on each of them.

    Each tensor among the positional and keyword arguments is gathered along ``axis``, with unequal
    counts per process. Only the own rows carry a gradient, and every process computes the loss of
    the whole batch. So the exact gradient is the *sum* of the processes' gradients: multiply the
    loss by the world size under DistributedDataParallel, which takes the mean, or add gradients up
    with :func:`gc_dpr.distributed.sum_gradients` and do not multiply.

    Integer tensors are gathered too. Row numbers such as ``target`` are not shifted: give numbers
    of the gathered batch, or make them inside the function. Tensors without dimensions, such as a
    temperature, and other arguments are passed on as they are. No-op on one process. Every process
    must call the function with the same tensor arguments.

    Args:
        func: A loss function. Without it, ``gather_input_tensor(axis=1)`` is a decorator.
        axis: The dimension along which the processes' tensors are joined.

    Returns:
        The decorated function. It raises TypeError for a list of tensors: ``cat_input_tensor`` goes
        above this decorator, not below.

    Example:
        >>> @cat_input_tensor
        ... @gather_input_tensor
        ... def contrastive_loss(questions, passages):
        ...     target = torch.arange(len(questions))
        ...     return nn.functional.cross_entropy(questions @ passages.T, target)
        >>> float(contrastive_loss([torch.eye(2)], passages=[100 * torch.eye(2)]))
        0.0
    """
    if func is None:
        return partial(gather_input_tensor, axis=axis)

    @wraps(func)
    def with_gathered(*args: Any, **kwargs: Any) -> Any:
        return func(
            *[_gathered(i, value, axis) for i, value in enumerate(args)],
            **{name: _gathered(name, value, axis) for name, value in kwargs.items()},
        )

    return with_gathered


def _gathered(name: int | str, value: Any, axis: int) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0:
        return gather_rows_own_gradient(value, dim=axis)
    if type(value) in (list, tuple) and value and _all_tensors(value):
        raise TypeError(
            f"gather_input_tensor takes tensors, but argument {name!r} is a "
            f"{type(value).__name__} of them: put @cat_input_tensor above @gather_input_tensor"
        )
    return value
