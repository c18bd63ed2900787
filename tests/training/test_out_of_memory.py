"""A chunk that does not fit is made smaller, and the step ends as if nothing had happened."""

import logging
import weakref

import pytest
import torch
from distributed_run import run_distributed
from training_parts import CPU, example, examples, make_batches, make_model, make_trainer

from gc_dpr.distributed import rank, sum_gradients, sum_over_processes
from gc_dpr.losses import in_batch_nll
from gc_dpr.seeding import derive_seed, seed_everything
from gc_dpr.training import batch_step
from gc_dpr.training.batch_step import batch_gradients
from gc_dpr.training.chunk_budget import ChunkBudget, TextDoesNotFitError

ERROR = torch.OutOfMemoryError("made up: tried to allocate 20 GiB")
LARGE = ChunkBudget(400)


class Shortage:
    """Lets an encoder run out of memory on chunks of more than ``limit`` padded tokens."""

    def __init__(self, encoder, limit, *, when, error=ERROR):
        self.limit, self.when, self.error, self.times = limit, when, error, 0
        if when == "backward":
            layer = encoder.transformer.encoder.layer[0]  # those above have their gradients by then
            layer.register_full_backward_pre_hook(self.in_backward)
        else:
            encoder.register_forward_pre_hook(self.in_forward, with_kwargs=True)

    def in_forward(self, module, args, chunk):
        graph = torch.is_grad_enabled()
        if chunk["input_ids"].numel() > self.limit and graph == (self.when == "second pass"):
            self.times += 1
            raise self.error

    def in_backward(self, module, gradients):
        if gradients[0][..., 0].numel() > self.limit:
            self.times += 1
            raise self.error


def setup(folder, *, shared=False, dropout=0.3):
    model = make_model(folder, dropout=dropout, shared=shared).train()
    loader, _ = make_batches(model, examples(9), batch_size=9)
    return model, next(iter(loader))


def gradients(model, batch, question=LARGE, passage=LARGE, **options):
    torch.manual_seed(5)
    outcome = batch_gradients(
        model, batch, question_budget=question, passage_budget=passage, device=CPU, **options
    )
    return outcome, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("when", ["first pass", "second pass", "backward"])
@pytest.mark.parametrize("shared", [False, True])
def test_the_budget_is_halved_and_the_step_is_as_if_nothing_had_happened(
    tiny_encoder_dir, caplog, when, shared
):
    """Bit for bit the step of the smaller budget, dropout on, on top of gradients already there."""
    model, batch = setup(tiny_encoder_dir, shared=shared)
    questions = ChunkBudget(60)  # never too large, also where the encoder is shared
    expected, plain = gradients(model, batch, questions, ChunkBudget(100))
    after = torch.rand(1)
    assert expected.chunks > 4
    model.zero_grad()
    _, before = gradients(model, batch, questions, ChunkBudget(150))  # something to add to
    shortage = Shortage(model.passage_encoder, 110, when=when)
    with caplog.at_level(logging.WARNING):
        outcome, _ = gradients(model, batch, questions)
    assert shortage.times == 2  # 400 and 200 were too much
    assert outcome.passage_budget == ChunkBudget(100)
    assert outcome.question_budget == questions
    assert torch.equal(outcome.loss, expected.loss)
    assert torch.equal(torch.rand(1), after)  # the generators go on as after a plain step
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, before[name] + plain[name], rtol=1e-12, atol=1e-14)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "passage chunk budget goes from 400 to 200 tokens" in messages[0]
    assert "from 200 to 100" in messages[1]
    assert "hardware.passage_chunk_tokens=100" in messages[1]


@pytest.mark.parametrize("when", ["first pass", "second pass", "backward"])
def test_without_earlier_gradients_the_result_is_bitwise_that_of_the_smaller_budget(
    tiny_encoder_dir, when
):
    model, batch = setup(tiny_encoder_dir)
    _, expected = gradients(model, batch, passage=ChunkBudget(100))
    model.zero_grad()
    Shortage(model.passage_encoder, 110, when=when)
    assert_same(gradients(model, batch)[1], expected)


def test_questions_and_passages_shrink_on_their_own(tiny_encoder_dir):
    model, batch = setup(tiny_encoder_dir)
    assert batch.questions.lengths.sum() > 60
    small = ChunkBudget(50, kept=1), ChunkBudget(100, kept=1)
    _, expected = gradients(model, batch, *small)
    model.zero_grad()
    first = Shortage(model.question_encoder, 60, when="first pass")
    second = Shortage(model.passage_encoder, 110, when="backward")
    start = ChunkBudget(100, kept=1), ChunkBudget(400, kept=1)
    outcome, found = gradients(model, batch, *start, kept_tokens=60)
    # first fewer graphs are kept, then none, then the budgets are halved
    assert outcome.kept_tokens == 0
    assert (outcome.question_budget, outcome.passage_budget) == (ChunkBudget(50), ChunkBudget(100))
    assert second.times == 2
    assert first.times > 1
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


class Alive(torch.autograd.Function):
    """Holds an object for as long as the graph waits for its backward pass."""

    @staticmethod
    def forward(ctx, reps, held):
        ctx.held = held
        return reps.view_as(reps)

    @staticmethod
    def backward(ctx, gradient):
        ctx.held = None
        return gradient, None


class Room:
    """Counts the padded tokens whose graphs are alive, and has room for so many."""

    class Held:
        pass

    def __init__(self, model, tokens):
        self.tokens, self.alive, self.times = tokens, 0, 0
        for encoder in dict.fromkeys((model.question_encoder, model.passage_encoder)):
            encoder.register_forward_pre_hook(self.before, with_kwargs=True)
            encoder.register_forward_hook(self.after, with_kwargs=True)

    def before(self, module, args, chunk):
        if self.alive + chunk["input_ids"].numel() > self.tokens:
            self.times += 1
            raise torch.OutOfMemoryError("made up")  # a new one: its traceback holds frames

    def after(self, module, args, chunk, reps):
        if not reps.requires_grad:
            return reps
        size, held = chunk["input_ids"].numel(), self.Held()
        self.alive += size
        weakref.finalize(held, self.release, size)
        return Alive.apply(reps, held)

    def release(self, size):
        self.alive -= size


@pytest.mark.parametrize("kept", [6, 999])
@pytest.mark.parametrize("kept_tokens", [0, 10**6])
@pytest.mark.parametrize("rows", [None, 1])
def test_kept_graphs_go_before_chunks_get_smaller(tiny_encoder_dir, kept, kept_tokens, rows):
    model, batch = setup(tiny_encoder_dir)
    budgets = ChunkBudget(60, rows), ChunkBudget(100, rows)
    _, expected = gradients(model, batch, *budgets)
    model.zero_grad()
    room = Room(model, 110)
    generous = [ChunkBudget(budget.tokens, rows, kept) for budget in budgets]
    outcome, found = gradients(model, batch, *generous, kept_tokens=kept_tokens)
    assert 0 < room.times < 20
    assert room.alive == 0
    assert outcome.question_budget.tokens == 60
    assert outcome.passage_budget.tokens == 100
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)


def test_two_single_texts_that_fit_only_one_after_the_other(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir).train()
    loader, _ = make_batches(model, [example(0, hard_negatives=[])], batch_size=1)
    batch = next(iter(loader))
    longest = max(int(batch.questions.lengths.max()), int(batch.passages.lengths.max()))
    room = Room(model, longest)
    gradients(model, batch)
    assert room.times == 1
    room.tokens = longest - 1
    with pytest.raises(TextDoesNotFitError, match="single"):
        gradients(model, batch)


def test_out_of_memory_in_the_loss_drops_kept_graphs(tiny_encoder_dir, monkeypatch):
    model, batch = setup(tiny_encoder_dir)
    budgets = ChunkBudget(60, kept=3), ChunkBudget(100, kept=3)
    _, expected = gradients(model, batch, *budgets)
    model.zero_grad()
    calls = []

    def loss(*args, **options):
        calls.append(1)
        if len(calls) == 1:
            raise ERROR
        return in_batch_nll(*args, **options)

    monkeypatch.setattr(batch_step, "in_batch_nll", loss)
    outcome, found = gradients(model, batch, *budgets)
    assert [outcome.question_budget.kept, outcome.passage_budget.kept] == [1, 1]
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
    calls.clear()
    with pytest.raises(torch.OutOfMemoryError):  # nothing is kept: the batch itself is too large
        gradients(model, batch, ChunkBudget(60), ChunkBudget(100))


def test_a_budget_far_above_the_batch_goes_below_its_largest_chunk_at_once(tiny_encoder_dir):
    model, batch = setup(tiny_encoder_dir)
    texts = len(batch.passages)
    whole = texts * int(batch.passages.lengths.max())
    shortage = Shortage(model.passage_encoder, whole - 1, when="second pass")
    outcome, _ = gradients(model, batch, ChunkBudget(60), ChunkBudget(whole * 1024))
    assert shortage.times == 1
    assert outcome.passage_budget.tokens == whole // 2


@pytest.mark.parametrize("when", ["first pass", "second pass"])
def test_a_single_text_that_does_not_fit_ends_the_run_with_advice(tiny_encoder_dir, when):
    model, batch = setup(tiny_encoder_dir)
    Shortage(model.passage_encoder, 3, when=when)
    with pytest.raises(TextDoesNotFitError, match=r"single passage of \d+ tokens.*max_passage_len"):
        gradients(model, batch, passage=ChunkBudget(100))


def test_other_errors_pass_through(tiny_encoder_dir):
    model, batch = setup(tiny_encoder_dir)
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    shortage = Shortage(model.passage_encoder, 110, when="first pass", error=error)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gradients(model, batch)
    assert shortage.times == 1


def test_the_cpu_allocator_is_understood_too(tiny_encoder_dir):
    model, batch = setup(tiny_encoder_dir)
    text = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"
    Shortage(model.passage_encoder, 110, when="second pass", error=RuntimeError(text))
    assert gradients(model, batch)[0].passage_budget == ChunkBudget(100)


def test_the_run_goes_on_with_the_smaller_budget(tiny_encoder_dir, caplog):
    """Said once, in the first step; the parameters are those of a run that had begun with it."""

    def run(budget, limit):
        seed_everything(1)
        model = make_model(tiny_encoder_dir, dropout=0.3).train()
        loader, sampler = make_batches(model, examples(12), batch_size=6)
        shortage = Shortage(model.passage_encoder, limit, when="backward")
        trainer = make_trainer(model, total_steps=4)
        trainer.question_budget, trainer.passage_budget = ChunkBudget(60), budget
        seed_everything(derive_seed(5, "dropout", 0))

        class Log:
            def log(self, record):
                pass

        records = trainer.run(loader, sampler, epochs=2, total_steps=4, log=Log())
        return [record["loss"] for record in records], list(model.parameters()), shortage.times

    expected, parameters, _ = run(ChunkBudget(100), 10**9)
    with caplog.at_level(logging.WARNING):
        losses, found, times = run(ChunkBudget(200), 110)
    assert times == 1
    assert len(caplog.records) == 1
    assert losses == expected
    for one, other in zip(found, parameters, strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------------------- several processes


def on_one_of_two(folder, when, limit):
    """Only process 1 runs out of memory; its share is larger."""
    model = make_model(folder).train()
    data = [example(number) for number in range(9)]
    loader, _ = make_batches(model, data, batch_size=9)
    batch = next(iter(loader))
    shortage = None
    if rank() == 1:
        shortage = Shortage(model.passage_encoder, limit, when=when)
    outcome = batch_gradients(
        model, batch, question_budget=LARGE, passage_budget=ChunkBudget(120), device=CPU
    )
    sum_gradients(model.parameters())
    return (
        float(sum_over_processes(outcome.loss)),
        shortage.times if shortage else 0,
        {name: p.grad for name, p in model.named_parameters()},
    )


@pytest.mark.distributed
@pytest.mark.parametrize("when", ["first pass", "second pass", "backward"])
def test_one_process_out_of_memory_holds_up_nobody(tiny_encoder_dir, when):
    model, batch = setup(tiny_encoder_dir, dropout=0.0)
    expected, whole = gradients(model, batch)
    results = run_distributed(on_one_of_two, 2, tiny_encoder_dir, when, 60)
    assert results[0][1] == 0
    assert results[1][1] >= 1
    for loss, _, found in results:
        assert loss == pytest.approx(float(expected.loss), rel=1e-12)
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
