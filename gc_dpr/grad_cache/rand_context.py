"""Capture and replay of the random generators for one chunk.

A chunk is encoded twice: without a graph for the loss, with a graph for the gradient. Dropout must
draw the same mask both times, or the cached gradient belongs to another function. So the state of
the generators is captured before the first forward and put back for the second.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


def devices_of(*sources: Any) -> list[torch.device]:
    """Return the devices of all tensors and modules in ``sources``, each once, sorted by name.

    Args:
        *sources: Tensors, modules (their parameters and buffers), devices, and mappings, lists,
            tuples, sets or dataclasses of these in any nesting. Anything else holds no device.

    Example:
        >>> devices_of(nn.Linear(2, 2), [{"mask": torch.ones(1)}], "text")
        [device(type='cpu')]
    """
    found: set[torch.device] = set()
    waiting = list(sources)
    while waiting:
        source = waiting.pop()
        if isinstance(source, Tensor):
            found.add(source.device)
        elif isinstance(source, torch.device):
            found.add(_with_index(source))
        else:
            waiting.extend(_inside(source))
    return sorted(found, key=str)


def _inside(source: Any) -> Iterable[Any]:
    """What to look at next inside a container; nothing for all other things."""
    if isinstance(source, nn.Module):
        return [*source.parameters(), *source.buffers()]
    if isinstance(source, Mapping):  # also UserDict and a tokenizer's BatchEncoding
        return source.values()
    if isinstance(source, list | tuple | set | frozenset):
        return source
    if is_dataclass(source) and not isinstance(source, type):
        return [getattr(source, field.name) for field in fields(source)]
    return []


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` means the current GPU: give it its number, so that it is the same as a tensor's."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class RandContext:
    """The state of the random generators when it was made, to be replayed with ``with``.

    Inside the ``with`` block the generators continue from the captured state; after it they are as
    they were before it, so that a replay leaves no trace. It can be entered again and again.

    Captured are torch's CPU generator, that of every accelerator in ``sources`` and Python's
    ``random``. Not captured: numpy's generators and generators that a model owns.

    Args:
        *sources: The model and its inputs, or devices: see :func:`devices_of`. The devices of the
            model count, not those of the input alone, since dropout draws where the model computes.

    Example:
        >>> context = RandContext(torch.ones(1))
        >>> mask = torch.rand(3)
        >>> with context:
        ...     replayed = torch.rand(3)
        >>> bool((mask == replayed).all())
        True
    """

    def __init__(self, *sources: Any) -> None:
        accelerators = [device for device in devices_of(*sources) if device.type != "cpu"]
        self._states = _capture([torch.device("cpu"), *accelerators])
        self._python_state = random.getstate()
        self._outside: list[tuple[dict[torch.device, Tensor], tuple[Any, ...]]] = []

    def is_current(self) -> bool:
        """Whether no generator has moved since it was made."""
        now = _capture(list(self._states))
        return self._python_state == random.getstate() and all(
            torch.equal(state, now[device]) for device, state in self._states.items()
        )

    def __enter__(self) -> RandContext:
        self._outside.append((_capture(list(self._states)), random.getstate()))
        _restore(self._states)
        random.setstate(self._python_state)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        states, python_state = self._outside.pop()
        _restore(states)
        random.setstate(python_state)


def _capture(devices: list[torch.device]) -> dict[torch.device, Tensor]:
    return {device: _generators(device).get_rng_state(*_index(device)) for device in devices}


def _restore(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        _generators(device).set_rng_state(state, *_index(device))


def _generators(device: torch.device) -> Any:
    """The module that holds get_rng_state and set_rng_state for a kind of device."""
    if device.type == "meta":
        raise ValueError("cannot replay random numbers on the meta device: it holds no values")
    return torch if device.type == "cpu" else getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    """Only kinds of devices that come in numbers take one as an argument."""
    return () if device.type in ("cpu", "mps") else (device,)
