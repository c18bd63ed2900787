"""The gradient cache in a few functions, shared by the class API and the training pipeline.

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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gc_dpr.grad_cache.chunking import restore_order
from gc_dpr.grad_cache.rand_context import RandContext

Scaler = torch.amp.GradScaler
Autocast = Callable[[], AbstractContextManager[Any]]


class ReplayState(NamedTuple):
    """What a chunk needs to be encoded again: its random generators, and how many rows it gave."""

    random: RandContext
    rows: int


@dataclass(frozen=True, kw_only=True)
class Tower:
    """One side of a batch: how to encode it and how it is cut.

    Args:
        encode: A padded chunk to its representations (C, D). Two towers may share one encoder.
        chunks: Row numbers (C,) of each chunk; together each of 0..num_rows-1 exactly once.
        pad: Row numbers (C,) to the padded chunk on the device. Called twice for a replayed chunk.
        num_rows: N of this process; 0 is a process without a share, and then has no chunks.
        embedding_dim: D, for a tower without rows, which no encoder can tell it.
        devices: Where the encoder computes; its random generators are replayed. The first holds the
            representations of a tower without rows.
        trainable: False for an encoder whose parameters are all frozen: it is never replayed.
        kept_graphs: The last so many chunks keep their graph from the first pass and are not
            encoded again. Each costs the memory of one chunk's activations during the whole step.
        dtype: Of the representations, for a tower without rows.
    """

    encode: Callable[[dict[str, Tensor]], Tensor]
    chunks: Sequence[Tensor]
    pad: Callable[[Tensor], dict[str, Tensor]]
    num_rows: int
    embedding_dim: int
    devices: Sequence[torch.device]
    trainable: bool = True
    kept_graphs: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        rows = sum(len(chunk) for chunk in self.chunks)
        if rows != self.num_rows:
            raise ValueError(f"the chunks hold {rows} rows, the tower {self.num_rows}")
        if self.kept_graphs < 0:
            raise ValueError(f"kept_graphs must be at least 0, found {self.kept_graphs}")


@dataclass(frozen=True, kw_only=True)
class _FirstPass:
    """A tower after the first pass: per chunk either a graph was kept or a state for the replay."""

    tower: Tower
    reps: Tensor  # (N, D) without graph, in the order of the rows
    graphs: Sequence[Tensor | None]  # (C, D) with graph, for the kept chunks
    states: Sequence[ReplayState | None]  # for the chunks to replay


def cached_step(
    towers: Sequence[Tower],
    loss_fn: Callable[..., Tensor],
    *,
    scaler: Scaler | None = None,
    autocast: Autocast = nullcontext,
) -> Tensor:
    """Add the gradient of the loss of the whole batch to every parameter's ``.grad``.

    Equal to ``loss_fn(*all representations).backward()`` in one piece, at the memory of one chunk.
    If no trainable tower has more than one chunk, nothing is encoded twice. On several processes
    ``loss_fn`` does what communication there is, and the caller adds up the gradients.

    Args:
        towers: The sides of the batch, in the order of the arguments of ``loss_fn``.
        loss_fn: (N, D) per tower, float32 or float64, to a scalar. It runs once, outside autocast.
            Parameters that it uses itself get their gradient too.
        scaler: For fp16: the loss is scaled once, so all gradients are; the caller unscales.
        autocast: Makes the context in which chunks are encoded, anew for each of them.

    Returns:
        The loss, detached and not scaled.

    Raises:
        ValueError: Representations that are not (C, D), a loss that is not a scalar or depends on
            nothing that can be trained. No gradient has been touched then.
    """
    fits = all(len(tower.chunks) <= 1 for tower in towers if tower.trainable)
    passes = [_first_pass(tower, autocast, keep_all=fits) for tower in towers]
    trainable = [tower.trainable for tower in towers]
    gradients, loss = cache_gradients(
        loss_fn, [first.reps for first in passes], trainable=trainable, scaler=scaler
    )
    for first, gradient in zip(passes, gradients, strict=True):
        if first.tower.trainable:
            _second_pass(first, gradient, autocast)
    return loss


def _first_pass(tower: Tower, autocast: Autocast, *, keep_all: bool) -> _FirstPass:
    """Encode all chunks; the last ones with a graph where the tower may keep it."""
    count = len(tower.chunks)
    kept = 0 if not tower.trainable else count if keep_all else min(tower.kept_graphs, count)
    reps: list[Tensor] = []
    graphs: list[Tensor | None] = [None] * count
    states: list[ReplayState | None] = [None] * count
    for i, rows in enumerate(tower.chunks):
        forward = _forward_of(tower, rows, autocast)
        if i >= count - kept:
            graphs[i] = check_reps(forward(), rows=len(rows))
            reps.append(graphs[i].detach())  # type: ignore[union-attr]
        else:
            chunk_reps, states[i] = encode_without_graph(forward, tower.devices, rows=len(rows))
            reps.append(chunk_reps)
    if not reps:
        empty = (0, tower.embedding_dim)
        joined = torch.zeros(empty, dtype=tower.dtype, device=tower.devices[0])
    else:
        joined = restore_order(reps, tower.chunks)
    return _FirstPass(tower=tower, reps=joined, graphs=graphs, states=states)


def _second_pass(first: _FirstPass, gradient: Tensor, autocast: Autocast) -> None:
    """Back-propagate the cached gradient (N, D): kept graphs first, to free them, then replays."""
    chunks = first.tower.chunks
    for rows, graph in zip(chunks, first.graphs, strict=True):
        if graph is not None:
            backward_cached(graph, gradient[rows.to(gradient.device)])
    for rows, state in zip(chunks, first.states, strict=True):
        if state is not None:
            forward = _forward_of(first.tower, rows, autocast)
            replay_chunk(forward, state.random, gradient[rows.to(gradient.device)])


def _forward_of(tower: Tower, rows: Tensor, autocast: Autocast) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        chunk = tower.pad(rows)
        with autocast():
            return tower.encode(chunk)

    return forward


def encode_without_graph(
    forward: Callable[[], Tensor], devices: Iterable[Any], *, rows: int | None = None
) -> tuple[Tensor, ReplayState]:
    """Encode a chunk without graph, and capture what it takes to encode it again alike.

    Args:
        forward: Encodes the chunk to (C, D).
        devices: Where it computes, in any form :func:`~gc_dpr.grad_cache.rand_context.devices_of`
            takes.
        rows: C, where it is known.

    Returns:
        The representations and the state for :func:`replay_chunk`.
    """
    random = RandContext(*devices)
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
    with ExitStack() as stack:
        for device_type in {leaf.device.type for leaf in leaves}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        loss = loss_fn(*leaves)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss function must return a scalar tensor, found {found}")
    if not loss.requires_grad:
        raise ValueError(
            "the loss depends on nothing that can be trained: every tower is frozen, or the loss "
            "function detaches its inputs"
        )
    torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return gradients, loss.detach()


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
