"""Find the parts of an encoder with which no gradient cache can be exact.

The cache encodes a batch in chunks, and most chunks twice. That gives the gradient of the undivided
batch if an encoder treats every text alone, and gives the same representation each time. What
breaks this is found by experiment, not by a list of names: forwards are compared.

Letters: C chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gc_dpr.grad_cache.rand_context import RandContext
from gc_dpr.training.gradient_check.module_calls import (
    agree_in_row,
    close,
    first_difference,
    record_calls,
    tensors_in,
    with_rows,
)
from gc_dpr.training.gradient_check.module_state import (
    ModuleState,
    generators_of,
    unchanged,
    without_dropout,
)

Cause = Literal["state", "randomness", "rows", "padding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A module with which a cached step is not exact.

    Attributes:
        module: Its path in the encoder; ``""`` is the encoder itself.
        type: Its class.
        cause: ``"state"``: a forward changes it. ``"randomness"``: it draws random numbers that
            are not replayed. ``"rows"``: a text's result depends on the other texts of its chunk.
            ``"padding"``: it depends on how far the text is padded.
        reason: What was seen and what to do, one sentence each.
    """

    module: str
    type: str
    cause: Cause
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the encoder'} ({self.type}): {self.reason}"


def find_inexact_modules(
    encoder: nn.Module,
    chunk: Any,
    *,
    training: bool = True,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Finding]:
    """Name every module with state that a forward changes, and the first one of each other cause.

    What follows the first module with a random source of its own, or the first that mixes rows,
    cannot be judged: it has other inputs. So look again when that one is mended.

    Args:
        encoder: Any module; afterwards it is as before.
        chunk: One chunk of its input: a tensor; a list or mapping of tensors (positional or keyword
            arguments); or a tuple (list, dict). Values that are no tensors, ``None`` too, are
            passed on. At least two different rows are needed to see rows influence each other; a
            few short ones do.
        training: Put an encoder in evaluation mode into training mode first. One that is in
            training mode keeps the mode of each submodule: a BatchNorm frozen by ``eval()`` stays.
        autocast: Makes the context to encode in.

    Returns:
        Empty for an encoder that the cache is exact for, such as BERT with dropout.

    Example:
        >>> encoder = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        >>> for finding in find_inexact_modules(encoder, torch.randn(4, 4)):
        ...     print(finding.module, finding.type, finding.cause)
        1 BatchNorm1d state
        1 BatchNorm1d rows
        >>> find_inexact_modules(encoder[::2], torch.randn(4, 4))
        []
    """
    with unchanged(encoder) as (start,), torch.no_grad():
        if training and not encoder.training:
            encoder.train()
        probe = _Probe(encoder, chunk, start, autocast)
        return [*_changed_state(probe), *_foreign_randomness(probe), *_mixed_rows(probe)]


class _Probe:
    """Encodes a chunk again and again, always with the same numbers from the replayed generators.

    Those are the ones that the cache replays too: torch's and Python's.
    """

    def __init__(
        self,
        encoder: nn.Module,
        chunk: Any,
        start: ModuleState,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.encoder, self.chunk, self.start = encoder, chunk, start
        self.size = next((len(t) for t in tensors_in(chunk) if t.dim()), 0)  # C
        self._autocast = autocast
        self._random = RandContext(encoder, chunk)

    def encode(self, chunk: Any) -> list[Tensor]:
        """The output's tensors."""
        with self._random, self._autocast():
            return list(tensors_in(_call(self.encoder, chunk)))

    def finding(self, module: str, cause: Cause, reason: str) -> Finding:
        name = type(self.encoder.get_submodule(module)).__name__
        return Finding(module, name, cause, reason)


def _call(encoder: nn.Module, chunk: Any) -> Any:
    if isinstance(chunk, tuple) and [*map(type, chunk)] == [list, dict]:
        return encoder(*chunk[0], **chunk[1])
    if isinstance(chunk, Mapping):
        return encoder(**chunk)
    return encoder(*chunk) if isinstance(chunk, list | tuple) else encoder(chunk)


def _changed_state(probe: _Probe) -> list[Finding]:
    """What a forward leaves changed: buffers at once, attributes if they change each time.

    An attribute that only the first forward sets is a memory of something computed before.
    """
    probe.encode(probe.chunk)
    first = ModuleState(probe.encoder)
    probe.encode(probe.chunk)
    second = ModuleState(probe.encoder)
    changed = probe.start.changes(first, registered=True)
    for module, names in first.changes(second, registered=False).items():
        changed[module] = [*changed.get(module, []), *names]
    probe.start.restore()
    return [
        probe.finding(
            module,
            "state",
            f"each forward changes {', '.join(names)}, and the cache encodes most chunks twice; "
            "freeze it with eval(), or use a layer without such state (LayerNorm for BatchNorm)",
        )
        for module, names in sorted(changed.items())
    ]


def _foreign_randomness(probe: _Probe) -> list[Finding]:
    """The first module that gives something else although input and replayed numbers are equal."""
    once = probe.encode(probe.chunk)
    probe.start.restore(generators=False)
    again = probe.encode(probe.chunk)
    uses_numpy = probe.start.numpy_was_used(ModuleState(probe.encoder))
    probe.start.restore()
    if _all_close(once, again):
        return []

    before = record_calls(probe.encoder, lambda: probe.encode(probe.chunk))
    probe.start.restore(generators=False)
    after = record_calls(probe.encoder, lambda: probe.encode(probe.chunk))
    probe.start.restore()
    module = first_difference(before, after, close) or ""
    owned = [type(g).__name__ for path, g in generators_of(probe.encoder) if path == module]
    source = f"its own {owned[0]}" if owned else "numpy's generator" if uses_numpy else None
    return [
        probe.finding(
            module,
            "randomness",
            "the same input and the same state of torch's and Python's global generators give "
            f"another output; it draws from {source or 'a source of its own'}, which is not "
            f"replayed{'' if source else ', or changes a state that is no buffer'}. Draw from "
            "torch's global generator instead",
        )
    ]


def _mixed_rows(probe: _Probe) -> list[Finding]:
    """The first module whose result for a row changes when the other rows do.

    The chunk keeps its shape, so the row gets the same random numbers and the same arithmetic. The
    first and the last row are tried: a module may look only backward, or only forward.
    """
    if probe.size < 2:
        return []
    with without_dropout(probe.encoder):
        reference = _fresh(probe, probe.chunk)
        if not _all_close(reference, _fresh(probe, probe.chunk)):
            return []  # random anyway, and named above
        for row in (0, probe.size - 1):
            others = with_rows(
                probe.chunk, torch.full((probe.size,), row, dtype=torch.int64), probe.size
            )
            agree = agree_in_row(row, probe.size)
            changed = _fresh(probe, others)
            if all(agree(*pair) is not False for pair in zip(reference, changed, strict=True)):
                continue
            before = record_calls(probe.encoder, lambda: _fresh(probe, probe.chunk))
            after = record_calls(probe.encoder, functools.partial(_fresh, probe, others))
            return _mixing_modules(probe, first_difference(before, after, agree) or "")
    return []


def _mixing_modules(probe: _Probe, first: str) -> list[Finding]:
    reason = (
        "the result of a text depends on the other texts of its chunk, so no way of cutting a "
        "batch gives the gradient of the undivided one; freeze it with eval(), or use a layer "
        "that treats every text alone (LayerNorm for BatchNorm)"
    )
    norms = [
        name
        for name, part in probe.encoder.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training
    ]
    return [probe.finding(name, "rows", reason) for name in dict.fromkeys([first, *norms])]


def _fresh(probe: _Probe, chunk: Any) -> list[Tensor]:
    probe.start.restore()
    return probe.encode(chunk)


def _all_close(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(close, one, other))
