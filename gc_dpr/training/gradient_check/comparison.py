"""Compare two ways to the gradient of one loss, tower by tower.

For any training loop: give it your encoders, a function that runs the cached step and one that
computes the same loss in one piece. For the pipeline's own step and batches see
:func:`gc_dpr.training.gradient_check.batch_check.check_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gc_dpr.errors import GcDprError
from gc_dpr.grad_cache.rand_context import RandContext
from gc_dpr.training.gradient_check.module_state import unchanged

# Largest relative difference that rounding explains, by what the encoders compute in (TRAPS: B32).
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# A parameter with less than this share of its tower's gradient is measured by this share: the bias
# of attention keys, say, has a gradient of zero in theory and of mere rounding in practice.
SMALLEST_SHARE = 1e-2
SHARED = "shared"

Gradients = dict[nn.Parameter, Tensor]


class GradientError(GcDprError):
    """Gradients differ where they must not, or cannot be compared."""


@dataclass(frozen=True, slots=True)
class TowerDifference:
    """How far the two gradients of a tower are apart.

    Attributes:
        tower: Its name; ``"shared"`` for parameters that several towers have in common.
        difference: The largest over its parameters of
            ``||cached - undivided|| / max(||undivided||, share of the tower's norm)``; infinite if
            a gradient is not finite.
        parameter: Where that is; empty for a frozen tower.
        parameters: Number of trainable parameter tensors; 0 = frozen, nothing was compared.
    """

    tower: str
    difference: float
    parameter: str
    parameters: int


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Outcome of one comparison.

    Attributes:
        towers: One entry per tower, in the order given, then the shared parameters.
        cached_loss: Loss of the cached step.
        undivided_loss: Loss in one piece.
        loss_difference: The difference of the two, relative to the second.
        dtype: What the encoders compute in.
        tolerance: Largest difference that still counts as equal.
    """

    towers: tuple[TowerDifference, ...]
    cached_loss: float
    undivided_loss: float
    loss_difference: float
    dtype: torch.dtype
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether loss and gradients agree."""
        differences = [self.loss_difference, *(tower.difference for tower in self.towers)]
        return all(difference <= self.tolerance for difference in differences)

    @property
    def worst(self) -> TowerDifference:
        """The tower with the largest difference."""
        return max(self.towers, key=lambda tower: tower.difference)


def compare_gradients(
    towers: Mapping[str, nn.Module],
    *,
    cached: Callable[[], Tensor],
    undivided: Callable[[], Tensor],
    dtype: torch.dtype | None = None,
    tolerance: float | None = None,
) -> GradientCheck:
    """Run both ways from the same start and compare the gradients that they leave.

    Both begin without gradients, with the same buffers and the same random numbers. Gradients,
    buffers, modes and random generators are afterwards as they were; there is no optimizer step.

    With dropout on, the two agree only if ``undivided`` encodes the same chunks in the same order,
    all in one graph; against the batch in one piece, set dropout to 0. float64 (``model.double()``)
    tells rounding from mistakes best.

    Args:
        towers: Name → encoder. A loss with parameters of its own can be one more.
        cached: Runs the cached step, so that gradients are in ``.grad``; returns the loss.
        undivided: The same in one piece of plain autograd. If it leaves no gradient, the
            ``backward()`` of the loss that it returns is called.
        dtype: What the encoders compute in; the default is the coarsest dtype of the parameters.
            Give it under autocast.
        tolerance: The default depends on ``dtype``: 1e-12 in float64, 1e-5 in float32, else 1e-2.

    Raises:
        ValueError: No trainable parameter.
        GradientError: One of the two leaves no gradient at all, or the gradient is zero.

    Example:
        >>> from gc_dpr.grad_cache import GradCache
        >>> encoder, x = nn.Linear(4, 2).double(), torch.randn(6, 4, dtype=torch.float64)
        >>> loss_fn = lambda a, b: nn.functional.cross_entropy(a @ b.T, torch.arange(6))
        >>> cache = GradCache([encoder, encoder], chunk_sizes=2, loss_fn=loss_fn)
        >>> check = compare_gradients(
        ...     {"left": encoder, "right": encoder},
        ...     cached=lambda: cache(x, x + 1),
        ...     undivided=lambda: loss_fn(encoder(x), encoder(x + 1)),
        ... )
        >>> check.passed, [tower.tower for tower in check.towers]
        (True, ['shared'])
    """
    groups = _parameters_by_tower(towers)
    parameters = [p for group in groups.values() for p in group.values()]
    if not parameters:
        raise ValueError("no tower has a parameter that requires a gradient: nothing to compare")
    dtype = dtype or coarsest(*(p.dtype for p in parameters))
    start = RandContext(*towers.values())
    with unchanged(*towers.values()) as states:
        with start:
            cached_loss, first = _run(cached, parameters, what="cached")
        for state in states:
            state.restore()
        with start:
            undivided_loss, second = _run(undivided, parameters, what="undivided")
    if not any(bool(gradient.ne(0).any()) for gradient in second.values()):
        raise GradientError(
            "the undivided gradient is zero in every parameter, so there is nothing to compare: "
            "every text is already certain of its partner; use more texts or a higher temperature"
        )
    return GradientCheck(
        towers=tuple(_difference(name, group, first, second) for name, group in groups.items()),
        cached_loss=cached_loss,
        undivided_loss=undivided_loss,
        loss_difference=_relative(abs(cached_loss - undivided_loss), abs(undivided_loss)),
        dtype=dtype,
        tolerance=TOLERANCES.get(dtype, 1e-2) if tolerance is None else tolerance,
    )


def _parameters_by_tower(towers: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Parameter]]:
    """Tower → name → trainable parameter; each parameter once, common ones under "shared"."""
    users: dict[nn.Parameter, list[tuple[str, str]]] = {}
    for tower, module in towers.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                users.setdefault(parameter, []).append((tower, name))
    groups: dict[str, dict[str, nn.Parameter]] = {tower: {} for tower in towers}
    for parameter, places in users.items():
        group = places[0][0] if len(places) == 1 else SHARED
        groups.setdefault(group, {})[places[0][1]] = parameter
    shared_only = {tower for places in users.values() if len(places) > 1 for tower, _ in places}
    return {name: group for name, group in groups.items() if group or name not in shared_only}


def _run(
    step: Callable[[], Tensor], parameters: list[nn.Parameter], *, what: str
) -> tuple[float, Gradients]:
    """The loss of one way, and the gradients it leaves, which are taken off the parameters."""
    loss = step()
    if all(p.grad is None for p in parameters) and loss.requires_grad:
        torch.autograd.backward(loss)
    gradients = {p: p.grad for p in parameters if p.grad is not None}
    if not gradients:
        raise GradientError(f"the {what} way left no gradient in any parameter of the towers")
    for parameter in parameters:
        parameter.grad = None
    return float(loss.detach()), gradients


def _difference(
    tower: str, group: dict[str, nn.Parameter], first: Gradients, second: Gradients
) -> TowerDifference:
    """Where the gradients of a tower differ most, relative to their size."""
    apart = {name: _distance(first.get(p), second.get(p)) for name, p in group.items()}
    norms = {name: _distance(second.get(p), None) for name, p in group.items()}
    floor = SMALLEST_SHARE * math.hypot(*norms.values())
    relative = {name: _relative(apart[name], max(norms[name], floor)) for name in group}
    worst = max(relative, key=lambda name: relative[name], default="")
    return TowerDifference(tower, relative.get(worst, 0.0), worst, len(group))


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    """Euclidean norm of the difference; no gradient counts as zeros."""
    if one is None and other is None:
        return 0.0
    left, right = (None if x is None else x.detach().to("cpu", torch.float64) for x in (one, other))
    if left is None or right is None:
        return float(torch.linalg.vector_norm(left if right is None else right))
    return float(torch.linalg.vector_norm(left - right))


def _relative(difference: float, size: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The floating-point dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
