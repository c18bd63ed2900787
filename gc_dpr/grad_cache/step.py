"""The gradient cache in a few functions, shared by its class, its decorators and its towers.

    1. encode every chunk without a graph, remembering the random generators   encode_without_graph
    2. loss of all representations; keep its gradient w.r.t. each of them      cache_gradients
    3. encode chunk by chunk with a graph and back-propagate the cached rows   replay_chunk

The gradient of the loss with respect to the parameters is, by the chain rule, the sum over rows of
(d loss / d representation) * (d representation / d parameters). Step 2 gives the first factor for
all rows; step 3 needs only one chunk's activations at a time for the second. See
docs/gradient_cache.md and Gao et al. 2021, arXiv 2101.06983, section 3.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gc_dpr.grad_cache.rand_context import RandContext

Scaler = torch.amp.GradScaler


class ReplayState(NamedTuple):
    """What a chunk needs to be encoded again: its random generators, and how many rows it gave."""

    random: RandContext
    rows: int


def encode_without_graph(
    forward: Callable[[], Tensor],
    devices: Iterable[Any],
    *,
    rows: int | None = None,
    before: ReplayState | None = None,
) -> tuple[Tensor, ReplayState]:
    """Encode a chunk without graph, and capture what it takes to encode it again alike.

    Args:
        forward: Encodes the chunk to (C, D).
        devices: Where it computes, in any form :func:`~gc_dpr.grad_cache.rand_context.devices_of`
            takes.
        rows: C, where it is known.
        before: State of the chunk before. Where that drew no random numbers, as without dropout,
            its generators are shared instead of captured once more.

    Returns:
        The representations and the state for :func:`replay_chunk`.
    """
    shared = before is not None and before.random.is_current()
    random = before.random if before is not None and shared else RandContext(*devices)
    with torch.no_grad():
        reps = check_reps(forward(), rows=rows)
    # Where the caller autocasts around the whole step, older torch would use the weights cast here,
    # without a graph, in the replay as well, and lose their gradient.
    torch.clear_autocast_cache()
    return reps, ReplayState(random, len(reps))


def cache_gradients(
    loss_fn: Callable[..., Tensor],
    reps: Sequence[Tensor],
    *,
    trainable: Sequence[bool] | None = None,
    scaler: Scaler | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return the gradient of the loss with respect to every representation, and the loss.

    Args:
        loss_fn: The representations, in this order, to a scalar. Runs in float32, or in float64
            where they are float64, with autocast off.
        reps: (N, D) each; no graph is followed beyond them.
        trainable: Which of them need a gradient; by default all.
        scaler: The gradients are of the scaled loss, the returned loss is not scaled.

    Returns:
        The gradients, shaped as the representations (zeros where none is needed or the loss does
        not depend on them), and the detached loss.

    Raises:
        ValueError: The loss is not a scalar tensor or depends on nothing that needs a gradient.
    """
    needs = [True] * len(reps) if trainable is None else trainable
    leaves = [_leaf(r, requires_grad=needed) for r, needed in zip(reps, needs, strict=True)]
    with ExitStack() as stack:  # around the backward pass, too: it would follow the caller's
        for device_type in {leaf.device.type for leaf in leaves}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        loss = loss_fn(*leaves)
        _check_loss(loss)
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return gradients, loss.detach()


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss function must return a scalar tensor, found {found}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on nothing that can be trained: every tower is frozen, or the loss "
            "function detaches its inputs"
        )


def _leaf(reps: Tensor, *, requires_grad: bool) -> Tensor:
    dtype = torch.float64 if reps.dtype == torch.float64 else torch.float32
    return reps.detach().to(dtype).requires_grad_(requires_grad)


def replay_chunk(forward: Callable[[], Tensor], random: RandContext, gradient: Tensor) -> None:
    """Encode a chunk again with a graph and the same random numbers, and add up its gradients.

    Args:
        forward: What encoded the chunk the first time.
        random: Its captured random generators.
        gradient: (C, D) cached gradient of the chunk's representations.
    """
    with random:
        reps = forward()
    backward_cached(check_reps(reps, rows=len(gradient)), gradient)


def backward_cached(reps: Tensor, gradient: Tensor) -> None:
    """Back-propagate ``gradient`` (C, D) through the graph of ``reps`` (C, D) into the parameters.

    Nothing is multiplied here: a scaler's factor is already in the cached gradient.
    """
    torch.autograd.backward(reps, gradient.to(reps.dtype))


def check_reps(reps: Any, *, rows: int | None = None) -> Tensor:
    """Return the representations of a chunk, or say what is wrong with them.

    Raises:
        TypeError: Not a tensor.
        ValueError: Not of shape (C, D), or C is not ``rows``.
    """
    if not isinstance(reps, Tensor):
        raise TypeError(
            f"the encoder must return a tensor (C, D), found {type(reps).__name__}: "
            "take the representation out of the model's output (class API: get_rep_fn)"
        )
    if reps.dim() != 2 or (rows is not None and len(reps) != rows):
        wanted = "C" if rows is None else rows
        raise ValueError(
            f"the encoder must return one representation per row, shape ({wanted}, D), "
            f"found {tuple(reps.shape)}"
        )
    return reps
