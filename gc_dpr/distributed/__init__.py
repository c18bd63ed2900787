"""Everything that knows torch.distributed. On one process every function is a no-op.

Processes are started by torchrun, and only its environment says how many there are. Tensors travel
as tensors, never pickled. Every process must call the collective functions in the same order.
"""

from __future__ import annotations

from gc_dpr.distributed.gathering import (
    gather_counts,
    gather_integers,
    gather_rows,
    gather_rows_own_gradient,
    gather_rows_with_gradient,
    largest_over_processes,
    sum_over_processes,
)
from gc_dpr.distributed.gradients import (
    broadcast_parameters,
    clip_gradients,
    is_fully_sharded,
    is_sharded,
    sum_gradients,
    without_gradient_sync,
)
from gc_dpr.distributed.process_group import (
    barrier,
    is_main,
    process_group,
    rank,
    world_size,
)

__all__ = [
    "barrier",
    "broadcast_parameters",
    "clip_gradients",
    "gather_counts",
    "gather_integers",
    "gather_rows",
    "gather_rows_own_gradient",
    "gather_rows_with_gradient",
    "is_fully_sharded",
    "is_main",
    "is_sharded",
    "largest_over_processes",
    "process_group",
    "rank",
    "sum_gradients",
    "sum_over_processes",
    "without_gradient_sync",
    "world_size",
]
