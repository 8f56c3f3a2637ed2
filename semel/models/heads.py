"""From states to answers: a head for several tasks, and the loss that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from semel.batch import RequestBatch
from semel.features import Task
from semel.models.dropout import Dropout


def mlp(widths: Sequence[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear, ReLU and dropout between the widths given, the last layer bare."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(a, b))
        if i < len(widths) - 2:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(Dropout(dropout))
    return nn.Sequential(*layers)


class RankingHead(nn.Module):
    """[C, width] -> [C, tasks]: a logit for a binary task, the value itself for a regression."""

    def __init__(self, width: int, hidden: Sequence[int], tasks: Sequence[Task], dropout: float) -> None:
        super().__init__()
        self.layers = mlp([width, *hidden, len(tasks)], dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def ranking_loss(logits: Tensor, batch: RequestBatch, tasks: Sequence[Task]) -> Tensor:
    """Weighted sum over tasks of the mean loss over labelled candidates: binary cross-entropy, or squared error for a
    regression. ``logits`` [C, tasks]; a candidate without a label of a task counts in nothing of that task.
    Logits of fewer bits are taken as float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = logits.new_zeros(())
    for column, task in enumerate(tasks):
        label, mask = batch.label[task.name], batch.label_mask[task.name]
        weight = mask.to(logits.dtype) if batch.weight is None else mask * batch.weight
        target = torch.where(mask, label, 0.0)
        if task.kind == "binary":
            loss = nn.functional.binary_cross_entropy_with_logits(logits[:, column], target, reduction="none")
        else:
            loss = (logits[:, column] - target) ** 2
        total = total + task.weight * (loss * weight).sum() / weight.sum().clamp(min=1e-9)
    return total
