"""What distributed training is compared with: the undivided batch, by torch alone."""

import math

import torch
import torch.distributed as dist
from torch.nn import functional as F
from training_parts import example


def questions(count=21):
    """Every question has a second positive, which is the first one of another question.

    The hard negatives, 0 to 2 of them, are positives of others too: passages recur within a share
    and between the shares, and masks reach from one process into the next.
    """
    data = []
    for number in range(count):
        hard = [(number + 2) % count, (number + 5) % count][: number % 3]
        positives = [number, (number + 1) % count]
        data.append(example(number, positives=positives, hard_negatives=hard))
    return data


def batch_loss(model, batch, *, temperature=1.0, mask_known_positives=True):
    """Loss and share of right answers of a whole batch of examples, nothing divided."""
    candidates, labels = [], []
    for item in batch:
        labels.append(len(candidates))
        candidates += [item.positives[0], *item.hard_negatives[:2]]
    sides = (
        (model.question_encoder, model.tokenize_questions([item.question for item in batch])),
        (model.passage_encoder, model.tokenize_passages(candidates)),
    )
    question_reps, passage_reps = (
        encoder(**texts.tokens.pad(torch.arange(len(texts.tokens)), pad_token_id=0))
        for encoder, texts in sides
    )
    scores = question_reps @ passage_reps.T / temperature
    if mask_known_positives:
        for row, item in enumerate(batch):
            known = {positive.text for positive in item.positives}
            for column, passage in enumerate(candidates):
                if passage.text in known and column != labels[row]:
                    scores[row, column] = -math.inf
    labels = torch.tensor(labels)
    accuracy = float((scores.argmax(1) == labels).double().mean())
    return F.cross_entropy(scores, labels), accuracy, len(candidates)


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(found, expected):
    """Largest error of a tensor, relative to the largest number in all of them."""
    assert found.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values()) or 1.0
    return max(float((found[name] - expected[name]).abs().max()) for name in found) / scale


def watch_collectives():
    """List every collective from now on: its name, and the numbers that go into it."""
    names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast"))]
    calls = []

    def watched(name, original):
        def collective(*args, **kwargs):
            sizes = [arg.numel() for arg in args if isinstance(arg, torch.Tensor)]
            calls.append((name, sizes[-1] if sizes else 0))
            return original(*args, **kwargs)

        return collective

    for name in names:
        if callable(getattr(dist, name)):
            setattr(dist, name, watched(name, getattr(dist, name)))
    return calls
