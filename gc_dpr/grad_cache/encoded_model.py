"""One model of class GradCache: what is known of it, and what it is between the two passes.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gc_dpr.distributed import is_fully_sharded, without_gradient_sync
from gc_dpr.grad_cache.rand_context import RandContext
from gc_dpr.grad_cache.step import ReplayState, encode_without_graph


def is_trainable(model: Any) -> bool:
    """Return whether a module has a parameter to train; any other callable may have one: yes."""
    return not isinstance(model, nn.Module) or any(p.requires_grad for p in model.parameters())


def reduces_gradients(model: Any) -> bool:
    """Return whether a model's backward pass reduces gradients over processes by itself."""
    return is_fully_sharded(model) or hasattr(model, "no_sync")


def without_sync(model: Any, *, only_if: bool) -> AbstractContextManager[None]:
    """Return a context in which such a model does not, under a condition."""
    return without_gradient_sync(model if only_if and reduces_gradients(model) else None)


class ChunkState(ReplayState):
    """A state that can itself be entered, as an overridden ``forward_backward`` may do.

    Attributes:
        trains: Encoding the chunk gave a graph, though its model seems frozen: something beside the
            model is trained, such as a head in ``get_rep_fn``.
    """

    trains: bool = False

    def __enter__(self) -> RandContext:
        return self.random.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.random.__exit__(*error)


def encode_chunk(
    forward: Callable[[], Tensor], devices: Sequence[Any], *, seems_frozen: bool
) -> tuple[Tensor, ChunkState]:
    """Encode a chunk without graph, and see whether a frozen model hides something to train.

    A model without trainable parameters is encoded with grad mode on: if nothing else is trained,
    no graph comes of it and it costs nothing; else the graph shows that, and is dropped.
    """
    has_graph = False

    def encode() -> Tensor:
        nonlocal has_graph
        with torch.set_grad_enabled(seems_frozen):
            reps = forward()
        has_graph = reps.requires_grad
        return reps.detach()

    reps, state = encode_without_graph(encode, devices)
    known = ChunkState(*state)
    known.trains = has_graph
    return reps, known


class EncodedModel(NamedTuple):
    """A model's first pass.

    Args:
        reps: (N, D) without graph.
        states: What the replay of each chunk needs, a kept one left out. Plain random contexts come
            from an overridden ``forward_no_grad``.
        kept: (C, D) with graph, where the last chunk kept it.
    """

    reps: Tensor
    states: Sequence[ReplayState | RandContext]
    kept: Tensor | None = None

    @property
    def trains(self) -> bool:
        """Whether a graph was seen, though the model seems frozen."""
        return any(isinstance(state, ChunkState) and state.trains for state in self.states)

    def replayed_pieces(self, gradient: Tensor, chunk_size: int) -> Sequence[Tensor]:
        """Cut the cached gradient (N, D) as the replayed chunks were."""
        rows = [state.rows for state in self.states if isinstance(state, ReplayState)]
        if len(rows) < len(self.states):  # random contexts do not tell how many rows there were
            return torch.split(gradient, chunk_size)
        return torch.split(gradient[: sum(rows)], rows)

    def kept_piece(self, gradient: Tensor) -> Tensor:
        """Return the rows of the cached gradient (N, D) that belong to the kept chunk."""
        kept_rows = 0 if self.kept is None else len(self.kept)
        return gradient[len(gradient) - kept_rows :]
