"""The decorators against plain autograd through the same chunks, and each misuse's error."""

from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toy_towers import (
    clear_gradients,
    gradients_of,
    largest_relative_error,
    make_encoder,
    random_tokens,
)

from gc_dpr.grad_cache import cached, cat_input_tensor, gather_input_tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def small_batches(count, rows, seed):
    """What a loader gives: padded batches of question or passage tokens."""
    batches = []
    for i in range(count):
        tokens = random_tokens(rows, seed=seed + i)
        batches.append(tokens.pad(torch.arange(rows), pad_token_id=0))
    return batches


def call_model(model, inputs):
    return model(**inputs)


def contrastive_loss(x, y):
    target = torch.arange(0, y.size(0), y.size(0) // x.size(0), device=x.device)
    return F.cross_entropy(x @ y.T, target)


def readme_loop(encode, loss_fn, encoders, batches, backward):
    """The loop of the package's README: one step after 16 small batches."""
    cache_x, cache_y, closures_x, closures_y = [], [], [], []
    for xx, yy in batches:
        rx, cx = encode(encoders[0], xx)
        ry, cy = encode(encoders[1], yy)
        cache_x.append(rx)
        cache_y.append(ry)
        closures_x.append(cx)
        closures_y.append(cy)
    loss = loss_fn(cache_x, cache_y)
    backward(loss)
    for closure, reps in zip(closures_x, cache_x, strict=True):
        closure(reps)
    for closure, reps in zip(closures_y, cache_y, strict=True):
        closure(reps)
    return loss.detach()


def plain_loop(encode, loss_fn, encoders, batches, backward):
    """All chunks in one graph."""
    pairs = [(encode(encoders[0], xx), encode(encoders[1], yy)) for xx, yy in batches]
    loss = loss_fn([x for x, _ in pairs], [y for _, y in pairs])
    backward(loss)
    return loss.detach()


BATCHES = list(zip(small_batches(16, 2, seed=0), small_batches(16, 4, seed=50), strict=True))


def encoders_of(shared=False, **kwargs):
    question = make_encoder(seed=1, **kwargs)
    return [question, question if shared else make_encoder(seed=2, **kwargs)]


def run(loop, encode, loss_fn, encoders, backward=torch.Tensor.backward):
    clear_gradients(*encoders)
    torch.manual_seed(5)
    loss = loop(encode, loss_fn, encoders, BATCHES, backward)
    return loss, gradients_of(*encoders), torch.get_rng_state()


def compare(found, expected, tolerance):
    assert abs(found[0] - expected[0]) <= tolerance * abs(expected[0])
    assert largest_relative_error(found[1], expected[1]) < tolerance
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shared", [False, True])
def test_readme_loop_equals_autograd_through_the_same_chunks(shared, dtype):
    encoders = encoders_of(shared, dtype=dtype)
    loss_fn = cat_input_tensor(contrastive_loss)
    compare(
        run(readme_loop, cached(call_model), loss_fn, encoders),
        run(plain_loop, call_model, loss_fn, encoders),
        TOLERANCE[dtype],
    )


def bfloat16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


@cached
@bfloat16()
def call_in_bfloat16(model, inputs):
    return model(**inputs)


def call_inside_autocast(model, inputs):
    with bfloat16():
        return cached(call_model)(model, inputs)


@pytest.mark.parametrize("encode", [call_in_bfloat16, call_inside_autocast])
@pytest.mark.parametrize("closures_in_autocast", [False, True])
def test_bfloat16_as_decorator_and_around_the_call(encode, closures_in_autocast):
    encoders, dtypes = encoders_of(dtype=torch.float32), set()
    for encoder in encoders:
        encoder.hidden.register_forward_hook(lambda module, args, out: dtypes.add(out.dtype))
    loss_fn = cat_input_tensor(bfloat16()(contrastive_loss))
    found = run(readme_loop, encode, loss_fn, encoders)
    if closures_in_autocast:
        with bfloat16():
            found = run(readme_loop, encode, loss_fn, encoders)
    assert dtypes == {torch.bfloat16}
    expected = run(plain_loop, bfloat16()(call_model), loss_fn, encoders)
    compare(found, expected, 1e-2)  # gradients are added up in another order, in bfloat16


def test_replay_under_the_autocast_of_the_first_call():
    """Called outside autocast the replay must stay outside, wherever the closure is called."""
    encoder = make_encoder(dtype=torch.float32)
    inputs = BATCHES[0][0]
    results = []
    for surrounding in (nullcontext, bfloat16):
        clear_gradients(encoder)
        torch.manual_seed(0)
        reps, closure = cached(call_model)(encoder, inputs)
        assert reps.dtype == torch.float32
        reps.square().sum().backward()
        with surrounding():
            closure(reps)
        results.append(gradients_of(encoder))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bfloat16_reps_keep_their_dtype_and_their_exact_gradient():
    """One chunk, nothing to add up: the bits of plain autograd."""
    encoder = make_encoder(dtype=torch.float32)
    inputs, results = BATCHES[0][1], []
    for plain in (False, True):
        clear_gradients(encoder)
        torch.manual_seed(0)
        with bfloat16():
            if plain:
                reps = encoder(**inputs)
            else:
                reps, closure = cached(call_model)(encoder, inputs)
        assert reps.dtype == torch.bfloat16
        reps.float().square().sum().backward()
        if not plain:
            closure(reps)
        results.append(gradients_of(encoder))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_fp16_with_a_scaler():
    encoders = encoders_of(dtype=torch.float32)
    optimizer = torch.optim.SGD([p for e in encoders for p in e.parameters()], lr=0.1)
    half = torch.autocast("cpu", dtype=torch.float16)

    def gradients(loop, encode, scale):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss, _, state = run(
            loop,
            encode,
            cat_input_tensor(lambda x, y: contrastive_loss(x.float(), y.float())),
            encoders,
            lambda loss: scaler.scale(loss).backward(),
        )
        scaler.unscale_(optimizer)
        return loss, gradients_of(*encoders), state

    expected = gradients(plain_loop, half(call_model), 64.0)
    for scale in (64.0, 1024.0):
        compare(gradients(readme_loop, cached(half(call_model)), scale), expected, 1e-2)


def test_unused_scaled_gradient_is_exact_without_halves():
    encoders = encoders_of(dtype=torch.float32)
    loss_fn = cat_input_tensor(contrastive_loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    found = run(
        readme_loop, cached(call_model), loss_fn, encoders, lambda x: scaler.scale(x).backward()
    )
    expected = run(plain_loop, call_model, loss_fn, encoders)
    assert largest_relative_error([g / 65536 for g in found[1]], expected[1]) < 1e-5


def both_sides(model, x, y):
    """A call that returns several tensors, of different sizes."""
    return model(**x), model(**y)


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_representations(kind):
    encoder = make_encoder()
    x, y = BATCHES[0]
    clear_gradients(encoder)
    torch.manual_seed(0)
    reps_x, reps_y, closure = cached(lambda *args: kind(both_sides(*args)))(encoder, x, y)
    contrastive_loss(reps_x, reps_y).backward()
    closure(kind([reps_x, reps_y]))
    found = gradients_of(encoder)
    clear_gradients(encoder)
    torch.manual_seed(0)
    contrastive_loss(*both_sides(encoder, x, y)).backward()
    assert largest_relative_error(found, gradients_of(encoder)) < 1e-12


def test_one_of_several_representations_may_be_unused():
    encoder = make_encoder(dropout=0.0)
    x, y = BATCHES[0]
    clear_gradients(encoder)
    reps_x, reps_y, closure = cached(both_sides)(encoder, x, y)
    reps_x.sum().backward()
    closure((reps_x, reps_y))
    found = gradients_of(encoder)
    clear_gradients(encoder)
    encoder(**x).sum().backward()
    assert largest_relative_error(found, gradients_of(encoder)) < 1e-12


class Trainer:
    """Holds the model; its method is cached. Not a module."""

    def __init__(self, encoder):
        self.encoder = encoder

    @cached
    def encode(self, inputs):
        """Encode a batch."""
        return self.encoder(**inputs)

    def encode_plainly(self, inputs):
        return self.encoder(**inputs)


@pytest.mark.parametrize("bound", [False, True])
def test_methods(bound):
    trainer = Trainer(make_encoder())
    encode = cached(trainer.encode_plainly) if bound else trainer.encode
    torch.manual_seed(0)
    reps, closure = encode(inputs=BATCHES[0][0])
    reps.square().sum().backward()
    closure(reps)
    found = gradients_of(trainer.encoder)
    clear_gradients(trainer.encoder)
    torch.manual_seed(0)
    trainer.encode_plainly(BATCHES[0][0]).square().sum().backward()
    assert largest_relative_error(found, gradients_of(trainer.encoder)) < 1e-12


def test_decorated_functions_keep_their_names():
    assert (Trainer.encode.__name__, Trainer.encode.__doc__) == ("encode", "Encode a batch.")
    assert cat_input_tensor(contrastive_loss).__name__ == "contrastive_loss"
    assert gather_input_tensor(contrastive_loss).__name__ == "contrastive_loss"


def test_gradient_flows_into_inputs_too():
    """A learned prompt in front of a frozen encoder."""
    encoder = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).requires_grad_(False)
    prompt = torch.randn(4, 3, requires_grad=True)
    torch.manual_seed(0)
    reps, closure = cached(encoder)(prompt)
    reps.sum().backward()
    closure(reps)
    found, prompt.grad = prompt.grad, None
    torch.manual_seed(0)
    encoder(prompt).sum().backward()
    assert torch.equal(found, prompt.grad)


@pytest.mark.parametrize("as_method", [False, True])
def test_frozen_model_is_not_encoded_again(as_method):
    encoder = make_encoder().requires_grad_(False)
    encode = Trainer(encoder).encode if as_method else lambda x: cached(call_model)(encoder, x)
    reps, closure = encode(BATCHES[0][0])
    assert not reps.requires_grad
    closure(reps)
    assert len(encoder.calls) == 1


def test_what_only_seems_frozen_is_trained():
    """A frozen backbone in sight, a trained head out of sight."""
    backbone, head = make_encoder(dropout=0.0).requires_grad_(False), nn.Linear(6, 2).double()
    reps, closure = cached(lambda model, x: head(model(**x)))(backbone, BATCHES[0][0])
    assert reps.grad_fn is None
    reps.sum().backward()
    closure(reps)
    assert torch.allclose(head.bias.grad, torch.full((2,), 2.0, dtype=torch.float64))


def test_frozen_model_out_of_sight_gets_nothing():
    encoder = make_encoder().requires_grad_(False)
    reps, closure = cached(lambda x: encoder(**x))(BATCHES[0][0])
    reps.sum().backward()
    closure(reps)
    assert all(p.grad is None for p in encoder.parameters())


def test_under_no_grad_there_is_nothing_to_do():
    encoder = make_encoder()
    with torch.no_grad():
        reps, closure = cached(call_model)(encoder, BATCHES[0][0])
    assert not reps.requires_grad
    closure(reps)
    assert len(encoder.calls) == 1
    assert encoder.output.weight.grad is None


def test_closure_works_inside_no_grad():
    encoder = make_encoder()
    reps, closure = cached(call_model)(encoder, BATCHES[0][0])
    reps.sum().backward()
    with torch.no_grad():
        closure(reps)
    assert encoder.output.weight.grad is not None


def cached_chunk():
    return cached(call_model)(make_encoder(), BATCHES[0][0])


def test_closure_before_backward():
    reps, closure = cached_chunk()
    with pytest.raises(ValueError, match=r"call loss\.backward\(\) before the closure"):
        closure(reps)
    reps.sum().backward()
    closure(reps)  # the error has not used it up


def test_closure_with_other_representations():
    (reps, closure), (other, _) = cached_chunk(), cached_chunk()
    (reps.sum() + other.sum()).backward()
    for wrong in (other, (reps, reps), reps.clone(), ()):
        with pytest.raises(ValueError, match="given other representations"):
            closure(wrong)
    closure(reps)


def test_closure_twice():
    reps, closure = cached_chunk()
    reps.sum().backward()
    closure(reps)
    with pytest.raises(ValueError, match="was called before"):
        closure(reps)


def test_failed_replay_can_be_repeated():
    """As after an out-of-memory error: nothing was added, the closure still works."""
    encoder, failures = make_encoder(), []

    def call(inputs):
        if failures:
            raise failures.pop()
        return encoder(**inputs)

    torch.manual_seed(0)
    reps, closure = cached(call)(BATCHES[0][0])
    reps.sum().backward()
    failures.append(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        closure(reps)
    assert encoder.output.weight.grad is None
    closure(reps)
    found = gradients_of(encoder)
    clear_gradients(encoder)
    torch.manual_seed(0)
    call(BATCHES[0][0]).sum().backward()
    assert largest_relative_error(found, gradients_of(encoder)) < 1e-12


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        (torch.ones(3), ValueError, r"shape \(C, D\), found \(3,\)"),
        (torch.ones(2, 5, 4), ValueError, r"found \(2, 5, 4\)"),
        ((torch.ones(2, 4), torch.ones(3)), ValueError, r"found \(3,\)"),
        (torch.ones(2, 4, dtype=torch.int64), ValueError, r"floating point, found torch\.int64"),
        (SimpleNamespace(pooler_output=1), TypeError, "found SimpleNamespace"),
        ({"reps": torch.ones(2, 4)}, TypeError, "found dict"),
        ((torch.ones(2, 4), None), TypeError, "found NoneType"),
        ((), TypeError, "found tuple"),
    ],
)
def test_outputs_that_are_no_representations(output, error, message):
    with pytest.raises(error, match=message):
        cached(lambda: output)()


def recorded(*args, **kwargs):
    return args, kwargs


Pair = namedtuple("Pair", "first second")


def test_cat_joins_lists_and_tuples_and_nothing_else():
    a, b = torch.ones(2, 3), torch.zeros(1, 3)
    untouched = (a, "text", 0.5, [1, 2], [a, "text"], Pair(a, b), {"a": [a, b]})
    args, kwargs = cat_input_tensor(recorded)([a, b], (b, a), *untouched, y=[a], other=untouched[3])
    assert torch.equal(args[0], torch.cat([a, b]))
    assert torch.equal(args[1], torch.cat([b, a]))
    assert all(found is given for found, given in zip(args[2:], untouched, strict=True))
    assert torch.equal(kwargs["y"], a)
    assert kwargs["other"] is untouched[3]


@pytest.mark.parametrize(("args", "kwargs"), [([[]], {}), ([], {"y": ()})])
def test_cat_refuses_an_empty_list(args, kwargs):
    with pytest.raises(ValueError, match=r"argument (0|'y') is an empty (list|tuple)"):
        cat_input_tensor(recorded)(*args, **kwargs)


def test_keyword_tensors_have_their_gradient():
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    loss_fn = cat_input_tensor(gather_input_tensor(contrastive_loss))
    loss_fn(x=[x[:1], x[1:]], y=[y]).backward()
    found, x.grad = x.grad, None
    contrastive_loss(x, y).backward()
    assert torch.equal(found, x.grad)


@pytest.mark.parametrize("decorator", [gather_input_tensor, gather_input_tensor(axis=1)])
def test_gather_is_a_no_op_on_one_process(decorator):
    given = (torch.ones(2, 3), torch.tensor(0.05), "text", None, [1, 2])
    args, kwargs = decorator(recorded)(*given, y=given[0])
    assert all(found is value for found, value in zip(args, given, strict=True))
    assert kwargs["y"] is given[0]


def test_gather_with_its_axis_beside_the_function():
    """The package's signature."""
    assert gather_input_tensor(contrastive_loss, 0)(torch.eye(2), torch.eye(2)).dim() == 0
    with pytest.raises(IndexError):
        gather_input_tensor(recorded, axis=2)(torch.eye(2))


@pytest.mark.parametrize("kind", [list, tuple])
def test_gather_refuses_lists_of_tensors(kind):
    with pytest.raises(TypeError, match="put @cat_input_tensor above @gather_input_tensor"):
        gather_input_tensor(cat_input_tensor(recorded))(y=kind([torch.ones(2, 3)]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_on_a_gpu_with_the_model_out_of_sight(half):
    """B28: nothing in the arguments says where the dropout draws."""
    encoder = make_encoder(dtype=torch.float32).cuda()

    def call(*rows):
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            return encoder(torch.tensor(rows).cuda(), torch.ones(len(rows), 3).cuda())

    gradients = []
    for plain in (False, True):
        clear_gradients(encoder)
        torch.manual_seed(0)
        reps, closure = (
            (call([1, 2, 3], [4, 5, 6]), None) if plain else cached(call)([1, 2, 3], [4, 5, 6])
        )
        reps.float().square().sum().backward()
        if not plain:
            closure(reps)
        gradients.append(gradients_of(encoder))
    assert largest_relative_error(*gradients) < 1e-6
