"""Class GradCache: the gradient cache for your own models, inputs and loss.

Names and order of arguments are those of the GradCache package, so a user of it changes one import
line. The hooks that its users override are all here, and ``cache_step`` goes through each of them.

Letters: N rows, D dims, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gc_dpr.grad_cache.chunking import split_rows
from gc_dpr.grad_cache.rand_context import devices_of
from gc_dpr.grad_cache.step import (
    ReplayState,
    Scaler,
    cache_gradients,
    encode_without_graph,
    replay_chunk,
)


class GradCache:
    """Computes the gradient of a contrastive loss over a batch whose activations do not fit.

    Calling it adds to the ``.grad`` of every parameter what ``loss.backward()`` on the undivided
    batch would, and returns the loss; zeroing gradients, clipping and the optimizer stay yours.

    bf16: put ``torch.autocast`` around the forward of your model (or in ``model_call``); the loss
    runs in float32 outside it. Several processes: use a loss that gathers with gradient, such as
    :func:`gc_dpr.losses.in_batch_nll`. With models in DistributedDataParallel give that loss
    ``gradient_reduction="mean"`` and pass ``no_sync_except_last=True``; build them with
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
        ValueError: Not one chunk size per model, a chunk size below 1, or fp16 without scaler.

    Example:
        >>> encoder = nn.Linear(4, 2)
        >>> def loss_fn(questions, passages):
        ...     return nn.functional.cross_entropy(questions @ passages.T, torch.arange(6))
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
        split_input_fn: Callable[[Any, int], Sequence[Any]] | None = None,
        get_rep_fn: Callable[[Any], Tensor] | None = None,
        fp16: bool = False,
        scaler: Scaler | None = None,
    ) -> None:
        self.models = list(models)
        sizes = [chunk_sizes] * len(self.models) if isinstance(chunk_sizes, int) else chunk_sizes
        self.chunk_sizes = list(sizes)
        if len(self.chunk_sizes) != len(self.models):
            raise ValueError(
                f"chunk_sizes must be one number or one per model, found {len(self.chunk_sizes)} "
                f"sizes for {len(self.models)} models"
            )
        if any(size < 1 for size in self.chunk_sizes):
            raise ValueError(f"chunk_sizes must be at least 1, found {self.chunk_sizes}")
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

    def split_inputs(self, model_input: Any, chunk_size: int) -> Sequence[Any]:
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
        """Call a model with one chunk of its input.

        Raises:
            TypeError: The chunk is of none of the kinds that ``split_rows`` makes.
        """
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
        """Encode all chunks of one model without graph.

        Returns:
            The representations (N, D), and per chunk the random state that
            :meth:`forward_backward` takes.
        """
        model_devices = devices_of(model)
        reps, states = [], []
        for chunk in model_inputs:
            devices = [*model_devices, *devices_of(self.get_input_tensors(chunk))]
            chunk_reps, state = encode_without_graph(self._forward_of(model, chunk), devices)
            reps.append(chunk_reps)
            states.append(state)
        return torch.cat(reps), states

    def build_cache(self, *reps: Tensor, **loss_kwargs: Any) -> tuple[list[Tensor], Tensor]:
        """Compute the loss and its gradient with respect to every representation.

        Returns:
            The gradients, (N, D) per model and scaled if there is a scaler, and the detached loss.
        """

        def loss_fn(*leaves: Tensor) -> Tensor:
            return self.compute_loss(*leaves, **loss_kwargs)

        return cache_gradients(loss_fn, reps, scaler=self.scaler)

    def forward_backward(
        self,
        model: Callable[..., Any],
        model_inputs: Sequence[Any],
        cached_gradients: Sequence[Tensor],
        random_states: Sequence[ReplayState],
        no_sync_except_last: bool = False,
    ) -> None:
        """Encode one model's chunks again and back-propagate their cached gradients.

        Args:
            model: The encoder.
            model_inputs: Its chunks.
            cached_gradients: (C, D) for each chunk.
            random_states: What :meth:`forward_no_grad` returned for each chunk.
            no_sync_except_last: Keep a DistributedDataParallel model from reducing gradients
                before its last chunk.
        """
        last = len(model_inputs) - 1
        chunks = zip(model_inputs, cached_gradients, random_states, strict=True)
        for i, (chunk, gradient, state) in enumerate(chunks):
            # Around forward and backward: DDP decides in the forward whether it will reduce.
            with _no_sync(model, only_if=no_sync_except_last and i < last):
                replay_chunk(self._forward_of(model, chunk), state.random, gradient)

    def cache_step(
        self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any
    ) -> Tensor:
        """Add the gradient of the loss over the whole batch to the parameters' ``.grad``.

        Args:
            *model_inputs: One input per model.
            no_sync_except_last: One gradient reduction per DistributedDataParallel model instead of
                one per chunk; a model that occurs several times reduces after its last use.
            **loss_kwargs: Passed on to the loss function.

        Returns:
            The loss, detached and not scaled.

        Raises:
            ValueError: Not one input per model, no model that can be trained, or
                ``no_sync_except_last`` with a model that has no ``no_sync``.
        """
        self._check_call(model_inputs, no_sync_except_last=no_sync_except_last)
        chunks = [
            self.split_inputs(x, size)
            for x, size in zip(model_inputs, self.chunk_sizes, strict=True)
        ]
        encoded = [self.forward_no_grad(*pair) for pair in zip(self.models, chunks, strict=True)]
        gradients, loss = self.build_cache(*(reps for reps, _ in encoded), **loss_kwargs)
        last_use = {id(model): i for i, model in enumerate(self.models)}
        for i, model in enumerate(self.models):
            if not _is_trainable(model):
                continue
            states = encoded[i][1]
            pieces = torch.split(gradients[i], [state.rows for state in states])
            used_again = last_use[id(model)] != i
            with _no_sync(model, only_if=no_sync_except_last and used_again):
                self.forward_backward(
                    model,
                    chunks[i],
                    pieces,
                    states,
                    no_sync_except_last=no_sync_except_last and not used_again,
                )
        return loss

    def _forward_of(self, model: Callable[..., Any], chunk: Any) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with self._autocast(model, chunk):
                return self.get_reps(self.model_call(model, chunk))

        return forward

    def _autocast(self, model: Any, chunk: Any) -> AbstractContextManager[Any]:
        if not self.fp16:
            return nullcontext()
        types = {device.type for device in devices_of(model, self.get_input_tensors(chunk))}
        return torch.autocast(next(iter(types - {"cpu"}), "cpu"), dtype=torch.float16)

    def _check_call(self, model_inputs: Sequence[Any], *, no_sync_except_last: bool) -> None:
        if len(model_inputs) != len(self.models):
            raise ValueError(
                f"cache_step takes one input per model, found {len(model_inputs)} inputs "
                f"for {len(self.models)} models"
            )
        loss_modules = [self.loss_fn] if isinstance(self.loss_fn, nn.Module) else []
        if not any(_is_trainable(part) for part in (*self.models, *loss_modules)):
            raise ValueError("no model has a parameter that requires a gradient: nothing to train")
        for i, model in enumerate(self.models):
            if no_sync_except_last and not hasattr(model, "no_sync"):
                raise ValueError(
                    f"no_sync_except_last=True, but model {i} ({type(model).__name__}) has no "
                    "no_sync: wrap it in DistributedDataParallel or leave the option off"
                )


def _is_trainable(model: Any) -> bool:
    """Whether a module has a parameter to train; of another callable nothing is known: yes."""
    return not isinstance(model, nn.Module) or any(p.requires_grad for p in model.parameters())


def _no_sync(model: Any, *, only_if: bool) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = model.no_sync() if only_if else nullcontext()
    return context
