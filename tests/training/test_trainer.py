"""The loop against an independent one, and what it must never do."""

import json
import logging
import math

import pytest
import torch
from torch.nn import functional as F
from training_parts import (
    CPU,
    example,
    examples,
    largest_difference,
    make_batches,
    make_model,
    make_trainer,
    parameters_of,
    train,
)

from gc_dpr.data.sampler import epoch_batches
from gc_dpr.ragged import length_sorted_chunks
from gc_dpr.training.batch_step import ChunkBudget, batch_gradients
from gc_dpr.training.trainer import TrainingError

# ------------------------------------------------------------------------- an independent trainer


def padded(model, texts, length):
    """The way transformers itself pads and cuts; segment ids all zero, as in DPR."""
    tokenizer = model.question_encoder.tokenizer
    first, second = texts if isinstance(texts, tuple) else (texts, None)
    tokens = tokenizer(
        first, second, padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    tokens["token_type_ids"] = torch.zeros_like(tokens["input_ids"])
    return tokens


def dense_batch(model, batch, hard_negatives=2):
    """Scores of all questions and passages, the label columns and the passages, from scratch."""
    passages, labels = [], []
    for item in batch:
        labels.append(len(passages))
        passages += [item.positives[0], *item.hard_negatives[:hard_negatives]]
    questions = padded(model, [item.question for item in batch], 24)
    pairs = padded(model, ([p.title for p in passages], [p.text for p in passages]), 48)
    question_reps = model.question_encoder.transformer(**questions).last_hidden_state[:, 0]
    passage_reps = model.passage_encoder.transformer(**pairs).last_hidden_state[:, 0]
    return question_reps @ passage_reps.T, torch.tensor(labels), passages


def known(batch, labels, passages):
    """(Q, P) which columns hold a positive of the row that is not its label."""
    mask = torch.zeros(len(batch), len(passages), dtype=torch.bool)
    for row, item in enumerate(batch):
        for column, passage in enumerate(passages):
            mask[row, column] = passage in item.positives and column != labels[row]
    return mask


def plain_training(model, data, *, batch_size, epochs, warmup, temperature, max_grad_norm, seed=3):
    """AdamW, clipping and the linear schedule, written down without the toolkit."""
    model.train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    )
    batches = [
        [data[i] for i in positions]
        for epoch in range(epochs)
        for positions in epoch_batches(len(data), batch_size=batch_size, seed=seed, epoch=epoch)
    ]
    curve = []
    for step, batch in enumerate(batches):
        scores, labels, passages = dense_batch(model, batch)
        scores = (scores / temperature).masked_fill(known(batch, labels, passages), -math.inf)
        loss = F.cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad.mul_(min(1.0, max_grad_norm / (norm + 1e-6)))  # as torch does
        left = (len(batches) - step) / (len(batches) - warmup)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step / warmup if step < warmup else left)
        optimizer.step()
        correct = int((scores.argmax(1) == labels).sum())
        curve.append((float(loss.detach()), norm, correct / len(batch), len(passages)))
    return curve


OPTIONS = {"batch_size": 7, "epochs": 3}


@pytest.mark.parametrize("chunk_rows", [1, 2, None])
def test_training_equals_an_independent_loop(tiny_encoder_dir, chunk_rows):
    """Promise 1 over several steps; 2 and 3 batches an epoch, the last one smaller."""
    data = examples(11)
    model, plain = make_model(tiny_encoder_dir), make_model(tiny_encoder_dir)
    start = parameters_of(model)
    _, records = train(
        model, data, **OPTIONS, chunk_rows=chunk_rows, warmup_steps=2, temperature=0.7,
        max_grad_norm=3.0,
    )  # fmt: skip
    curve = plain_training(plain, data, **OPTIONS, warmup=2, temperature=0.7, max_grad_norm=3.0)
    names = ("loss", "grad_norm", "in_batch_accuracy", "candidates")
    found = [tuple(record[name] for name in names) for record in records]
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), torch.tensor(curve, dtype=torch.float64),
        rtol=1e-9, atol=1e-9,
    )  # fmt: skip
    assert any(norm > 3 for _, norm, _, _ in curve), "clipping was never at work"
    assert largest_difference(start, parameters_of(model)) > 1e-3
    assert largest_difference(parameters_of(model), parameters_of(plain)) < 1e-9


def test_float32_chunks_equal_one_piece(tiny_encoder_dir):
    """Three steps; the epsilon keeps AdamW from blowing up gradients that are pure rounding."""
    ends = []
    for chunk_rows in (1, None):
        model = make_model(tiny_encoder_dir, double=False)
        trainer = make_trainer(model, total_steps=3, chunk_rows=chunk_rows)
        for group in trainer.optimizer.param_groups:
            group["eps"] = 1e-3
        loader, sampler = make_batches(model, examples(12), batch_size=4)
        trainer.run(loader, sampler, epochs=1, total_steps=3, log=Silent())
        ends.append(parameters_of(model))
    assert largest_difference(*ends) < 1e-5


class Silent:
    def log(self, record):
        pass


def test_a_shared_encoder_is_trained_from_both_sides(tiny_encoder_dir):
    model, plain = (make_model(tiny_encoder_dir, shared=True) for _ in range(2))
    train(model, examples(6), batch_size=6, chunk_rows=1, max_grad_norm=3.0)
    plain_training(
        plain, examples(6), batch_size=6, epochs=1, warmup=0, temperature=1, max_grad_norm=3.0
    )
    assert largest_difference(parameters_of(model), parameters_of(plain)) < 1e-9


def test_dropout_is_repeatable_and_at_work(tiny_encoder_dir):
    curves = []
    for dropout in (0.3, 0.3, 0.0):
        model = make_model(tiny_encoder_dir, double=False, dropout=dropout)
        _, records = train(model, examples(8), batch_size=4, epochs=2)
        curves.append([record["loss"] for record in records])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


# -------------------------------------------------------------------------------- known positives


def first_record(folder, data, **options):
    _, records = train(make_model(folder), data, batch_size=len(data), max_steps=1, **options)
    return records[0]


def test_another_questions_copy_of_my_positive_is_no_negative(tiny_encoder_dir):
    """TRAPS B19: without the mask the loss of two questions cannot go below ln 2."""
    data = [example(n, positives=[5], hard_negatives=[]) for n in (0, 1)]
    masked = first_record(tiny_encoder_dir, data, temperature=1e-3)
    unmasked = first_record(tiny_encoder_dir, data, mask_known_positives=False)
    assert (masked["loss"], masked["masked_negatives"]) == (0, 2)
    assert unmasked["loss"] == pytest.approx(math.log(2), abs=1e-9)
    assert unmasked["masked_negatives"] == 0


@pytest.mark.parametrize("mask", [True, False])
def test_masking_all_known_positives_is_the_dense_formula(tiny_encoder_dir, mask):
    """TRAPS B21: also a positive that was not drawn, when another question brings it."""
    data = [
        example(0, positives=[0, 9, 3]), example(1, positives=[9], hard_negatives=[3, 4]),
        example(2, positives=[2], hard_negatives=[0]), example(3, positives=[0]),
    ]  # fmt: skip
    record = first_record(tiny_encoder_dir, data, mask_known_positives=mask)
    model = make_model(tiny_encoder_dir)
    order = epoch_batches(4, batch_size=4, seed=3, epoch=0)[0]
    batch = [data[i] for i in order]
    scores, labels, passages = dense_batch(model, batch)
    excluded = known(batch, labels, passages)
    # 0: its positives 9 and 3 and three more copies of 0; 3: the other copies of 0
    assert int(excluded.sum()) == 6
    if mask:
        scores = scores.masked_fill(excluded, -math.inf)
    assert record["loss"] == pytest.approx(float(F.cross_entropy(scores, labels).detach()))
    assert record["masked_negatives"] == (6 if mask else 0)


# ---------------------------------------------------------------------------------------- records


def test_every_number_of_a_record(tiny_encoder_dir):
    data = examples(9)
    model = make_model(tiny_encoder_dir)
    before = make_model(tiny_encoder_dir)
    _, records = train(model, data, batch_size=5, epochs=2, warmup_steps=1, chunk_rows=2)
    assert [(r["step"], r["epoch"], r["questions"]) for r in records] == [
        (1, 1, 5), (2, 1, 4), (3, 2, 5), (4, 2, 4),
    ]  # fmt: skip
    assert [r["learning_rate"] for r in records] == pytest.approx([0, 1e-3, 2e-3 / 3, 1e-3 / 3])
    batch = [data[i] for i in epoch_batches(9, batch_size=5, seed=3, epoch=0)[0]]
    scores, labels, passages = dense_batch(before, batch)
    scores = scores.masked_fill(known(batch, labels, passages), -math.inf)
    first = records[0]
    assert first["loss"] == pytest.approx(float(F.cross_entropy(scores, labels).detach()))
    assert first["candidates"] == len(passages)
    assert first["in_batch_accuracy"] == float((scores.argmax(1) == labels).double().mean())
    assert first["fewer_negatives"] == sum(len(item.hard_negatives) < 2 for item in batch)
    # a passage that several questions bring is encoded once
    distinct = list(dict.fromkeys(passages))
    assert len(distinct) < len(passages)
    pairs = ([p.title for p in distinct], [p.text for p in distinct])
    lengths = [
        padded(before, texts, length)["attention_mask"].sum(1).tolist()
        for texts, length in (([item.question for item in batch], 24), (pairs, 48))
    ]
    tokens = sum(map(sum, lengths))
    computed = 0
    chunks = 0
    for side in lengths:
        longest_first = sorted(side, reverse=True)
        for start in range(0, len(side), 2):
            pair = longest_first[start : start + 2]
            computed += len(pair) * pair[0]
            chunks += 1
    assert first["tokens"] == tokens
    assert first["chunks"] == chunks
    assert first["padding_share"] == pytest.approx(1 - tokens / computed)
    # every candidate counts here, so that the number does not depend on how a batch is shared out
    whole = [len(before.passage_encoder.tokenizer(p.title, p.text)["input_ids"]) for p in passages]
    assert first["truncated_passages"] == sum(length > 48 for length in whole)
    assert 0 < first["truncated_passages"] < len(passages)
    assert first["replayed_chunks"] == chunks - 1
    assert first["lone_questions"] == 0
    assert first["truncated_questions"] == 0
    assert first["questions_per_second"] == pytest.approx(5 / first["seconds"])
    assert json.loads(json.dumps(first)) == first


def test_passed_over_negatives_are_counted(tiny_encoder_dir):
    data = [example(0, positives=[0, 1], hard_negatives=[1, 2, 2, 3]), example(4)]
    record = first_record(tiny_encoder_dir, data)
    # the positive 1 and one copy of 2 are passed over; example 4 has one negative only
    assert (record["passed_over_negatives"], record["fewer_negatives"]) == (2, 1)


def test_a_run_stops_within_an_epoch(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir)
    loader, sampler = make_batches(model, examples(9), batch_size=2)
    epochs = []
    sampler.set_epoch, real = (lambda epoch: (epochs.append(epoch), real(epoch))), sampler.set_epoch
    trainer = make_trainer(model, total_steps=7)
    records = trainer.run(loader, sampler, epochs=40, total_steps=7, log=Silent())
    assert (len(records), records[-1]["epoch"]) == (7, 2)
    assert epochs == [0, 1], "epochs after the end were begun"
    assert not model.training


# ----------------------------------------------------------------------------- not finite numbers


def test_a_loss_that_is_no_number_stops_before_any_change(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir)
    word = model.question_encoder.tokenizer.convert_tokens_to_ids("stone")
    with torch.no_grad():
        model.question_encoder.transformer.embeddings.word_embeddings.weight[word] = math.nan
    before = parameters_of(model)
    data = [example(0), example(20)]
    with pytest.raises(TrainingError, match=r"the loss of step 1 is nan.*e\d+, e\d+") as caught:
        train(model, data, batch_size=2)
    assert "e0" in str(caught.value)
    assert "e20" in str(caught.value)
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_gradient_that_is_no_number_stops_before_any_change(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir)
    norm = model.passage_encoder.transformer.encoder.layer[0].output.LayerNorm.bias
    norm.register_hook(lambda gradient: gradient * math.inf)
    before = parameters_of(model)
    with pytest.raises(TrainingError, match=r"the gradient norm of step 1 is (nan|inf)"):
        train(model, examples(4), batch_size=4)
    assert largest_difference(before, parameters_of(model)) == 0


# -------------------------------------------------------------------------------- mixed precision


def scaled_run(folder, *, scale, backoff=0.5, steps=2):
    """fp16 on the CPU with a loss scale of its own; returns trainer, records, parameters."""
    model = make_model(folder, double=False)
    trainer = make_trainer(model, total_steps=4, precision="fp16", max_grad_norm=1.0)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=backoff)
    loader, sampler = make_batches(model, examples(8), batch_size=2)
    records = trainer.run(loader, sampler, epochs=1, total_steps=steps, log=Silent())
    return trainer, records, parameters_of(model)


def test_the_loss_scale_changes_neither_loss_nor_clipping(tiny_encoder_dir):
    """TRAPS B43: what is clipped and logged is unscaled."""
    _, plain, _ = scaled_run(tiny_encoder_dir, scale=1.0)
    _, scaled, _ = scaled_run(tiny_encoder_dir, scale=256.0)
    full = make_model(tiny_encoder_dir, double=False)
    _, exact = train(full, examples(8), batch_size=2, max_steps=2, max_grad_norm=1.0)
    for name, tolerance in (("loss", 0.02), ("grad_norm", 0.05)):
        expected = exact[0][name]
        assert plain[0][name] == pytest.approx(expected, rel=tolerance)
        assert scaled[0][name] == pytest.approx(expected, rel=tolerance)
    assert exact[0]["grad_norm"] > 1, "clipping was never at work"


def test_a_clipped_scaled_step_moves_as_far_as_an_unscaled_one(tiny_encoder_dir):
    """With plain SGD the step is the clipped gradient itself, so its length is known."""
    for scale in (1.0, 256.0):
        model = make_model(tiny_encoder_dir, double=False)
        before = parameters_of(model)
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        trainer = make_trainer(
            model, total_steps=4, precision="fp16", max_grad_norm=0.5, optimizer=sgd
        )
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loader, sampler = make_batches(model, examples(4), batch_size=4)
        trainer.run(loader, sampler, epochs=1, total_steps=1, log=Silent())
        moved = sum(float(((v - before[n]) ** 2).sum()) for n, v in parameters_of(model).items())
        assert math.sqrt(moved) == pytest.approx(0.5, rel=1e-3)


def test_a_skipped_step_advances_nothing(tiny_encoder_dir, caplog):
    """TRAPS B44: a scale that overflows float16; weights, rate and clock stay."""
    start = parameters_of(make_model(tiny_encoder_dir, double=False))
    with caplog.at_level(logging.WARNING, logger="gc_dpr"):
        trainer, records, end = scaled_run(tiny_encoder_dir, scale=2.0**60)
    assert largest_difference(start, end) == 0
    assert trainer.skipped_steps == 2
    assert trainer.scaler.get_scale() == 2.0**58
    assert [record["learning_rate"] for record in records] == [1e-3, 1e-3]
    assert trainer.scheduler.get_last_lr() == [1e-3, 1e-3]
    assert [record["grad_norm"] for record in records] == [None, None]
    assert all(math.isfinite(record["loss"]) for record in records)
    assert "2 of 2 optimizer steps were skipped" in caplog.text
    assert "Infinity" not in json.dumps(records)


def test_after_a_skipped_step_the_schedule_goes_on_where_it_was(tiny_encoder_dir):
    trainer, records, _ = scaled_run(tiny_encoder_dir, scale=2.0**60, backoff=2.0**-52, steps=4)
    assert trainer.skipped_steps == 1
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx([1e-3, 1e-3, 7.5e-4, 5e-4])
    assert [record["grad_norm"] is None for record in records] == [True, False, False, False]


def test_bf16_stays_near_fp32(tiny_encoder_dir):
    curves = {}
    for precision in ("fp32", "bf16"):
        model = make_model(tiny_encoder_dir, double=False)
        _, records = train(
            model, examples(8), batch_size=4, precision=precision, learning_rate=1e-4
        )
        curves[precision] = [(record["loss"], record["grad_norm"]) for record in records]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    exact, rough = torch.tensor(curves["fp32"]), torch.tensor(curves["bf16"])
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.02)
    assert not torch.equal(rough, exact), "bf16 was not at work"


# ------------------------------------------------------------------------------- one batch's step


def test_gradients_of_a_batch_add_up(tiny_encoder_dir):
    """batch_gradients adds to .grad: two calls give twice the gradient of one."""
    model = make_model(tiny_encoder_dir)
    loader, _ = make_batches(model, examples(4), batch_size=4)
    batch = next(iter(loader))
    options = {
        "question_budget": ChunkBudget(30), "passage_budget": ChunkBudget(50), "device": CPU,
    }  # fmt: skip
    once = batch_gradients(model, batch, **options)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    batch_gradients(model, batch, **options)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * gradients[name])
    assert once.loss.requires_grad is False
    assert once.questions == 4
    assert once.candidates == len(batch.passage_keys)


def test_a_token_budget_bounds_the_chunks(tiny_encoder_dir):
    model = make_model(tiny_encoder_dir)
    widths = []

    def watch(module, arguments, inputs):
        widths.append(tuple(inputs["input_ids"].shape))

    model.passage_encoder.register_forward_pre_hook(watch, with_kwargs=True)
    loader, _ = make_batches(model, examples(9), batch_size=9)
    batch = next(iter(loader))
    budget = ChunkBudget(tokens=100)
    outcome = batch_gradients(
        model, batch, question_budget=ChunkBudget(10**6), passage_budget=budget, device=CPU
    )
    chunks = outcome.chunks - 1
    assert len(widths) == 2 * chunks - 1  # the last one keeps its graph
    assert outcome.replayed_chunks == chunks  # the question chunk, and all passages' but the last
    assert all(rows * length <= 100 for rows, length in widths)
    assert sum(rows for rows, _ in widths[:chunks]) == len(set(batch.passage_keys.tolist()))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kept", [1, 3, 99])
def test_kept_chunks_are_not_encoded_twice_and_change_nothing(tiny_encoder_dir, kept, shared):
    """With dropout on: each chunk draws the same masks whether it is kept or replayed."""
    model = make_model(tiny_encoder_dir, dropout=0.3, shared=shared, double=True).train()
    loader, _ = make_batches(model, examples(9), batch_size=9)
    batch = next(iter(loader))
    calls = []
    encoders = {id(e): e for e in (model.question_encoder, model.passage_encoder)}.values()
    for encoder in encoders:
        encoder.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients(kept_chunks):
        model.zero_grad()
        calls.clear()
        torch.manual_seed(5)
        budget = ChunkBudget(60, None, kept_chunks)
        outcome = batch_gradients(
            model, batch, question_budget=budget, passage_budget=budget, device=CPU
        )
        return outcome, {name: p.grad.clone() for name, p in model.named_parameters()}, len(calls)

    replayed, expected, twice = gradients(0)
    outcome, found, forwards = gradients(kept)
    assert twice == 2 * replayed.chunks - 1  # the very last chunk is always kept
    assert replayed.replayed_chunks == replayed.chunks - 1
    questions = len(length_sorted_chunks(batch.questions.lengths, max_tokens=60))
    passages = replayed.chunks - questions
    assert forwards == 2 * replayed.chunks - min(kept, questions) - min(kept, passages)
    assert outcome.replayed_chunks == forwards - outcome.chunks
    torch.testing.assert_close(outcome.loss, replayed.loss, rtol=1e-12, atol=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
