"""gc_dpr.cachex against plain jax.grad of the undivided batch.

The file is also a program: the test of several devices runs it in a process of its own, because
JAX fixes the number of its CPU devices when it starts.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from gc_dpr import cachex  # noqa: E402

Q, P, L, VOCAB, HIDDEN, DIMS = 12, 24, 5, 17, 8, 6


def use_float64():
    """Context in which JAX has float64; its place changed between JAX 0.6 and 0.10."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()


# --- a toy pair of towers -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def compile_fast(request):
    """XLA's optimisations take most of the time here; only the memory test is about them."""
    name = "jax_disable_most_optimizations"
    jax.config.update(name, "memory" not in request.node.name)
    yield
    jax.config.update(name, False)  # JAX's default


def tower(seed, dtype):
    normal = np.random.default_rng(seed).standard_normal
    layer = {"w": jnp.asarray(normal((HIDDEN, DIMS)), dtype), "b": jnp.asarray(normal(DIMS), dtype)}
    return {"embed": jnp.asarray(normal((VOCAB, HIDDEN)), dtype), "layers": [layer]}


def dropout_mask(key, rows):
    return jax.random.bernoulli(key, 0.5, (rows, HIDDEN))


def encode(params, ids, mask, key=None, kept=None):
    """(C, L) token ids and mask to (C, DIMS); with a key, half of the hidden units are dropped."""
    words = params["embed"][ids] * mask[..., None]  # (C, L, HIDDEN)
    hidden = words.sum(1) / mask.sum(1, keepdims=True)
    kept = dropout_mask(key, len(ids)) if key is not None else kept
    hidden = hidden if kept is None else jnp.where(kept, hidden * 2, 0)
    (layer,) = params["layers"]
    return jnp.tanh(hidden @ layer["w"] + layer["b"])


def apply_tied(params, **chunk):
    return encode(params, **chunk)


def apply_separate(params, **chunk):
    """The argument names say which tower: question_ids or passage_ids."""
    side = "question" if "question_ids" in chunk else "passage"
    names = {name: name.removeprefix(f"{side}_") for name in chunk}
    return encode(params[side], **{names[name]: value for name, value in chunk.items()})


def towers(separate, dtype=jnp.float32):
    if not separate:
        return apply_tied, tower(0, dtype)
    return apply_separate, {"question": tower(0, dtype), "passage": tower(1, dtype)}


def texts(rows, seed, separate, side, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, L + 1, (rows, 1))
    prefix = f"{side}_" if separate else ""
    return {
        f"{prefix}ids": jnp.asarray(rng.integers(0, VOCAB, (rows, L))),
        f"{prefix}mask": jnp.asarray(np.arange(L) < lengths, dtype),
    }


def batch(separate=False, dtype=jnp.float32, questions=Q, passages=P):
    return (
        texts(questions, 3, separate, "question", dtype),
        texts(passages, 4, separate, "passage", dtype),
    )


def losses(question_reps, passage_reps, first=0):
    """In-batch NLL per question; question i's positive is passage (first + i) * P / Q."""
    scores = question_reps @ passage_reps.T  # (Q, P)
    step = P // Q
    positives = (first + jnp.arange(len(scores))) * step
    picked = jnp.take_along_axis(scores, positives[:, None], axis=1)[:, 0]
    return jnp.log(jnp.exp(scores).sum(1)) - picked


def loss_of(question_reps, passage_reps, axis=None):
    assert axis is None
    return losses(question_reps, passage_reps)


@dataclass(frozen=True)
class SGD:
    """The least that cache_train_step needs of a state."""

    params: Any
    apply_fn: Any
    rate: float = 1.0

    def apply_gradients(self, *, grads):
        moved = jax.tree.map(lambda p, g: p - self.rate * g, self.params, grads)
        return replace(self, params=moved)


jax.tree_util.register_dataclass(SGD, data_fields=["params"], meta_fields=["apply_fn", "rate"])


def largest_difference(one, other):
    """Largest difference of any entry, relative to the largest entry of the whole tree."""
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    assert all(a.dtype == b.dtype for a, b in pairs)
    gap = max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)
    return gap / max(float(np.abs(b).max()) for _, b in pairs)


# --- three ways to the same gradient ------------------------------------------------------------


def by_plain_grad(apply_fn, params, ss, tt, loss_fn=loss_of):
    """The undivided batch; no part of cachex."""
    return jax.value_and_grad(
        lambda p: loss_fn(apply_fn(params=p, **ss), apply_fn(params=p, **tt)).mean()
    )(params)


def by_two_passes(apply_fn, params, ss, tt):
    encode_chunks = cachex.chunk_encode(partial(apply_fn, params))
    add_gradient = cachex.cache_grad(apply_fn)

    @cachex.unchunk_args(axis=0, argnums=(0, 1))
    def mean_loss(question_reps, passage_reps):
        return loss_of(question_reps, passage_reps).mean()

    reps = encode_chunks(**ss), encode_chunks(**tt)
    loss, cached = jax.value_and_grad(mean_loss, argnums=(0, 1))(*reps)
    grads = jax.tree.map(jnp.zeros_like, params)
    for cached_grad, side in zip(cached, (ss, tt), strict=True):
        grads = add_gradient(params, grads, cached_grad, **side)
    return loss, grads


def by_grad_cached(apply_fn, params, ss, tt, **options):
    encode_chunks = cachex.grad_cached(lambda p, chunk: apply_fn(params=p, **chunk), **options)
    return jax.value_and_grad(lambda p: loss_of(encode_chunks(p, ss), encode_chunks(p, tt)).mean())(
        params
    )


def by_train_step(apply_fn, params, ss, tt):
    loss, state = cachex.cache_train_step(loss_of, SGD(params, apply_fn), ss, tt, axis=None)
    return loss, jax.tree.map(jnp.subtract, params, state.params)


WAYS = [by_two_passes, by_grad_cached, by_train_step]


@cache
def case(separate, dtype):
    """apply_fn, parameters, both sides, and the undivided batch's loss and gradient."""
    apply_fn, params = towers(separate, dtype)
    ss, tt = batch(separate, dtype)
    return apply_fn, params, ss, tt, *jax.jit(partial(by_plain_grad, apply_fn))(params, ss, tt)


def assert_same(found, loss, grads, tolerance):
    assert abs(float(found[0]) - float(loss)) < tolerance
    assert largest_difference(found[1], grads) < tolerance


# (number of question chunks, of passage chunks): chunks of one row, of 3, of all
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("separate", "numbers"),
    [(False, [(4, 3)]), (True, [(12, 24), (1, 1)])],
    ids=["tied", "separate"],
)
def test_any_chunk_size_gives_the_gradient_of_the_undivided_batch(way, separate, numbers):
    with use_float64():
        apply_fn, params, ss, tt, loss, grads = case(separate, jnp.float64)
        for n_question, n_passage in numbers:
            chunked = cachex.tree_chunk(ss, n_question), cachex.tree_chunk(tt, n_passage)
            found = jax.jit(partial(way, apply_fn))(params, *chunked)
            assert_same(found, loss, grads, 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_float32(way):
    apply_fn, params, ss, tt, loss, grads = case(False, jnp.float32)
    chunked = cachex.tree_chunk(ss, 4), cachex.tree_chunk(tt, 4)
    found = jax.jit(partial(way, apply_fn))(params, *chunked)
    assert found[0].dtype == jnp.float32
    assert_same(found, loss, grads, 1e-5)


def with_keys(chunked, seed):
    keys = jax.random.split(jax.random.key(seed), len(chunked["ids"]))
    return {**chunked, "key": keys}


@cache
def dropout_case():
    """Parameters, chunked sides with keys, and loss and gradient of the undivided batch.

    The undivided batch gets the masks that the keys stand for, drawn beforehand, as an input.
    """
    params = tower(0, jnp.float64)
    undivided, chunked = [], []
    for side, n_chunk, seed in zip(batch(dtype=jnp.float64), (2, 3), (5, 6), strict=True):
        chunks = with_keys(cachex.tree_chunk(side, n_chunk), seed)
        masks = [dropout_mask(key, chunks["ids"].shape[1]) for key in chunks["key"]]
        undivided.append({**side, "kept": jnp.concatenate(masks)})
        chunked.append(chunks)
    return params, *chunked, *jax.jit(partial(by_plain_grad, apply_tied))(params, *undivided)


@pytest.mark.parametrize("way", WAYS)
def test_keys_of_the_chunks_replay_dropout(way):
    with use_float64():
        params, ss, tt, loss, grads = dropout_case()
        step = jax.jit(partial(way, apply_tied))
        assert_same(step(params, ss, tt), loss, grads, 1e-12)
        _, moved = step(params, {**ss, "key": ss["key"][::-1]}, tt)
        assert largest_difference(moved, grads) > 1e-2  # the masks matter


def test_raw_keys_and_arguments_by_position():
    """Old-style uint32 keys work too, and so do functions called as f(params, ids, mask, key)."""
    params = tower(0, jnp.float32)
    chunks = cachex.tree_chunk(batch()[0], 2)
    keys = jax.random.split(jax.random.PRNGKey(1), 2)  # (2, 2)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((2, Q // 2, DIMS)), jnp.float32)
    inputs = chunks["ids"], chunks["mask"], keys

    @jax.jit
    def cached(params, start):
        reps = cachex.chunk_encode(partial(encode, params))(*inputs)
        return reps, cachex.cache_grad(encode)(params, start, weights, *inputs)

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def plain(params):
        reps = jnp.stack([encode(params, *(value[i] for value in inputs)) for i in range(2)])
        return (reps * weights).sum(), reps

    grads, reps = plain(params)
    found_reps, found = cached(params, jax.tree.map(jnp.zeros_like, params))
    assert largest_difference(found_reps, reps) < 1e-6
    assert largest_difference(found, grads) < 1e-5
    _, twice = cached(params, found)  # the accumulator is where the sum starts
    assert largest_difference(twice, jax.tree.map(lambda g: 2 * g, grads)) < 1e-5


def test_checkpoint_policies():
    apply_fn, params, ss, tt, loss, grads = case(False, jnp.float32)
    policy = jax.checkpoint_policies.dots_saveable
    way = partial(by_grad_cached, apply_fn, policy=policy, prevent_cse=False)
    found = jax.jit(way)(params, cachex.tree_chunk(ss, 4), cachex.tree_chunk(tt, 4))
    assert_same(found, loss, grads, 1e-5)


def test_representations_may_be_a_tree():
    """An encoder with two outputs, for instance a dense and a pooled one."""

    def both(params, ids, mask):
        reps = encode(params, ids, mask)
        return {"dense": reps, "norm": jnp.square(reps).sum(-1)}

    def total(reps):
        return (reps["dense"] ** 3).mean() + (reps["norm"] ** 2).mean()

    @jax.jit
    def three_gradients(params):
        plain = jax.grad(lambda p: total(both(p, **ss)))(params)
        encode_chunks = cachex.grad_cached(lambda p, chunk: both(p, **chunk))
        decorated = jax.grad(lambda p: total(encode_chunks(p, chunks)))(params)
        reps = cachex.chunk_encode(partial(both, params))(**chunks)
        cached = jax.grad(lambda r: total(cachex.tree_unchunk(r)))(reps)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return plain, decorated, cachex.cache_grad(both)(params, zeros, cached, **chunks)

    ss, _ = batch()
    chunks = cachex.tree_chunk(ss, 3)
    plain, decorated, two_passes = three_gradients(tower(0, jnp.float32))
    assert largest_difference(decorated, plain) < 1e-5
    assert largest_difference(two_passes, plain) < 1e-5


# --- bfloat16 -----------------------------------------------------------------------------------


def test_the_accumulator_gives_the_dtype_of_the_sum():
    """300 chunks that each add 1: bfloat16 stops at 256, float32 does not."""
    params = jnp.zeros((1,), jnp.bfloat16)
    chunks, ones = jnp.ones((300, 1, 1), jnp.bfloat16), jnp.ones((300, 1, 1), jnp.bfloat16)
    add_gradient = cachex.cache_grad(lambda params, x: x * params)
    short = add_gradient(params, jnp.zeros((1,), jnp.bfloat16), ones, x=chunks)
    exact = add_gradient(params, jnp.zeros((1,), jnp.float32), ones, x=chunks)
    assert (short.dtype, exact.dtype) == (jnp.bfloat16, jnp.float32)
    assert (float(short[0]), float(exact[0])) == (256.0, 300.0)
    # A loss that casts by itself hands float32 gradients to bfloat16 representations.
    assert add_gradient(params, exact, ones.astype(jnp.float32), x=chunks).tolist() == [600.0]


def test_the_train_step_adds_up_in_float32():
    chunks = jnp.ones((300, 1, 1), jnp.bfloat16)

    def sum_of(s, t, axis):
        assert s.dtype == t.dtype == jnp.bfloat16  # the loss gets what the encoder gave
        return s.sum() + 0 * t.sum()

    state = SGD(jnp.zeros((1,), jnp.bfloat16), lambda params, x: x * params)
    loss, after = cachex.cache_train_step(
        sum_of, state, {"x": chunks}, {"x": chunks[:1]}, axis=None
    )
    assert loss.dtype == jnp.float32
    assert after.params.dtype == jnp.bfloat16
    assert after.params.tolist() == [-300.0]  # adding in bfloat16 would stop at 256


# --- bad input ----------------------------------------------------------------------------------


def test_chunks_must_divide_the_batch():
    tree = {"ids": jnp.zeros((10, 3)), "mask": jnp.zeros((12, 3))}
    message = re.escape("array['ids'] has 10 rows, not divisible into 4 equal chunks (remainder 2)")
    with pytest.raises(ValueError, match=message):
        cachex.tree_chunk(tree, 4)
    for n_chunk in (0, -2):
        with pytest.raises(ValueError, match=f"n_chunk must be at least 1, found {n_chunk}"):
            cachex.tree_chunk(tree, n_chunk)
    with pytest.raises(
        ValueError, match=re.escape("array['x'] has no rows at axis 0, its shape is ()")
    ):
        cachex.tree_chunk({"x": 1.0}, 1)
    with pytest.raises(ValueError, match="no rows at axis 2"):
        cachex.tree_chunk(jnp.zeros((4, 4)), 2, axis=2)
    with pytest.raises(ValueError, match="no rows at axis 0"):
        cachex.tree_unchunk(jnp.zeros(4))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_chunk_and_unchunk_along_any_axis(axis):
    tree = {"a": jnp.arange(4 * 8 * 12).reshape(4, 8, 12)}
    chunked = cachex.tree_chunk(tree, 2, axis)
    place = axis % 3
    wanted = jnp.stack(jnp.split(tree["a"], 2, axis=place), axis=place)
    assert (chunked["a"] == wanted).all()
    assert (cachex.tree_unchunk(chunked, axis)["a"] == tree["a"]).all()


@pytest.mark.parametrize("call", ["chunk_encode", "cache_grad", "grad_cached", "cache_train_step"])
def test_inputs_that_disagree_in_the_number_of_chunks(call):
    params = tower(0, jnp.float32)
    chunks = {"ids": jnp.zeros((4, 3, L), int), "mask": jnp.ones((3, 4, L))}
    calls = {
        "chunk_encode": lambda: cachex.chunk_encode(partial(encode, params))(**chunks),
        "cache_grad": lambda: cachex.cache_grad(encode)(params, params, jnp.ones((4, 3)), **chunks),
        "grad_cached": lambda: cachex.grad_cached(lambda p, c: encode(p, **c))(params, chunks),
        "cache_train_step": lambda: cachex.cache_train_step(
            loss_of, SGD(params, encode), chunks, chunks, axis=None
        ),
    }
    with pytest.raises(
        ValueError, match=r"disagree in the number of chunks.*\(4, 3, 5\).*\(3, 4, 5\)"
    ):
        calls[call]()


def test_inputs_without_a_chunk_dimension():
    encode_chunks = cachex.chunk_encode(lambda x, scale: x * scale)
    with pytest.raises(ValueError, match=re.escape("{\"['scale']\": (), \"['x']\": (4, 3, 2)}")):
        encode_chunks(x=jnp.ones((4, 3, 2)), scale=2.0)
    with pytest.raises(ValueError, match="inputs need a chunk dimension"):
        encode_chunks()


def test_a_cached_gradient_of_another_shape():
    params = tower(0, jnp.float32)
    chunks = cachex.tree_chunk(batch()[0], 4)
    add_gradient = cachex.cache_grad(encode)
    with pytest.raises(ValueError, match=r"disagree in the number of chunks.*cached_grad"):
        add_gradient(params, params, jnp.ones((3, 4, DIMS)), **chunks)
    with pytest.raises(ValueError, match=r"float32\[3,7\].*float32\[3,6\]"):
        add_gradient(params, params, jnp.ones((4, 3, DIMS + 1)), **chunks)


def test_parameters_must_be_floating():
    params = {"w": jnp.ones(2), "step": jnp.array(3)}
    with pytest.raises(
        TypeError, match=re.escape("parameter['step'] is int32 and has no gradient")
    ):
        cachex.cache_grad(lambda params, x: x @ params["w"])(
            params, params, jnp.ones((1, 3)), x=jnp.ones((1, 3, 2))
        )


def test_a_batch_without_rows():
    params = tower(0, jnp.float32)
    rows = {"ids": jnp.zeros((0, L), int), "mask": jnp.ones((0, L))}
    chunks = cachex.tree_chunk(rows, 2)
    assert chunks["ids"].shape == (2, 0, L)
    reps = cachex.chunk_encode(partial(encode, params))(**chunks)
    assert reps.shape == (2, 0, DIMS)
    assert cachex.tree_unchunk(reps).shape == (0, DIMS)
    zeros = jax.tree.map(jnp.zeros_like, params)
    found = cachex.cache_grad(encode)(params, zeros, reps, **chunks)
    assert all(not leaf.any() for leaf in jax.tree.leaves(found))
    full = cachex.tree_chunk(batch()[0], 4)
    for ss, tt in ((chunks, full), (full, chunks), ({}, full)):
        with pytest.raises(ValueError, match=r"no rows, no loss|need a chunk dimension"):
            cachex.cache_train_step(loss_of, SGD(params, encode), ss, tt, axis=None)


def test_unchunk_args_only_touches_what_it_is_told():
    chunked = jnp.ones((2, 3, 4))

    @cachex.unchunk_args(argnums=1)
    def shapes(a, b, *, c):
        """Shapes."""
        return a.shape, b.shape, c.shape

    assert shapes(chunked, chunked, c=chunked) == ((2, 3, 4), (6, 4), (2, 3, 4))
    assert shapes.__doc__ == "Shapes."
    with pytest.raises(ValueError, match="pass argument 1 by position: found 1 positional"):
        shapes(chunked, b=chunked, c=chunked)
    # An iterator of places lasts for more than one call.
    joined = cachex.unchunk_args(0, iter([0]))(jnp.shape)
    assert joined(chunked) == joined(chunked) == (6, 4)


def test_the_step_outside_a_mapped_function():
    params = tower(0, jnp.float32)
    ss, tt = (cachex.tree_chunk(side, 4) for side in batch())
    with pytest.raises(NameError, match="unbound axis name: device"):
        jax.eval_shape(partial(cachex.cache_train_step, own_loss, SGD(params, encode)), ss, tt)


# --- memory and imports -------------------------------------------------------------------------


def temporary_bytes(way, questions, n_chunk):
    """What XLA allocates beside inputs and outputs, for a tower with wide activations."""

    def wide(params, ids):
        hidden = params["embed"][ids]  # (C, 64, 64)
        for _ in range(4):
            hidden = jnp.sin(hidden @ params["w"])
        return hidden.mean(1)

    params = {"embed": jnp.ones((32, 64)), "w": jnp.ones((64, 64))}
    ids = {"ids": jnp.zeros((questions, 64), int)}
    sides = (ids, ids) if n_chunk is None else (cachex.tree_chunk(ids, n_chunk),) * 2

    def loss(question_reps, passage_reps, axis=None):
        return (question_reps * passage_reps).sum(-1)  # no score matrix: only the encoder counts

    def step(p, ss, tt):
        if way == "train step":
            return cachex.cache_train_step(loss, SGD(p, wide), ss, tt, axis=None)
        encode_all = wide if n_chunk is None else cachex.grad_cached(lambda p, c: wide(p, **c))
        call = (lambda p, x: wide(p, **x)) if n_chunk is None else encode_all
        return jax.grad(lambda p: loss(call(p, ss), call(p, tt)).mean())(p)

    analysis = jax.jit(step).lower(params, *sides).compile().memory_analysis()
    if analysis is None:
        pytest.skip("this backend does not tell its memory")
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("way", ["train step", "grad_cached"])
def test_memory_depends_on_the_chunk_not_on_the_batch(way):
    undivided = temporary_bytes("plain", 512, None)
    small = temporary_bytes(way, 64, 8)  # chunks of 8 in each
    large = temporary_bytes(way, 512, 64)
    reps_and_their_gradients = 4 * 512 * 64 * 4
    assert large < undivided / 15
    assert large < small * 1.1 + reps_and_their_gradients


def run_python(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )


def test_importing_it_does_not_import_torch():
    shown = run_python("import sys, gc_dpr.cachex; print('torch' in sys.modules)")
    assert (shown.stdout.strip(), shown.stderr) == ("False", "")


def test_without_jax_the_error_says_what_to_install():
    shown = run_python("import sys; sys.modules['jax'] = None; from gc_dpr import cachex")
    assert shown.returncode == 1
    assert shown.stderr.strip().splitlines()[-1] == (
        'ImportError: gc_dpr.cachex needs JAX: pip install "gc-dpr[jax]"'
    )


# --- two devices --------------------------------------------------------------------------------


def gathered(reps, axis):
    return jax.lax.all_gather(reps, axis, tiled=True)


def full_loss(s, t, axis):
    """Every device computes the loss of all questions."""
    return losses(gathered(s, axis), gathered(t, axis))


def own_loss(s, t, axis):
    """A device computes the loss of its own questions against all passages."""
    return losses(s, gathered(t, axis), first=jax.lax.axis_index(axis) * len(s))


def shared_loss(s, t, axis):
    """The mean over devices of the own losses: a number that all devices share."""
    return jax.lax.pmean(own_loss(s, t, axis).mean(), axis)


def by_own_sums(apply_fn, params, ss, tt, axis):
    """Two passes, own sum / Q, psum once."""
    reps = [cachex.chunk_encode(partial(apply_fn, params))(**side) for side in (ss, tt)]
    loss_fn = cachex.unchunk_args(0, (0, 1))(lambda s, t: own_loss(s, t, axis).sum() / Q)
    loss, cached = jax.value_and_grad(loss_fn, argnums=(0, 1))(*reps)
    grads = jax.tree.map(jnp.zeros_like, params)
    for cached_grad, side in zip(cached, (ss, tt), strict=True):
        grads = cachex.cache_grad(apply_fn)(params, grads, cached_grad, **side)
    return jax.lax.psum((loss, grads), axis)


def by_decorator(check_vma, apply_fn, params, ss, tt, axis):
    """grad_cached with JAX's own rules for the gradient of replicated parameters."""
    encode_chunks = cachex.grad_cached(lambda p, chunk: apply_fn(params=p, **chunk))

    def mean_loss(p):
        loss = own_loss(encode_chunks(p, ss), encode_chunks(p, tt), axis).mean()
        return jax.lax.pmean(loss, axis) if check_vma else loss

    loss, grads = jax.value_and_grad(mean_loss)(params)
    return (loss, grads) if check_vma else jax.lax.pmean((loss, grads), axis)


def by_mapped_step(loss_fn, apply_fn, params, ss, tt, axis):
    loss, state = cachex.cache_train_step(loss_fn, SGD(params, apply_fn), ss, tt, axis)
    return loss, jax.tree.map(jnp.subtract, params, state.params)


def communication_in_loops(jaxpr, inside=False):
    """Names of the collective operations that run once per chunk."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if inside and name.startswith(("psum", "all_", "reduce_scatter")):
            found.append(name)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                found += communication_in_loops(inner, inside or name == "scan")
    return found


STEPS = {"full": full_loss, "own": own_loss, "shared": shared_loss}
# (what a device does, check_vma, dropout and tied towers or neither)
CASES = [
    ("full", True, False),
    *(("own", True, True), ("own", False, True)),
    *(("shared", True, False), ("shared", False, False)),
    ("own sums", True, False),
    *(("grad_cached", True, True), ("grad_cached", False, False)),
]


def compare_two_devices():
    """Largest differences between one device and two, per case, as JSON on stdout."""
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)
    mesh = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,))
    rows, everywhere = PartitionSpec("device"), PartitionSpec()
    one_device, report = {}, []
    for dropout in (False, True):
        apply_fn, params = towers(not dropout, jnp.float64)
        ss, tt = batch(not dropout, jnp.float64)
        inputs = cachex.tree_chunk(ss, 4), cachex.tree_chunk(tt, 2)
        inputs = (with_keys(inputs[0], 5), with_keys(inputs[1], 6)) if dropout else inputs
        wanted = jax.jit(partial(by_train_step, apply_fn))(params, *inputs)
        params = jax.device_put(params, NamedSharding(mesh, everywhere))
        inputs = jax.device_put(inputs, NamedSharding(mesh, rows))
        one_device[dropout] = apply_fn, jax.device_get(wanted), (params, *inputs)
    for name, check_vma, dropout in CASES:
        apply_fn, (loss, grads), inputs = one_device[dropout]
        way = {"own sums": by_own_sums, "grad_cached": partial(by_decorator, check_vma)}.get(name)
        mapped = jax.shard_map(
            partial(way or partial(by_mapped_step, STEPS[name]), apply_fn, axis="device"),
            mesh=mesh,
            in_specs=(everywhere, rows, rows),
            out_specs=(everywhere, everywhere),
            check_vma=check_vma,
        )
        traced = jax.jit(mapped).trace(*inputs)
        found_loss, found = jax.device_get(traced.lower().compile()(*inputs))
        gaps = {"loss": abs(float(found_loss - loss)), "gradient": largest_difference(found, grads)}
        in_loops = communication_in_loops(traced.jaxpr)
        report.append([name, check_vma, dropout, gaps, in_loops])
    sys.stdout.write(json.dumps(report))


def test_two_devices_give_the_gradient_of_one():
    shown = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).resolve())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert [tuple(case[:3]) for case in report] == CASES
    for *case, gaps, in_loops in report:
        assert max(gaps.values()) < 1e-12, (case, gaps)
        assert in_loops == [], case


if __name__ == "__main__":
    compare_two_devices()
