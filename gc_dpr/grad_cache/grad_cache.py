"""Class GradCache: the gradient cache for your own models, inputs and loss.

Names and order of arguments are those of the GradCache package, so a user of it changes one import
line. The hooks that its users override are all here, and ``cache_step`` goes through each of them.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gc_dpr.grad_cache.call_state import (
    autocast_off,
    capture_autocast,
    float16_autocast,
    started_accelerators,
    with_graph,
)
from gc_dpr.grad_cache.checks import (
    check_number_of_inputs,
    check_something_trains,
    check_step,
    chunk_size_per_model,
)
from gc_dpr.grad_cache.chunking import split_rows
from gc_dpr.grad_cache.encoded_model import (
    EncodedModel,
    encode_chunk,
    is_trainable,
    reduces_gradients,
    without_sync,
)
from gc_dpr.grad_cache.rand_context import RandContext, devices_of
from gc_dpr.grad_cache.step import (
    ReplayState,
    Scaler,
    backward_cached,
    cache_gradients,
    check_reps,
    replay_chunk,
)


class GradCache:
    """Computes the gradient of a contrastive loss over a batch whose activations do not fit.

    Calling it adds to the ``.grad`` of every parameter what ``loss.backward()`` on the undivided
    batch would, and returns the loss; zeroing gradients, clipping and the optimizer stay yours.

    bf16: put ``torch.autocast`` around the call, or around the forward of your model; the loss runs
    in float32 outside it. Several processes: use a loss that gathers with gradient. For models in
    DistributedDataParallel, or sharded by FSDP2, it is :func:`gc_dpr.losses.in_batch_nll` with
    ``gradient_reduction="mean"``; pass ``no_sync_except_last=True``, and build DDP with
    ``broadcast_buffers=False``, since each forward would otherwise send the buffers.

    Source: Gao et al. 2021, arXiv 2101.06983.

    Args:
        models: The encoders, one per input; the same object several times when shared.
        chunk_sizes: Rows per chunk, one number for all models or one per model.
        loss_fn: Called with the representations (N, D) of each model and the loss keywords.
        split_input_fn: ``(model_input, chunk_size) -> list of chunks``, for inputs that
            :func:`~gc_dpr.grad_cache.chunking.split_rows` does not know.
        get_rep_fn: Model output to representations (C, D); by default the output is them.
        fp16: Run the models under float16 autocast; needs ``scaler``.
        scaler: ``torch.amp.GradScaler``; the gradients are then scaled, and you call its
            ``unscale_``, ``step`` and ``update``.

    Raises:
        TypeError: A chunk size that is not a whole number.
        ValueError: No model, not one chunk size per model, a size below 1, or fp16 without scaler.

    Example:
        >>> encoder = torch.nn.Linear(4, 2)
        >>> def loss_fn(questions, passages):
        ...     return torch.nn.functional.cross_entropy(questions @ passages.T, torch.arange(6))
        >>> cache = GradCache([encoder, encoder], chunk_sizes=2, loss_fn=loss_fn)
        >>> loss = cache(torch.randn(6, 4), torch.randn(8, 4))
        >>> encoder.weight.grad.shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        models: Sequence[Callable[..., Any]],
        chunk_sizes: int | Sequence[int],
        loss_fn: Callable[..., Tensor],
        split_input_fn: Callable[[Any, int], Iterable[Any]] | None = None,
        get_rep_fn: Callable[[Any], Tensor] | None = None,
        fp16: bool = False,
        scaler: Scaler | None = None,
    ) -> None:
        self.models = list(models)
        self.chunk_sizes = chunk_size_per_model(chunk_sizes, len(self.models))
        if fp16 and scaler is None:
            raise ValueError(
                "fp16=True needs scaler=torch.amp.GradScaler(...): gradients underflow"
            )
        self.loss_fn = loss_fn
        self.split_input_fn = split_input_fn
        self.get_rep_fn = get_rep_fn
        self.fp16 = fp16
        self.scaler = scaler

    def __call__(
        self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any
    ) -> Tensor:
        """Run :meth:`cache_step`."""
        return self.cache_step(
            *model_inputs, no_sync_except_last=no_sync_except_last, **loss_kwargs
        )

    def split_inputs(self, model_input: Any, chunk_size: int) -> Iterable[Any]:
        """Cut a model's input into chunks of at most ``chunk_size`` rows."""
        if self.split_input_fn is not None:
            return self.split_input_fn(model_input, chunk_size)
        return split_rows(model_input, chunk_size)

    def get_input_tensors(self, model_input: Any) -> list[Tensor]:
        """Return all tensors of an input: the generators of their devices are replayed."""
        if isinstance(model_input, Tensor):
            return [model_input]
        if isinstance(model_input, Mapping):
            model_input = list(model_input.values())
        if isinstance(model_input, list | tuple):
            return [tensor for part in model_input for tensor in self.get_input_tensors(part)]
        return []

    def model_call(self, model: Callable[..., Any], model_input: Any) -> Any:
        """Call a model with one chunk; TypeError for kinds that ``split_rows`` does not make."""
        if isinstance(model_input, Tensor):
            return model(model_input)
        if isinstance(model_input, list):
            return model(*model_input)
        if isinstance(model_input, Mapping):
            return model(**model_input)
        if isinstance(model_input, tuple) and [*map(type, model_input)] == [list, dict]:
            args, kwargs = model_input
            return model(*args, **kwargs)
        raise TypeError(
            f"cannot call a model with a {type(model_input).__name__}: expected a tensor, list, "
            "mapping or tuple (list, dict); override model_call for other inputs"
        )

    def get_reps(self, model_out: Any) -> Tensor:
        """Take the representations (C, D) out of a model's output."""
        reps: Tensor = model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)
        return reps

    def compute_loss(self, *reps: Tensor, **loss_kwargs: Any) -> Tensor:
        """Return the loss of the whole batch, a scalar, from all representations."""
        return self.loss_fn(*reps, **loss_kwargs)

    def forward_no_grad(
        self, model: Callable[..., Any], model_inputs: Sequence[Any]
    ) -> tuple[Tensor, list[ReplayState]]:
        """Encode chunks without graph: reps (N, D), and per chunk what its replay needs."""
        model_devices = [*devices_of(model), *started_accelerators()]
        reps: list[Tensor] = []
        states: list[ReplayState] = []
        for chunk in model_inputs:
            devices = [*model_devices, *self.get_input_tensors(chunk)]
            chunk_reps, state = encode_chunk(
                self._plain_forward_of(model, chunk), devices, seems_frozen=not is_trainable(model)
            )
            reps.append(chunk_reps)
            states.append(state)
        return torch.cat(reps), states

    def build_cache(self, *reps: Tensor, **loss_kwargs: Any) -> tuple[list[Tensor], Tensor]:
        """Return d loss / d reps, (N, D) per model, scaled if there is a scaler; and the loss."""

        def loss_fn(*leaves: Tensor) -> Tensor:
            return self.compute_loss(*leaves, **loss_kwargs)

        with autocast_off():
            return cache_gradients(loss_fn, reps, scaler=self.scaler)

    def forward_backward(
        self,
        model: Callable[..., Any],
        model_inputs: Sequence[Any],
        cached_gradients: Sequence[Tensor],
        random_states: Sequence[ReplayState | RandContext],
        no_sync_except_last: bool = False,
    ) -> None:
        """Encode one model's chunks again and back-propagate their cached gradients.

        Args:
            model: The encoder.
            model_inputs: Its chunks.
            cached_gradients: (C, D) of each chunk, as :meth:`build_cache` gave them.
            random_states: What :meth:`forward_no_grad` gave for each chunk.
            no_sync_except_last: Reduce gradients over processes after the last chunk only.
        """
        last = len(model_inputs) - 1
        chunks = zip(model_inputs, cached_gradients, random_states, strict=True)
        for i, (chunk, gradient, state) in enumerate(chunks):
            random = state if isinstance(state, RandContext) else state.random
            forward = self._forward_of(model, chunk)
            # Around forward and backward: DDP decides in the forward whether it will reduce.
            with without_sync(model, only_if=no_sync_except_last and i < last), autocast_off():
                replay_chunk(forward, random, gradient)

    def cache_step(
        self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any
    ) -> Tensor:
        """Add the gradient of the loss over the whole batch to the parameters' ``.grad``.

        The very last chunk keeps its graph and is not encoded again, unless ``forward_no_grad`` or
        ``forward_backward`` is overridden (they get all chunks) or its model reduces gradients (a
        failing loss would leave the reduction half done).

        Args:
            *model_inputs: One input per model.
            no_sync_except_last: One gradient reduction per DistributedDataParallel or fully sharded
                model, after its last chunk of all, instead of one per chunk.
            **loss_kwargs: Passed on to the loss function.

        Returns:
            The loss, detached and not scaled.

        Raises:
            ValueError: Not one input per model, nothing to train, representations or a loss that do
                not fit, ``no_sync_except_last`` with a model that reduces no gradients, or chunk
                counts with which processes would wait forever. No gradient has been touched then.
        """
        check_number_of_inputs(len(model_inputs), len(self.models))
        chunks = [
            [*self.split_inputs(*x)] for x in zip(model_inputs, self.chunk_sizes, strict=True)
        ]
        trains = [self._trains(*pair) for pair in zip(self.models, chunks, strict=True)]
        check_step(self.models, chunks, trains, postponed=no_sync_except_last)
        keeps = trains[-1] and self._may_keep_graph()
        encoded = [
            self._encode(model, parts, keep_last=keeps and parts is chunks[-1])
            for model, parts in zip(self.models, chunks, strict=True)
        ]
        trains = [sure or first.trains for sure, first in zip(trains, encoded, strict=True)]
        check_something_trains(trains, self.loss_fn)
        gradients, loss = self.build_cache(*(first.reps for first in encoded), **loss_kwargs)
        kept = encoded[-1].kept
        if kept is not None:  # before the others, to free its graph
            with autocast_off():
                backward_cached(kept, encoded[-1].kept_piece(gradients[-1]))
        last_use = {id(model): i for i, model in enumerate(self.models) if trains[i]}
        for i, model in enumerate(self.models):
            states = encoded[i].states
            if not trains[i] or not states:
                continue
            replayed = chunks[i][: len(states)]
            pieces = encoded[i].replayed_pieces(gradients[i], self.chunk_sizes[i])
            used_again = last_use[id(model)] != i
            postponed = no_sync_except_last and not used_again
            with without_sync(model, only_if=no_sync_except_last and used_again):
                self.forward_backward(model, replayed, pieces, states, postponed)
        return loss

    def _encode(
        self, model: Callable[..., Any], chunks: Sequence[Any], *, keep_last: bool
    ) -> EncodedModel:
        if not keep_last:
            return EncodedModel(*self.forward_no_grad(model, chunks))
        reps, states = self.forward_no_grad(model, chunks[:-1]) if chunks[1:] else (None, [])
        kept = check_reps(self._forward_of(model, chunks[-1])())
        parts = [kept.detach()] if reps is None else [reps, kept.detach()]
        return EncodedModel(torch.cat(parts), states, kept)

    def _may_keep_graph(self) -> bool:
        hooks = [getattr(h, "__func__", h) for h in (self.forward_no_grad, self.forward_backward)]
        own = hooks == [GradCache.forward_no_grad, GradCache.forward_backward]
        return own and not reduces_gradients(self.models[-1])

    def _trains(self, model: Any, chunks: Sequence[Any]) -> bool:
        """Whether there is a gradient to add: to the model, or through it to its input."""
        tensors = (tensor for chunk in chunks for tensor in self.get_input_tensors(chunk))
        return is_trainable(model) or any(tensor.requires_grad for tensor in tensors)

    def _plain_forward_of(self, model: Callable[..., Any], chunk: Any) -> Callable[[], Tensor]:
        surrounding = capture_autocast()  # the backward pass goes without

        def forward() -> Tensor:
            with surrounding(), self._autocast(model, chunk):
                return check_reps(self.get_reps(self.model_call(model, chunk)))

        return forward

    def _forward_of(self, model: Callable[..., Any], chunk: Any) -> Callable[[], Tensor]:
        forward = self._plain_forward_of(model, chunk)
        return lambda: with_graph(forward())

    def _autocast(self, model: Any, chunk: Any) -> AbstractContextManager[Any]:
        devices = devices_of(model, self.get_input_tensors(chunk))
        return float16_autocast(devices) if self.fp16 else nullcontext()
