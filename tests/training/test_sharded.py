"""Encoders given to ``fully_shard`` (FSDP2) on two processes, against the undivided batch."""

import pytest
import torch
from distributed_run import run_distributed
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training_parts import CPU, Records, make_batches, make_model, make_trainer, parameters_of
from undivided import batch_loss, gradients_of, largest_error, questions, watch_collectives

from gc_dpr.data.collator import Collator
from gc_dpr.data.sampler import epoch_batches
from gc_dpr.distributed import rank, sum_gradients, sum_over_processes
from gc_dpr.ragged import length_sorted_chunks
from gc_dpr.training.batch_step import ChunkBudget, batch_gradients
from gc_dpr.training.optim import build_optimizer

pytestmark = pytest.mark.distributed

GROUPS = 3  # of each encoder: two layers, and the rest
# Chunks of each process. The number of kept graphs must agree, since a forward is a collective.
BUDGETS = [ChunkBudget(10**6, 2), ChunkBudget(40)]
KEPT = [ChunkBudget(10**6, 2, 2), ChunkBudget(40, None, 2)]
WHOLE = [ChunkBudget(10**6), ChunkBudget(10**6)]
# name: (questions of rank 0 out of 7, options)
CASES = {
    "unequal shares": (5, {}),
    "rank 0 without rows": (0, {}),
    "rank 1 without rows": (7, {"budgets": KEPT}),
    "some graphs kept": (2, {"budgets": KEPT}),
    "one chunk": (3, {"budgets": WHOLE}),
    "one encoder": (4, {"shared": True}),
    "one encoder, graphs kept": (0, {"shared": True, "budgets": KEPT}),
    "one encoder in one chunk": (4, {"shared": True, "budgets": WHOLE}),
    "transformer sharded": (5, {"wrapped": True}),
    "always resharded": (5, {"reshard_after_forward": True}),
    "never resharded": (2, {"reshard_after_forward": False, "budgets": KEPT}),
    "question tower frozen": (5, {"frozen": True}),
}


def sharded_model(folder, *, shared=False, wrapped=False, frozen=False, dropout=0.0, **options):
    """Each layer and each encoder sharded; or its transformer, inside the encoder."""
    model = make_model(folder, shared=shared, dropout=dropout)
    if frozen:
        model.question_encoder.requires_grad_(False)
    for encoder in {model.question_encoder, model.passage_encoder}:
        for layer in encoder.transformer.encoder.layer:
            fully_shard(layer, **options)
        fully_shard(encoder.transformer if wrapped else encoder, **options)
    return model


def own_batch(model, first):
    """The first questions for rank 0, the others for rank 1."""
    data = questions()[:7]
    collate = Collator(model.question_tokenizer, model.passage_tokenizer, seed=0, hard_negatives=2)
    return collate([(0, item) for item in (data[:first], data[first:])[rank()]])


def step_on_share(folder, calls, first, *, budgets=BUDGETS, steps=1, seed=None, **options):
    """Loss, gradients, own chunks and reduce-scatters of as many batches as steps."""
    model = sharded_model(folder, **options)
    batch = own_batch(model, first)
    model.train()
    if seed is not None:
        torch.manual_seed(seed + rank())
    losses, before = [], len(calls)
    for _ in range(steps):
        outcome = batch_gradients(
            model, batch, question_budget=budgets[rank()], passage_budget=budgets[rank()],
            device=CPU,
        )  # fmt: skip
        losses.append(outcome.loss)
    reduced = [name for name, _ in calls[before:] if name.startswith("reduce_scatter")]
    assert sum_gradients(model.parameters()) == 0
    loss = sum_over_processes(losses[0])
    gradients = {name: whole(value) for name, value in gradients_of(model).items()}
    chunks = [own_chunks(side, budgets[rank()]) for side in (batch.questions, batch.passages)]
    return loss, gradients, chunks, len(reduced)


def own_chunks(tokens, budget):
    """Before those without rows are added."""
    return len(length_sorted_chunks(tokens.lengths, max_tokens=budget.tokens, max_rows=budget.rows))


def whole(tensor):
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def train_sharded(folder):
    """Three steps of the Trainer, with AdamW and clipping."""
    model = sharded_model(folder)
    optimizer = build_optimizer(model, learning_rate=2e-3, weight_decay=0.1, epsilon=1e-4)
    trainer = make_trainer(model, total_steps=3, optimizer=optimizer, max_grad_norm=1.0)
    loader, sampler = make_batches(model, questions(), batch_size=7)
    trainer.question_budget = trainer.passage_budget = BUDGETS[rank()]
    records = trainer.run(loader, sampler, epochs=1, total_steps=3, log=Records())
    return records, {name: whole(value) for name, value in parameters_of(model).items()}


def refusals(folder):
    """One encoder sharded and the other not; only the layers sharded."""
    messages = []
    for parts in ("question_encoder", "layers"):
        model = make_model(folder)
        if parts == "layers":
            for encoder in (model.question_encoder, model.passage_encoder):
                for layer in encoder.transformer.encoder.layer:
                    fully_shard(layer)
        else:
            fully_shard(model.question_encoder)
        try:
            batch = own_batch(model, 4)
            batch_gradients(
                model, batch, question_budget=BUDGETS[0], passage_budget=BUDGETS[0], device=CPU
            )
            sum_gradients(model.parameters())
        except ValueError as error:
            messages.append(str(error))
    return messages


def everything(folder):
    calls = watch_collectives()
    steps = {
        name: step_on_share(folder, calls, first, **options)
        for name, (first, options) in CASES.items()
    }
    accumulated = step_on_share(folder, calls, 5, steps=2)
    # the same chunks draw the same numbers, whether they are encoded once or twice
    random = [
        step_on_share(folder, calls, 5, dropout=0.2, seed=7, budgets=budgets)
        for budgets in ([ChunkBudget(10**6, 2, kept)] * 2 for kept in (0, 99))
    ]
    return steps, accumulated, random, train_sharded(folder), refusals(folder)


@pytest.fixture(scope="module")
def processes(tiny_encoder_dir):
    return run_distributed(everything, 2, tiny_encoder_dir, timeout=100)


def undivided_step(folder, *, shared=False, frozen=False):
    model = make_model(folder, shared=shared)
    if frozen:
        model.question_encoder.requires_grad_(False)
    loss, _, _ = batch_loss(model, questions()[:7])
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("name", CASES)
def test_gradient_of_sharded_encoders(tiny_encoder_dir, processes, name):
    options = CASES[name][1]
    kept = {key: options[key] for key in ("shared", "frozen") if key in options}
    expected_loss, expected = undivided_step(tiny_encoder_dir, **kept)
    for steps, *_ in processes:
        loss, gradients, _, _ = steps[name]
        assert float(loss) == pytest.approx(expected_loss, rel=1e-12)
        assert largest_error(gradients, expected) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_one_reduction_per_group(processes, name):
    """However many chunks there are, and however few of them on the other process."""
    options = CASES[name][1]
    trained = 1 if options.get("shared") or options.get("frozen") else 2
    chunks = [steps[name][2] for steps, *_ in processes]
    for steps, *_ in processes:
        assert steps[name][3] == trained * GROUPS
    if options.get("budgets") is not WHOLE:
        assert chunks[0] != chunks[1]


def test_accumulated_batches(tiny_encoder_dir, processes):
    _, expected = undivided_step(tiny_encoder_dir)
    for _, (_, gradients, _, reduced), *_ in processes:
        assert reduced == 2 * 2 * GROUPS  # torch reduces shards at the end of each batch
        twice = {name: 2 * value for name, value in expected.items()}
        assert largest_error(gradients, twice) < 1e-12


def test_dropout_is_replayed(processes):
    for _, _, (replayed, kept), *_ in processes:
        assert torch.equal(replayed[0], kept[0])
        assert largest_error(replayed[1], kept[1]) < 1e-12


def test_trainer_with_sharded_encoders(tiny_encoder_dir, processes):
    """Loss, metrics, the norm over all shards, and the parameters after three steps."""
    model, data = make_model(tiny_encoder_dir), questions()
    optimizer = build_optimizer(model, learning_rate=2e-3, weight_decay=0.1, epsilon=1e-4)
    expected = []
    for step, rows in enumerate(epoch_batches(21, batch_size=7, seed=3, epoch=0)):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (3 - step) / 3
        optimizer.zero_grad()
        loss, accuracy, candidates = batch_loss(model, [data[row] for row in rows])
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        expected.append([loss.item(), accuracy, candidates, norm])
    for *_, (records, parameters), _ in processes:
        for record, measured in zip(records, expected, strict=True):
            names = ("loss", "in_batch_accuracy", "candidates", "grad_norm")
            assert [record[name] for name in names] == pytest.approx(measured, rel=1e-12)
        assert largest_error(parameters, parameters_of(model)) < 1e-12


def test_mixtures_are_refused(processes):
    for *_, messages in processes:
        one_encoder, layers_only = messages
        assert "fully_shard was applied to one encoder only" in one_encoder
        assert "trainable parameters are sharded" in layers_only
