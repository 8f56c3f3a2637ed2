"""From a request batch to scores: the one function that the server and the replay share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from semel.batch import RequestBatch


@dataclass(frozen=True)
class Scores:
    """``ranked_by`` [C] float32: what candidates are ranked by; ``tasks`` [C, tasks] float32: every task's prediction;
    ``logits`` [C]: the first task's output before the sigmoid, which still tells apart what the sigmoid rounds to 1."""

    ranked_by: np.ndarray
    tasks: np.ndarray
    logits: np.ndarray

    def order(self, rows: slice = slice(None)) -> np.ndarray:
        """Best first: by score, then by logit, then in the order of the request's candidates."""
        return np.lexsort((-self.logits[rows], -self.ranked_by[rows]))


def score(artifact: Any, batch: RequestBatch) -> Scores:
    """Run the model of ``artifact`` (``semel.models.ModelArtifact``) on ``batch`` without gradients.

    A binary task's prediction is the sigmoid of its logit, a regression's and a next-item model's the output itself.
    Raises ValueError for outputs that are not ``[C]`` or ``[C, tasks]``. NaN is the caller's to refuse.
    """
    import torch

    with torch.inference_mode():
        logits = artifact.model(batch)
        if logits.ndim == 1:
            logits = logits[:, None]
        tasks = artifact.features.tasks
        if logits.ndim != 2 or len(logits) != batch.candidates or (tasks and logits.shape[1] > len(tasks)):
            raise ValueError(f"the model gave outputs of shape {tuple(logits.shape)} for {batch.candidates} candidates "
                             f"and {len(tasks)} tasks")
        logits = logits.float()
        binary = [artifact.kind != "next_item" and column < len(tasks) and tasks[column].kind == "binary"
                  for column in range(logits.shape[1])]
        predicted = logits
        if all(binary):
            predicted = logits.sigmoid()
        elif any(binary):
            predicted = torch.where(torch.tensor(binary, device=logits.device), logits.sigmoid(), logits)
        values, raw = predicted.cpu().numpy(), logits[:, 0].cpu().numpy()
    return Scores(np.ascontiguousarray(values[:, 0]), values, raw)


def eager_path() -> str:
    """How scores are computed here, as exposures name it: with another number of threads the last bits may differ."""
    import torch

    return f"eager threads={torch.get_num_threads()}"


@contextmanager
def on_path(path: str) -> Iterator[None]:
    """Compute as ``path`` (of an exposure) says. Raises ValueError for a path that this version does not have."""
    import torch

    match = re.fullmatch(r"eager(?: threads=(\d{1,4}))?", path)
    if match is None:
        raise ValueError(f"exposures were scored on path {path!r}, which this version does not have; it has 'eager'")
    before = torch.get_num_threads()
    wanted = int(match[1]) if match[1] else before
    if wanted < 1:
        raise ValueError(f"exposures were scored on path {path!r}: no such number of threads")
    try:
        if wanted != before:
            torch.set_num_threads(wanted)
        yield
    finally:
        if wanted != before:
            torch.set_num_threads(before)
