"""The class against autograd through the same chunks; every kind of input and every hook."""

from collections import UserDict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toy_towers import (
    VOCABULARY,
    clear_gradients,
    gradients_of,
    largest_relative_error,
    make_encoder,
    nll,
    random_tokens,
)

from gc_dpr.grad_cache import GradCache, RandContext

POSITIVE_INDEX = torch.tensor([0, 3, 4, 6, 10, 11, 13])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def loss_fn(question_reps, passage_reps, positive_index=POSITIVE_INDEX, scale=1.0):
    return nll(question_reps, passage_reps, positive_index) * scale


def padded(count, seed):
    return random_tokens(count, seed).pad(torch.arange(count), pad_token_id=0)


QUESTIONS, PASSAGES = padded(7, seed=3), padded(16, seed=4)


def encoders_of(shared=False, **kwargs):
    question = make_encoder(seed=1, **kwargs)
    return [question, question if shared else make_encoder(seed=2, **kwargs)]


def slices(count, size):
    return [slice(start, start + size) for start in range(0, count, size)]


def plain_step(encoders, sizes, loss=loss_fn):
    """All chunks in one graph, drawn from the generator in the same order."""
    reps = []
    for encoder, inputs, size in zip(encoders, (QUESTIONS, PASSAGES), sizes, strict=True):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        reps.append(torch.cat([encoder(ids[s], mask[s]) for s in slices(len(ids), size)]))
    result = loss(*reps)
    result.backward()
    return result.detach()


def compare(cached, plain, encoders, tolerance):
    results = []
    for step in (cached, plain):
        clear_gradients(*encoders)
        torch.manual_seed(5)
        results.append((step(), gradients_of(*encoders), torch.get_rng_state()))
    (loss, gradients, state), (plain_loss, plain_gradients, plain_state) = results
    assert not loss.requires_grad
    assert abs(loss - plain_loss) <= tolerance * plain_loss
    assert largest_relative_error(gradients, plain_gradients) < tolerance
    assert torch.equal(state, plain_state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [1, 3, 5, 16, 100])
def test_equals_autograd_through_the_same_chunks(size, shared, dtype):
    encoders = encoders_of(shared, dtype=dtype)
    cache = GradCache(encoders, size, loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (size, size)),
        encoders,
        TOLERANCE[dtype],
    )


def test_equals_the_undivided_batch_without_dropout():
    encoders = encoders_of(dropout=0.0)
    cache = GradCache(encoders, [2, 5], loss_fn)
    compare(
        lambda: cache.cache_step(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (7, 16)),
        encoders,
        1e-12,
    )


def of_kind(kind, inputs):
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return {
        "dict": {"input_ids": ids, "attention_mask": mask},
        "UserDict": UserDict(input_ids=ids, attention_mask=mask),
        "list": [ids, mask],
        "tuple": ([ids], {"attention_mask": mask}),
    }[kind]


@pytest.mark.parametrize("kind", ["dict", "UserDict", "list", "tuple"])
def test_kinds_of_input(kind):
    encoders = encoders_of()
    cache = GradCache(encoders, [3, 5], loss_fn)
    compare(
        lambda: cache(of_kind(kind, QUESTIONS), of_kind(kind, PASSAGES)),
        lambda: plain_step(encoders, (3, 5)),
        encoders,
        1e-12,
    )


def test_plain_tensors_and_three_models():
    torch.manual_seed(0)
    models = [nn.Linear(4, 3), nn.Linear(5, 3), nn.Linear(4, 3)]
    inputs = [torch.randn(6, 4), torch.randn(6, 5), torch.randn(9, 4)]

    def three_way(a, b, c):
        return torch.logsumexp(a @ b.T, 1).mean() + torch.logsumexp(b @ c.T, 1).mean()

    loss = GradCache(models, [4, 2, 9], three_way)(*inputs)
    found = gradients_of(*models)
    for model in models:
        model.zero_grad()
    undivided = three_way(*[m(x) for m, x in zip(models, inputs, strict=True)])
    undivided.backward()
    assert torch.allclose(loss, undivided, rtol=1e-6)
    assert largest_relative_error(found, gradients_of(*models)) < 1e-5


def test_loss_keywords_reach_the_loss():
    encoders = encoders_of()
    cache = GradCache(encoders, 3, lambda q, p, **kwargs: loss_fn(q, p, **kwargs))
    reversed_index = POSITIVE_INDEX.flip(0)
    compare(
        lambda: cache(QUESTIONS, PASSAGES, positive_index=reversed_index, scale=0.5),
        lambda: plain_step(encoders, (3, 3), lambda q, p: loss_fn(q, p, reversed_index, 0.5)),
        encoders,
        1e-12,
    )


def test_custom_split_and_reps():
    """Texts as lists of token lists, cut unevenly; the model wraps what it returns."""
    encoders = encoders_of(dropout=0.0)
    texts = {"input_ids": QUESTIONS["input_ids"], "attention_mask": QUESTIONS["attention_mask"]}

    def split_input_fn(model_input, chunk_size):
        rows = [slice(0, 1), *slices(len(model_input["rows"]), chunk_size)[1:]]
        rows[0:1] = [slice(0, 1), slice(1, chunk_size)]
        return [{"rows": model_input["rows"][s]} for s in rows]

    def wrap(encoder, inputs):
        def model(rows):
            ids = inputs["input_ids"][rows]
            return SimpleNamespace(reps=encoder(ids, inputs["attention_mask"][rows]))

        return model

    models = [wrap(encoders[0], texts), wrap(encoders[1], PASSAGES)]
    cache = GradCache(models, [3, 5], loss_fn, split_input_fn, lambda output: output.reps)
    compare(
        lambda: cache({"rows": list(range(7))}, {"rows": list(range(16))}),
        lambda: plain_step(encoders, (7, 16)),
        encoders,
        1e-12,
    )


class Recording(GradCache):
    """Overrides every hook and notes the calls."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.called = []


def _recording(name):
    def method(self, *args, **kwargs):
        self.called.append(name)
        return getattr(super(Recording, self), name)(*args, **kwargs)

    return method


HOOKS = (
    "split_inputs",
    "get_input_tensors",
    "model_call",
    "get_reps",
    "compute_loss",
    "forward_no_grad",
    "build_cache",
    "forward_backward",
)
for hook in HOOKS:
    setattr(Recording, hook, _recording(hook))


def test_cache_step_goes_through_every_hook():
    encoders = encoders_of()
    cache = Recording(encoders, [4, 16], loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (4, 16)),
        encoders,
        1e-12,
    )
    counts = {name: cache.called.count(name) for name in HOOKS if name != "get_input_tensors"}
    assert counts == {
        "split_inputs": 2,
        "model_call": 6,
        "get_reps": 6,
        "compute_loss": 1,
        "forward_no_grad": 2,
        "build_cache": 1,
        "forward_backward": 2,
    }
    assert "get_input_tensors" in cache.called


def test_frozen_model_is_not_replayed():
    encoders = encoders_of()
    encoders[1].requires_grad_(False)
    cache = GradCache(encoders, [3, 5], loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (3, 5)),
        encoders[:1],
        1e-12,
    )
    clear_gradients(*encoders)
    cache(QUESTIONS, PASSAGES)
    assert [size for size, _ in encoders[1].calls] == [5, 5, 5, 1]
    assert encoders[0].calls == [(n, graph) for graph in (False, True) for n in (3, 3, 1)]


def fp16_steps(scale):
    encoders = encoders_of(dtype=torch.float32)
    optimizer = torch.optim.SGD([p for e in encoders for p in e.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    dtypes = []
    encoders[0].hidden.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    torch.manual_seed(0)
    cache = GradCache(encoders, [3, 5], loss_fn, fp16=True, scaler=scaler)
    loss = cache(QUESTIONS, PASSAGES)
    assert set(dtypes) == {torch.float16}
    scaler.unscale_(optimizer)
    return loss, gradients_of(*encoders)


def test_fp16_scales_once():
    """B43. Halves round differently per scale, hence the tolerance."""
    (loss, gradients), (other_loss, other_gradients) = fp16_steps(1.0), fp16_steps(1024.0)
    assert loss == other_loss
    assert loss.dtype == torch.float32
    assert largest_relative_error(gradients, other_gradients) < 1e-2


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_scaler_without_fp16_scales_too(scale):
    """Who passes a scaler will unscale: the gradients must carry its factor."""
    encoders = encoders_of(dtype=torch.float32)
    optimizer = torch.optim.SGD([p for e in encoders for p in e.parameters()], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    cache = GradCache(encoders, 3, loss_fn, scaler=scaler)

    def cached():
        loss = cache(QUESTIONS, PASSAGES)
        scaler.unscale_(optimizer)
        return loss

    compare(cached, lambda: plain_step(encoders, (3, 3)), encoders, 1e-5)


def test_module_that_takes_one_tensor_is_called_with_it():
    cache = GradCache([nn.Embedding(VOCABULARY, 2)], 2, lambda reps: reps.sum())
    assert cache(torch.arange(5)).shape == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_sizes": [2, 3, 4]}, "found 3 sizes for 2 models"),
        ({"chunk_sizes": 0}, r"at least 1, found 0"),
        ({"chunk_sizes": [4, -1]}, "at least 1"),
        ({"chunk_sizes": []}, "found 0 sizes for 2 models"),
        ({"chunk_sizes": 4, "fp16": True}, "needs scaler"),
        ({"chunk_sizes": 4, "models": []}, "models is empty"),
    ],
)
def test_wrong_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        GradCache(**{"models": encoders_of(), "loss_fn": loss_fn, **arguments})


@pytest.mark.parametrize("sizes", [True, 2.0, [2, 2.5], [False, 3], "ab", None])
def test_chunk_sizes_must_be_whole_numbers(sizes):
    with pytest.raises(TypeError, match="whole numbers of rows"):
        GradCache(encoders_of(), sizes, loss_fn)


def test_chunk_sizes_of_numpy():
    assert GradCache(encoders_of(), numpy.int64(3), loss_fn).chunk_sizes == [3, 3]


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ([QUESTIONS], {}, ValueError, "found 1 inputs for 2 models"),
        (["text", PASSAGES], {}, TypeError, "split_input_fn"),
        ([QUESTIONS, PASSAGES], {"no_sync_except_last": True}, ValueError, "no_sync: wrap"),
    ],
)
def test_wrong_calls(inputs, options, error, message):
    cache = GradCache(encoders_of(), 3, loss_fn)
    with pytest.raises(error, match=message):
        cache(*inputs, **options)


def test_wrong_outputs_and_kinds():
    encoders = encoders_of()
    with pytest.raises(ValueError, match=r"shape \(C, D\), found \(3,\)"):
        GradCache(encoders, 3, loss_fn, get_rep_fn=lambda out: out[:, 0])(QUESTIONS, PASSAGES)
    with pytest.raises(TypeError, match="get_rep_fn"):
        GradCache(encoders, 3, loss_fn, get_rep_fn=lambda out: (out,))(QUESTIONS, PASSAGES)
    with pytest.raises(TypeError, match="override model_call"):
        GradCache(encoders, 3, loss_fn, lambda x, size: ["text"])(QUESTIONS, PASSAGES)
    for encoder in encoders:
        encoder.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        GradCache(encoders, 3, loss_fn)(QUESTIONS, PASSAGES)


def sum_loss(*reps):
    return sum(r.square().sum() for r in reps)


def test_last_chunk_keeps_its_graph():
    encoders = encoders_of()
    cache = GradCache(encoders, [3, 5], loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (3, 5)),
        encoders,
        1e-12,
    )
    clear_gradients(*encoders)
    cache(QUESTIONS, PASSAGES)
    assert encoders[0].calls == [(n, graph) for graph in (False, True) for n in (3, 3, 1)]
    first, second = [(5, False)] * 3 + [(1, True)], [(5, True)] * 3
    assert encoders[1].calls == first + second


def test_a_single_chunk_is_encoded_once():
    encoder = make_encoder()
    GradCache([encoder], 7, sum_loss)(QUESTIONS)
    assert encoder.calls == [(7, True)]


@pytest.mark.parametrize("size", [3, 7])
def test_bfloat16_around_the_whole_step(size):
    """The loss and the backward pass stay outside autocast, so the reps' gradient is exact."""
    encoders, dtypes = encoders_of(dtype=torch.float32), []
    encoders[0].hidden.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    positives = POSITIVE_INDEX

    def around_step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return GradCache(encoders, [size, 16], loss_fn)(QUESTIONS, PASSAGES)

    def around_forward(question_reps, passage_reps):
        return nll(question_reps.float(), passage_reps.float(), positives)

    def plain():
        loss_of = torch.autocast("cpu", enabled=False)(around_forward)
        reps = []
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for encoder, inputs, n in zip(encoders, (QUESTIONS, PASSAGES), (size, 16), strict=True):
                ids, mask = inputs["input_ids"], inputs["attention_mask"]
                reps.append(torch.cat([encoder(ids[s], mask[s]) for s in slices(len(ids), n)]))
        loss = loss_of(*reps)
        loss.backward()
        return loss.detach()

    compare(around_step, plain, encoders, 1e-2 if size == 3 else 1e-6)
    assert set(dtypes) == {torch.bfloat16}


def test_frozen_input_gradient_is_not_lost():
    """A learned prompt in front of a frozen encoder."""
    encoder = nn.Linear(3, 2).requires_grad_(False)
    prompt = torch.randn(5, 3, requires_grad=True)
    GradCache([encoder], 2, sum_loss)(prompt)
    found, prompt.grad = prompt.grad, None
    sum_loss(encoder(prompt)).backward()
    assert torch.allclose(found, prompt.grad)


def test_frozen_model_inside_a_function_gets_nothing():
    frozen, trained = make_encoder().requires_grad_(False), make_encoder()
    cache = GradCache([lambda **x: frozen(**x), trained], 3, loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step([frozen, trained], (3, 3)),
        [trained],
        1e-12,
    )
    assert all(p.grad is None for p in frozen.parameters())


def test_several_positive_inputs_and_nothing_but_the_loss_to_train():
    encoders = encoders_of()
    for encoder in encoders:
        encoder.requires_grad_(False)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, question_reps, passage_reps):
            return loss_fn(question_reps * self.scale, passage_reps)

    loss = Scaled()
    GradCache(encoders, 3, loss)(QUESTIONS, PASSAGES)
    assert float(loss.scale.grad) != 0


def package_states(self, model, model_inputs):
    """As a subclass of the package's class does it: random contexts, which know no rows."""
    states, reps = [], []
    with torch.no_grad():
        for chunk in model_inputs:
            states.append(RandContext(*self.get_input_tensors(chunk)))
            reps.append(self.get_reps(self.model_call(model, chunk)))
    return torch.cat(reps), states


def package_replay(self, model, model_inputs, cached_gradients, random_states, postponed=False):
    """The package's signature and its way: enter the state, back-propagate a surrogate."""
    for chunk, gradient, state in zip(model_inputs, cached_gradients, random_states, strict=True):
        with state:
            reps = self.get_reps(self.model_call(model, chunk))
        torch.dot(reps.flatten(), gradient.flatten()).backward()


@pytest.mark.parametrize("first", [None, package_states])
@pytest.mark.parametrize("second", [None, package_replay])
def test_subclasses_written_for_the_package(first, second):
    hooks = {"forward_no_grad": first, "forward_backward": second}
    kind = type("Own", (GradCache,), {name: hook for name, hook in hooks.items() if hook})
    encoders = encoders_of()
    cache = kind(encoders, [3, 5], loss_fn)
    compare(
        lambda: cache(QUESTIONS, PASSAGES),
        lambda: plain_step(encoders, (3, 5)),
        encoders,
        1e-12,
    )


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_inputs_of_any_type_with_split_input_fn(kind):
    """The package's heuristics for calling a model with chunks that hold no tensors."""
    encoder = nn.Embedding(VOCABULARY, 2)

    def model(rows, scale=(1.0,)):
        return encoder(torch.tensor(rows)) * scale[0]

    def split_input_fn(rows, size):
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            yield {
                "list": [part],
                "dict": {"rows": part, "scale": (3.0,)},
                "tuple": ([part], {"scale": (3.0,)}),
            }[kind]

    GradCache([model], 2, sum_loss, split_input_fn)([1, 2, 2, 5, 7])
    found, encoder.weight.grad = encoder.weight.grad, None
    sum_loss(model([1, 2, 2, 5, 7], (1.0 if kind == "list" else 3.0,))).backward()
    assert torch.allclose(found, encoder.weight.grad)


def untouched_after(error, message, encoders, *args, **kwargs):
    clear_gradients(*encoders)
    with pytest.raises(error, match=message):
        GradCache(encoders, *args, **kwargs)(QUESTIONS, PASSAGES)
    return all(p.grad is None for encoder in encoders for p in encoder.parameters())


def failing_loss(*reps):
    raise ZeroDivisionError("of the user")


def test_no_gradient_is_touched_by_a_fault():
    other_width = [make_encoder(seed=1), make_encoder(seed=2, dim=5)]
    assert untouched_after(RuntimeError, "shapes cannot be multiplied", other_width, 3, loss_fn)
    assert untouched_after(ZeroDivisionError, "user", encoders_of(), 3, failing_loss)
    assert untouched_after(ValueError, "scalar", encoders_of(), 3, lambda q, p: q.sum(1))
    no_chunk = untouched_after(ValueError, "no chunk at all", encoders_of(), 3, loss_fn, empty_list)
    assert no_chunk


def empty_list(model_input, chunk_size):
    return []


def test_loss_that_is_not_a_number_is_returned():
    encoders = encoders_of()
    before = [p.detach().clone() for encoder in encoders for p in encoder.parameters()]
    loss = GradCache(encoders, 3, lambda q, p: loss_fn(q, p) * torch.nan)(QUESTIONS, PASSAGES)
    assert torch.isnan(loss)
    assert not loss.requires_grad
    after = [p for encoder in encoders for p in encoder.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.isnan(g).any() for g in gradients_of(*encoders))


def test_input_without_rows():
    encoder = nn.Linear(3, 2)
    loss = GradCache([encoder, encoder], 2, sum_loss)(torch.ones(0, 3), torch.ones(3, 3))
    found, encoder.weight.grad = encoder.weight.grad, None
    sum_loss(encoder(torch.ones(3, 3))).backward()
    assert torch.allclose(found, encoder.weight.grad)
    assert loss > 0


def test_inputs_whose_rows_differ():
    mask = QUESTIONS["attention_mask"][:5]
    cache = GradCache(encoders_of(), 3, loss_fn)
    with pytest.raises(ValueError, match=r"found \{'input_ids': 7, 'attention_mask': 5\}"):
        cache({**QUESTIONS, "attention_mask": mask}, PASSAGES)


def test_frozen_tower_needs_no_wrapper():
    """DistributedDataParallel refuses to wrap a model without a parameter to train."""
    encoders = encoders_of()
    encoders[0].requires_grad_(False)
    encoders[1].no_sync = nullcontext
    GradCache(encoders, 3, loss_fn)(QUESTIONS, PASSAGES, no_sync_except_last=True)
    assert encoders[1].output.weight.grad is not None


def test_a_head_behind_a_frozen_model_is_trained():
    """A frozen tower is not replayed, unless something beside it needs the gradient."""
    torch.manual_seed(0)
    inputs = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 6, dtype=torch.float64)

    def loss_fn(questions, passages):
        return F.cross_entropy(questions @ passages.T, torch.arange(12))

    for frozen in ([0], [1], [0, 1]):
        encoders = [nn.Linear(6, 4).double() for _ in range(2)]
        head = nn.Linear(4, 3).double()
        for i in frozen:
            encoders[i].requires_grad_(False)
        GradCache(encoders, 5, loss_fn, get_rep_fn=head)(*inputs)
        found = head.weight.grad.clone()
        head.zero_grad()
        loss_fn(*(head(e(x)) for e, x in zip(encoders, inputs, strict=True))).backward()
        torch.testing.assert_close(found, head.weight.grad, rtol=1e-12, atol=1e-14)


def test_a_model_that_a_wrapper_does_not_register_is_trained():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = [inner]

        def forward(self, inputs):
            return self.inner[0](inputs)

    torch.manual_seed(0)
    inner, inputs = nn.Linear(6, 4).double(), torch.randn(7, 6, dtype=torch.float64)
    GradCache([Wrapper(inner)], 3, lambda reps: reps.square().sum())(inputs)
    found = inner.weight.grad.clone()
    inner.zero_grad()
    inner(inputs).square().sum().backward()
    torch.testing.assert_close(found, inner.weight.grad, rtol=1e-12, atol=1e-14)
