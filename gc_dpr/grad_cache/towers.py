"""The gradient cache over the towers of a batch: each with its chunks, encoder and kept graphs.

Both passes of ``step.py`` for whoever holds a batch as rows that can be put into chunks in any
order: the training pipeline, or a loop of your own.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gc_dpr.distributed import is_fully_sharded, without_gradient_sync
from gc_dpr.grad_cache.step import (
    ReplayState,
    Scaler,
    backward_cached,
    cache_gradients,
    check_reps,
    encode_without_graph,
    replay_chunk,
)

Autocast = Callable[[], AbstractContextManager[Any]]

_FEW_CHUNKS = 32


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
            encoded again. Each costs the memory of one chunk's activations during the whole step;
            the very last chunk of a step with few chunks costs nothing and is kept anyway.
        dtype: Of the representations, for a tower without rows.
        module: An encoder that reduces its own gradients over processes, as ``fully_shard`` makes
            it: it is kept from that until its last chunk of the step. Its forward is a collective,
            so every process must have the same number of chunks. Those that have fewer add empty
            ones, for which ``pad`` gives any one row; its representation is dropped.
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
    module: Any = None

    def __post_init__(self) -> None:
        rows = sum(len(chunk) for chunk in self.chunks)
        if rows != self.num_rows:
            raise ValueError(f"the chunks hold {rows} rows, the tower {self.num_rows}")
        if self.kept_graphs < 0:
            raise ValueError(f"kept_graphs must be at least 0, found {self.kept_graphs}")
        if self.module is not None and not is_fully_sharded(self.module):
            # DistributedDataParallel decides in the forward of a kept chunk when it will reduce
            raise ValueError(
                "module must be an encoder given to fully_shard, found "
                f"{type(self.module).__name__}; for DistributedDataParallel use GradCache, or no "
                "wrapper and sum_gradients"
            )


@dataclass(frozen=True, kw_only=True)
class EncodedTower:
    """A tower after the first pass: per chunk either its graph was kept or a state for the replay.

    Args:
        tower: What was encoded.
        reps: (N, D) without graph, in the order of the rows.
        graphs: Per chunk (C, D) with graph, or None where it was not kept.
        states: Per chunk what its replay needs, or None.
    """

    tower: Tower
    reps: Tensor
    graphs: Sequence[Tensor | None]
    states: Sequence[ReplayState | None]

    @property
    def replays(self) -> int:
        """Chunks that have to be encoded again for their gradient."""
        return sum(state is not None for state in self.states) if self.tower.trainable else 0


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
    encoded = [
        encode_tower(tower, autocast, kept_graphs=kept)
        for tower, kept in zip(towers, graphs_to_keep(towers), strict=True)
    ]
    gradients, loss = cache_gradients(
        loss_fn,
        [tower.reps for tower in encoded],
        trainable=[tower.trainable for tower in towers],
        scaler=scaler,
    )
    for step in backward_order(encoded):
        backward_chunk(encoded[step.tower], step, gradients[step.tower], autocast)
    return loss


def graphs_to_keep(towers: Sequence[Tower]) -> list[int]:
    """How many of its last chunks each tower keeps the graph of from the first pass.

    What the towers ask for, and besides what costs no memory: everything if each trainable tower is
    a single chunk, else the chunk that is encoded last of all, since its activations would be in
    memory alone anyway. Not with many chunks: what the loss of so large a batch takes would come on
    top, and there is little to save.
    """
    if all(len(tower.chunks) <= 1 for tower in towers if tower.trainable):
        return [len(tower.chunks) if tower.trainable else 0 for tower in towers]
    kept = [min(tower.kept_graphs, len(tower.chunks)) * tower.trainable for tower in towers]
    if towers[-1].trainable and 0 < len(towers[-1].chunks) <= _FEW_CHUNKS:
        kept[-1] = max(1, kept[-1])
    return kept


def encode_tower(
    tower: Tower, autocast: Autocast = nullcontext, *, kept_graphs: int
) -> EncodedTower:
    """First pass: encode all chunks, the last ``kept_graphs`` of them with a graph."""
    count = len(tower.chunks)
    joined: Tensor | None = None
    graphs: list[Tensor | None] = [None] * count
    states: list[ReplayState | None] = [None] * count
    state: ReplayState | None = None
    for i, rows in enumerate(tower.chunks):
        forward = _forward_of(tower, rows, autocast)
        if i >= count - kept_graphs:
            graphs[i] = chunk_reps = check_reps(forward(), rows=len(rows))
        else:
            chunk_reps, state = encode_without_graph(
                forward, tower.devices, rows=len(rows), before=state
            )
            states[i] = state
        if joined is None:
            joined = chunk_reps.new_empty((tower.num_rows, chunk_reps.shape[1]))  # (N, D)
        # At once to its place: small tensors that stay between large ones that go would leave the
        # memory in pieces.
        joined[rows.to(joined.device)] = chunk_reps.detach()
    if joined is None:
        empty = (0, tower.embedding_dim)
        joined = torch.zeros(empty, dtype=tower.dtype, device=tower.devices[0])
    return EncodedTower(tower=tower, reps=joined, graphs=graphs, states=states)


class BackwardStep(NamedTuple):
    """One chunk's backward pass.

    Args:
        tower: Number of the tower.
        chunk: Number of the tower's chunk.
        reduces: It is the last of its tower's module, so that it may set off the reduction of
            gradients over processes.
    """

    tower: int
    chunk: int
    reduces: bool


def backward_order(encoded: Sequence[EncodedTower]) -> list[BackwardStep]:
    """The chunks of all trainable towers: kept graphs first, to free them, then the replays."""
    trained = [(i, tower) for i, tower in enumerate(encoded) if tower.tower.trainable]
    kept = [(i, j) for i, t in trained for j, graph in enumerate(t.graphs) if graph is not None]
    replays = [(i, j) for i, t in trained for j, state in enumerate(t.states) if state is not None]
    modules = [id(encoded[i].tower.module) for i, _ in (*kept, *replays)]
    last = {module: place for place, module in enumerate(modules)}
    return [
        BackwardStep(i, j, last[modules[place]] == place)
        for place, (i, j) in enumerate((*kept, *replays))
    ]


def backward_chunk(
    encoded: EncodedTower, step: BackwardStep, gradient: Tensor, autocast: Autocast = nullcontext
) -> None:
    """Second pass of one chunk: back-propagate its cached gradient into the parameters.

    Args:
        encoded: The chunk's tower after the first pass.
        step: Which chunk.
        gradient: (N, D) cached gradient of the tower, in the order of the rows.
        autocast: As in the first pass.
    """
    tower, rows = encoded.tower, encoded.tower.chunks[step.chunk]
    chunk_gradient = gradient[rows.to(gradient.device)]
    with nullcontext() if step.reduces else without_gradient_sync(tower.module):
        graph, state = encoded.graphs[step.chunk], encoded.states[step.chunk]
        if graph is not None:
            backward_cached(graph, chunk_gradient)
        elif state is not None:
            replay_chunk(_forward_of(tower, rows, autocast), state.random, chunk_gradient)


def _forward_of(tower: Tower, rows: Tensor, autocast: Autocast) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        chunk = tower.pad(rows)
        with autocast():
            reps = tower.encode(chunk)
        return reps if len(rows) else reps[:0]

    return forward
