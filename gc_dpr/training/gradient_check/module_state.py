"""Run a module without leaving a trace, and under other conditions than its own.

A check runs a model many times. Whatever a forward or a backward pass may change is put back:
gradients, buffers, plain attributes such as a counter, random generators.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gc_dpr.grad_cache.rand_context import RandContext

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DROPOUT = ("dropout", "drop_path", "droppath", "pdrop", "layerdrop")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One value of a module: where it is kept, and what it was."""

    holder: dict[str, Any]
    key: str
    value: Any
    registered: bool  # a parameter or buffer, not just an attribute
    content: Tensor | None = None  # of a tensor: a copy; of a parameter, which is large, two sums

    def restore(self) -> None:
        if self.key not in self.holder or self.holder[self.key] is not self.value:
            self.holder[self.key] = self.value
        if self.content is None or isinstance(self.value, nn.Parameter):
            return
        if not _equal(self.value, self.content):
            with torch.no_grad():
                self.value.copy_(self.content)

    def differs(self, later: _Entry) -> bool:
        if self.content is not None and later.content is not None:
            return not _equal(self.content, later.content)
        return self.value is not later.value and self.value != later.value


class ModuleState:
    """What a module's forward may change, as it was when this was made.

    That is its buffers; attributes of its submodules that are tensors, numbers or text; random
    generators that are such attributes; and numpy's global generator. Not the global generators of
    torch and Python, nor what lies deeper inside other objects. A forward that changes parameters
    is noticed, but they cannot be put back: to copy them would take the memory of the weights.

    Args:
        module: Looked at with all its submodules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entries = dict(_entries_of(module))
        self._generators = [_generator_state(generator) for _, generator in generators_of(module)]
        self._numpy_state = np.random.get_state()  # noqa: NPY002 - modules may draw from it

    def restore(self, *, generators: bool = True) -> None:
        """Put everything back.

        Args:
            generators: Also numpy's global generator and those that the module owns.
        """
        for name, entry in _entries_of(self._module, copies=False):
            if name not in self._entries:  # a forward has added it
                del entry.holder[entry.key]
        for entry in self._entries.values():
            entry.restore()
        if generators:
            for put_back, state in self._generators:
                put_back(copy.deepcopy(state))
            np.random.set_state(self._numpy_state)  # noqa: NPY002 - see above

    def changes(self, later: ModuleState, *, registered: bool) -> dict[str, list[str]]:
        """What is new or different in ``later``: name of the submodule → names of its values.

        Args:
            later: Another state of the same module.
            registered: Look at parameters and buffers; otherwise at the other attributes.
        """
        changed: dict[str, list[str]] = {}
        for name, entry in later._entries.items():
            before = self._entries.get(name)
            if entry.registered == registered and (before is None or before.differs(entry)):
                changed.setdefault(name.rpartition(".")[0], []).append(entry.key)
        return changed

    def numpy_was_used(self, later: ModuleState) -> bool:
        """Whether numpy's global generator has moved on."""
        pairs = zip(self._numpy_state, later._numpy_state, strict=True)
        return not all(np.array_equal(before, after) for before, after in pairs)


def _entries_of(module: nn.Module, *, copies: bool = True) -> Iterator[tuple[str, _Entry]]:
    for path, owner in module.named_modules():
        attributes = {k: v for k, v in vars(owner).items() if k not in _OF_EVERY_MODULE}
        for holder, registered, names in (
            (owner._parameters, True, owner._parameters),
            (owner._buffers, True, owner._buffers),
            (vars(owner), False, attributes),
        ):
            for key in list(names):
                value, name = holder[key], f"{path}.{key}"
                if isinstance(value, Tensor):
                    whole = not isinstance(value, nn.Parameter)
                    content = _content(value.detach(), whole=whole) if copies else None
                    yield name, _Entry(holder, key, value, registered, content)
                elif value is None or isinstance(value, bool | int | float | str):
                    yield name, _Entry(holder, key, value, registered)


def _content(value: Tensor, *, whole: bool) -> Tensor:
    if whole or not value.is_floating_point():
        return value.clone()
    return torch.stack([value.sum(), torch.linalg.vector_norm(value)])


def generators_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(submodule's name, generator) of every random generator that is an attribute."""
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    for path, owner in module.named_modules():
        for value in vars(owner).values():
            if isinstance(value, kinds):
                yield path, value


def _generator_state(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    """How to put a generator's state back, and the state."""
    if isinstance(generator, np.random.Generator):
        source = generator.bit_generator
        return lambda state: setattr(source, "state", state), copy.deepcopy(source.state)
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    return generator.set_state, generator.get_state()


def _equal(one: Tensor, other: Tensor) -> bool:
    """Same values; NaN equals NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def unchanged(*modules: nn.Module) -> Iterator[list[ModuleState]]:
    """Anything may be done with the modules inside the block; afterwards they are as before.

    Inside, the parameters begin without a gradient. Afterwards gradients, buffers, plain
    attributes, training modes, the modules' own generators and the global ones of torch, Python and
    numpy are what they were.

    Yields:
        One state per module, to go back to the beginning in between.
    """
    gradients = [(p, p.grad) for module in modules for p in module.parameters()]
    modes = [(part, part.training) for module in modules for part in module.modules()]
    states = [ModuleState(module) for module in modules]
    with RandContext(*modules):
        try:
            for parameter, _ in gradients:
                parameter.grad = None
            yield states
        finally:
            for state in states:
                state.restore()
            for part, training in modes:
                part.training = training
            for parameter, gradient in gradients:
                parameter.grad = gradient


@contextmanager
def in_dtype(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block all floating-point values of the module are of ``dtype``.

    Afterwards the very same tensors as before are back; the parameters' gradients are gone. The
    module is not copied: copies of other people's modules can fail or share what they should not.
    """
    data = [(parameter, parameter.data) for parameter in module.parameters()]
    entries = [e for _, e in _entries_of(module, copies=False) if isinstance(e.value, Tensor)]
    others = [entry for entry in entries if not isinstance(entry.value, nn.Parameter)]
    for parameter, _ in data:
        parameter.grad = None
    try:
        module.to(dtype)
        for entry in others:  # also plain attributes, which module.to leaves alone
            if entry.value.is_floating_point():
                entry.holder[entry.key] = entry.value.detach().to(dtype)
        yield
    finally:
        for parameter, original in data:
            parameter.grad = None
            parameter.data = original
        for entry in others:
            entry.holder[entry.key] = entry.value


@contextmanager
def without_dropout(*modules: nn.Module) -> Iterator[None]:
    """Inside the block every dropout probability that is an attribute of a submodule is 0.

    The training mode stays as it is: batch statistics and the like go on as in training.
    """
    with ExitStack() as stack:
        for part in {id(p): p for module in modules for p in module.modules()}.values():
            for name, value in list(vars(part).items()):
                is_own = isinstance(part, nn.modules.dropout._DropoutNd) and name == "p"
                named = any(word in name.lower() for word in _DROPOUT)
                if isinstance(value, float) and (is_own or named):
                    stack.callback(setattr, part, name, value)
                    setattr(part, name, 0.0)
        yield
