"""The gradient cache for JAX: pure functions with the names of the GradCache package's JAX face.

:func:`tree_chunk` cuts a batch into equal chunks: every array gets the chunks as a new dimension in
front. Three ways lead to the gradient of the whole batch, each in the memory of one chunk:
:func:`grad_cached` makes an encode function chunked and ``jax.grad`` does the rest;
:func:`chunk_encode` and :func:`cache_grad` are the two passes, for a loop of your own;
:func:`cache_train_step` is a whole step for two towers, on one device or inside a mapped function.

Dropout needs no bookkeeping: give each chunk its key as one more input. Both passes get the same
key, hence the same mask: ``{**tree_chunk(questions, 8), "key": jax.random.split(key, 8)}``.

Several devices: run inside ``jax.shard_map``, chunks sharded over the mesh axis and parameters
replicated; gather the representations in the loss with ``jax.lax.all_gather`` and reduce once.
Before that each device holds its share of the gradient of the *sum* of all devices' losses, since
the transpose of ``all_gather`` adds what the devices send back. Hence ``pmean`` of loss and
gradient equals one device with the joined batch when each loss is a mean over all questions, over
the device's own (equal shares), or a ``pmean`` of either; ``psum`` when it is own sum / all Q.

``check_vma`` of ``shard_map`` may be on or off. On, ``jax.grad`` itself adds up the gradients of
replicated parameters; :func:`cache_grad` holds that back, so that chunks cause no traffic and the
result is one device's share in either mode. A loss through :func:`grad_cached` follows JAX's rule:
on, ``pmean`` the loss before differentiation and reduce nothing after; off, ``pmean`` the gradient.

Source: Gao et al. 2021, arXiv 2101.06983, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise ImportError('gc_dpr.cachex needs JAX: pip install "gc-dpr[jax]"') from error

lax: Any = jax.lax  # partly untyped, and not the same in all versions
PyTree = Any  # any nesting of dicts, lists, tuples and registered classes with arrays as leaves


def tree_chunk(tree: PyTree, n_chunk: int, axis: int = 0) -> PyTree:
    """Cut every array of a tree into equal chunks along one dimension, in the order of the rows.

    Args:
        tree: Arrays (..., N, ...); N may differ between arrays (several passages per question).
        n_chunk: How many chunks; each array's N must be a multiple of it, or ValueError.
        axis: Where N is; may be negative.

    Returns:
        The same tree of arrays (..., n_chunk, N / n_chunk, ...). N = 0 gives chunks without rows.

    Example:
        >>> tree_chunk({"ids": jnp.arange(12).reshape(6, 2)}, 3)["ids"].shape
        (3, 2, 2)
    """
    if n_chunk < 1:
        raise ValueError(f"n_chunk must be at least 1, found {n_chunk}")

    def chunk(path: Any, leaf: Any) -> Any:
        shape, at = _shape_and_axis(path, leaf, axis, chunk_dims=0)
        if shape[at] % n_chunk:
            raise ValueError(
                f"array{jax.tree_util.keystr(path)} has {shape[at]} rows, not divisible into "
                f"{n_chunk} equal chunks (remainder {shape[at] % n_chunk}): change n_chunk or pad"
            )
        return leaf.reshape(*shape[:at], n_chunk, shape[at] // n_chunk, *shape[at + 1 :])

    return jax.tree_util.tree_map_with_path(chunk, tree)


def tree_unchunk(tree: PyTree, axis: int = 0) -> PyTree:
    """Undo :func:`tree_chunk` of the same ``axis``: (..., n, C, ...) becomes (..., n * C, ...)."""

    def unchunk(path: Any, leaf: Any) -> Any:
        shape, at = _shape_and_axis(path, leaf, axis, chunk_dims=1)
        return leaf.reshape(*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])

    return jax.tree_util.tree_map_with_path(unchunk, tree)


def unchunk_args(
    axis: int = 0, argnums: int | Iterable[int] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a decorator that joins the chunks of a function's arguments before the function runs.

    Args:
        axis: As in :func:`tree_unchunk`.
        argnums: Which arguments; a call must pass them by position, or ValueError.
    """
    places = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(f)
        def joined(*args: Any, **kwargs: Any) -> Any:
            new_args = list(args)
            for place in places:
                if not -len(args) <= place < len(args):
                    found = f"found {len(args)} positional arguments"
                    raise ValueError(f"pass argument {place} by position: {found}")
                new_args[place] = tree_unchunk(args[place], axis)
            return f(*new_args, **kwargs)

        return joined

    return decorate


def chunk_encode(encode_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Make the first pass: encode chunk after chunk and keep nothing but the representations.

    Args:
        encode_fn: Encodes one chunk; its parameters are bound (``functools.partial``).

    Returns:
        A function that takes what ``encode_fn`` takes with a chunk dimension in front, and returns
        (n_chunk, C, D). ValueError when its arguments disagree in the number of chunks.
    """

    def encode_chunks(*args: Any, **kwargs: Any) -> PyTree:
        _require_chunks(*args, **kwargs)

        return lax.scan(lambda _, x: (None, encode_fn(*x[0], **x[1])), None, (args, kwargs))[1]

    return encode_chunks


def cache_grad(encode_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Make the second pass: encode each chunk again and pull its cached gradients back.

    Args:
        encode_fn: Called with one chunk as ``encode_fn(params=params, **chunk)``, or as
            ``encode_fn(params, *chunk)`` when the batch is passed by position.

    Returns:
        ``f(params, grad_accumulator, cached_grad, *args, **kwargs)``, which returns the accumulator
        plus the gradient of the parameters, in the accumulator's dtype: give float32 for bfloat16
        parameters. ``cached_grad`` is the gradient of what :func:`chunk_encode` returned. Wrong
        shapes are a ValueError, parameters that are not floating-point a TypeError.
    """

    def add_gradient(
        params: PyTree, grad_accumulator: PyTree, cached_grad: PyTree, *args: Any, **kwargs: Any
    ) -> PyTree:
        _require_floating(params)
        _require_chunks(*args, **kwargs, cached_grad=cached_grad)
        # Parameters that vary over the mesh have local gradients: no reduction in each chunk.
        params = _vary_over(params, _varying_axes((cached_grad, args, kwargs)))
        grad_accumulator = _vary_like(grad_accumulator, params)

        def replay(total: PyTree, chunk: Any) -> tuple[PyTree, None]:
            cached, a, k = chunk
            reps, pull_back = jax.vjp(
                lambda w: encode_fn(w, *a, **k) if a else encode_fn(params=w, **k), params
            )
            # The loss may have made bfloat16 representations float32, hence its gradients.
            cached = jax.tree.map(lambda c, r: c.astype(r.dtype), cached, reps)
            grad = pull_back(_vary_like(cached, reps))[0]
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grad), None

        return lax.scan(replay, grad_accumulator, (cached_grad, args, kwargs))[0]

    return add_gradient


def grad_cached(
    f: Callable[[PyTree, PyTree], PyTree],
    policy: Callable[..., bool] | None = jax.checkpoint_policies.nothing_saveable,
    prevent_cse: bool = True,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Decorate an encode function: chunk by chunk, each encoded again in the backward pass.

    Args:
        f: ``f(params, chunk)`` gives (C, D). Gradients add up in the params' dtype: use float32.
        policy: What of a chunk is kept for the backward pass; the default keeps nothing.
        prevent_cse: As in ``jax.checkpoint``. False is safe too, since the chunks run in a scan.

    Returns:
        ``f(params, batch)`` for a batch with a chunk dimension in front; gives (n_chunk * C, D).

    Example:
        >>> encode = grad_cached(lambda params, chunk: chunk @ params)
        >>> batch = tree_chunk(jnp.ones((4, 2)), 2)
        >>> jax.grad(lambda params: encode(params, batch).sum())(jnp.ones((2, 1))).tolist()
        [[4.0], [4.0]]
    """

    @wraps(f)
    def encode_chunks(params: PyTree, batch: PyTree) -> PyTree:
        _require_chunks(batch)
        # Here, not in the scan: the gradients of all chunks are then reduced together, once.
        params = _vary_over(params, _varying_axes(batch))
        encode = jax.checkpoint(f, policy=policy, prevent_cse=prevent_cse)
        return tree_unchunk(lax.scan(lambda _, x: (None, encode(params, x)), None, batch)[1])

    return encode_chunks


def cache_train_step(
    loss_fn: Callable[..., Any],
    state: Any,
    ss: dict[str, PyTree],
    tt: dict[str, PyTree],
    axis: str | tuple[str, ...] | None = "device",
) -> tuple[jax.Array, Any]:
    """Take one training step of two towers with the gradient cache.

    Args:
        loss_fn: ``loss_fn(s_reps, t_reps, axis=axis)`` gets this device's (N, D) representations of
            both sides; returns a scalar or one loss per question, of which the mean is taken.
        state: Has ``params``, ``apply_fn(params=params, **chunk)`` and the next state from
            ``apply_gradients(grads=grads)``, like flax's TrainState. Separate towers are entries of
            ``params``; the argument names tell ``apply_fn`` which to use.
        ss: Arguments of ``apply_fn`` for one side, (n_chunk, C, ...).
        tt: The same for the other side; its number and size of chunks may differ.
        axis: The mapped axis of the surrounding ``jax.shard_map`` over which loss and gradient
            are averaged; None on one device.

    Returns:
        The loss, at least float32, and the next state. Gradients are added up over chunks and
        devices in at least float32 and handed on in the parameters' dtype. Errors as in
        :func:`cache_grad`, and ValueError for a side without rows.
    """
    if any(0 in jnp.shape(leaf)[:2] for leaf in jax.tree.leaves((ss, tt))):
        raise ValueError(f"no rows, no loss: found {jax.tree.map(jnp.shape, {'ss': ss, 'tt': tt})}")

    @unchunk_args(axis=0, argnums=(0, 1))
    def mean_loss(s_reps: PyTree, t_reps: PyTree) -> Any:
        loss = jnp.asarray(loss_fn(s_reps, t_reps, axis=axis))
        # A loss that all devices share (pmean inside) counts once per device, like any other.
        return _vary_over(jnp.mean(_widen(loss)), _varying_axes((s_reps, t_reps)))

    encode_chunks = chunk_encode(partial(state.apply_fn, params=state.params))
    add_gradient = cache_grad(state.apply_fn)
    reps = encode_chunks(**ss), encode_chunks(**tt)
    loss, (s_cached, t_cached) = jax.value_and_grad(mean_loss, argnums=(0, 1))(*reps)
    grads = jax.tree.map(lambda param: jnp.zeros_like(_widen(param)), state.params)
    grads = add_gradient(state.params, grads, s_cached, **ss)
    grads = add_gradient(state.params, grads, t_cached, **tt)
    if axis is not None:
        loss, grads = lax.pmean((loss, grads), axis)
    grads = jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, state.params)
    return loss, state.apply_gradients(grads=grads)


def _widen(array: Any) -> Any:
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def _varying_axes(tree: PyTree) -> frozenset[str]:
    """Mesh axes over which an array of the tree varies; none where ``check_vma`` is off."""
    axes: frozenset[str] = frozenset()
    for leaf in jax.tree.leaves(tree):
        kind: Any = jax.typeof(leaf)
        # JAX 0.10 tells it as manual_axis_type.varying, earlier versions as vma.
        axes |= kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma
    return axes


def _vary_over(tree: PyTree, axes: frozenset[str]) -> PyTree:
    """Let every array vary over the mesh axes; its gradient is then no longer summed over them."""

    def vary(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying_axes(leaf)))
        if missing and hasattr(lax, "pcast"):
            return lax.pcast(leaf, missing, to="varying")
        return lax.pvary(leaf, missing) if missing else leaf  # pcast's name before JAX 0.8

    return jax.tree.map(vary, tree)


def _vary_like(tree: PyTree, model: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, like: _vary_over(leaf, _varying_axes(like)), tree, model)


def _shape_and_axis(path: Any, leaf: Any, axis: int, *, chunk_dims: int) -> tuple[Any, int]:
    """Return an array's shape and the dimension meant, counted without its chunk dimension."""
    shape, dims = jnp.shape(leaf), jnp.ndim(leaf) - chunk_dims
    if not -dims <= axis < dims:
        name = jax.tree_util.keystr(path)
        raise ValueError(f"array{name} has no rows at axis {axis}, its shape is {shape}")
    return shape, axis % dims


def _require_chunks(*args: PyTree, **kwargs: PyTree) -> None:
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    shapes = {jax.tree_util.keystr(path[1:]): jnp.shape(leaf) for path, leaf in leaves}
    if not shapes or () in shapes.values():
        needed = "inputs need a chunk dimension in front (tree_chunk makes it)"
        raise ValueError(f"{needed}; bind others with functools.partial. Found shapes {shapes}")
    if len({shape[0] for shape in shapes.values()}) != 1:
        raise ValueError(f"inputs disagree in the number of chunks, their first: {shapes}")


def _require_floating(params: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            found = f"parameter{jax.tree_util.keystr(path)} is {leaf.dtype}"
            raise TypeError(f"{found} and has no gradient: keep it apart from params")
