"""AdamW without decay on biases and norms, and the linear schedule of the DPR recipes."""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_linear_schedule_with_warmup

from gc_dpr.errors import ConfigError

logger = logging.getLogger(__name__)


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float = 0.0, epsilon: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of a model.

    Args:
        model: A parameter that two towers share is optimised once.
        learning_rate: Peak learning rate.
        weight_decay: Applied to matrices only; biases and the scales of norms (all parameters with
            one dimension or none) are never decayed, as in the DPR recipes.
        epsilon: AdamW's epsilon.

    Raises:
        ConfigError: Nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing can be learned")
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, eps=epsilon
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, *, warmup_steps: int, total_steps: int
) -> LambdaLR:
    """Rise linearly from 0 in ``warmup_steps``, then fall linearly to 0 at ``total_steps``.

    The first step of a warm-up has learning rate 0, as in DPR and GC-DPR.

    Raises:
        ConfigError: The run ends before the warm-up does.
    """
    if warmup_steps and warmup_steps >= total_steps:
        raise ConfigError(
            f"train.warmup_steps={warmup_steps} does not fit a run of {total_steps} optimizer "
            "steps: use fewer warm-up steps, or more epochs"
        )
    schedule: LambdaLR = get_linear_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    return schedule
