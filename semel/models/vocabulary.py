"""From raw values to rows of tables: the one place where an id becomes an index, in training and in serving."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from semel.features import MISSING


class Vocabulary(nn.Module):
    """Stable ids (``semel.features.stable_id``) -> 1 .. size, 0 for what training never saw (and for missing).

    ``ids``: distinct int64. Saved with the model as an ordinary buffer.
    """

    ids: Tensor

    def __init__(self, ids: np.ndarray | Tensor) -> None:
        super().__init__()
        distinct = torch.unique(torch.as_tensor(ids, dtype=torch.int64))
        self.register_buffer("ids", distinct[distinct != MISSING])

    def __len__(self) -> int:
        return len(self.ids)

    def forward(self, values: Tensor) -> Tensor:
        """int64 of any shape -> indices of the same shape."""
        if not len(self.ids):
            return torch.zeros_like(values)
        place = torch.searchsorted(self.ids, values).clamp_(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == values, place + 1, 0)


class Scale(nn.Module):
    """Numbers -> ``[value standardized by the training data's mean and deviation, 1 if missing]``; NaN is missing."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: float = 0.0, deviation: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(float(mean)))
        self.register_buffer("deviation", torch.tensor(max(float(deviation), 1e-6)))

    def forward(self, values: Tensor) -> Tensor:
        """[N] -> [N, 2]."""
        missing = torch.isnan(values)
        scaled = torch.where(missing, 0.0, (values - self.mean) / self.deviation).clamp(-10.0, 10.0)
        return torch.stack([scaled, missing.to(scaled.dtype)], -1)
