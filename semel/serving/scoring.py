"""From a request batch to scores: the one function that the server and the replay share.

A model's request side is computed for each request alone, whoever else is in its batch, so that a state may come from a
cache and stay the same to the bit. Candidates are scored together, and the exposure says with whom.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from semel.serving.broadcast import broadcast

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch


@dataclass(frozen=True)
class Scores:
    """``ranked_by`` [C] float32: what candidates are ranked by; ``tasks`` [C, tasks] float32: every task's prediction;
    ``logits`` [C]: the first task's output before the sigmoid, which still tells apart what the sigmoid rounds to 1."""

    ranked_by: np.ndarray
    tasks: np.ndarray
    logits: np.ndarray

    def order(self) -> np.ndarray:
        """Best first: by score, then by logit, then in the order of the request's candidates."""
        return np.lexsort((-self.logits, -self.ranked_by))

    def rows(self, start: int, stop: int) -> Scores:
        """Those of the candidates ``start`` to ``stop``."""
        return Scores(self.ranked_by[start:stop], self.tasks[start:stop], self.logits[start:stop])


def shares(artifact: Any) -> bool:
    """Whether the model of ``artifact`` has a request side (``semel.models.states.Shared``). All of Semel's have."""
    from semel.models.states import Shared

    return isinstance(artifact.model, Shared)


def request_states(artifact: Any, batch: RequestBatch) -> list[Any]:
    """The state of each request, computed alone, in tensors that hold nothing else."""
    import torch

    from semel.models.states import take

    with torch.inference_mode():
        parts = [batch] if batch.requests == 1 else [batch.slice(row, row + 1) for row in range(batch.requests)]
        return [take(artifact.model.request(part.request), 0, 1) for part in parts]


def score(artifact: Any, batch: RequestBatch, share: bool = True, states: Sequence[Any] | None = None) -> Scores:
    """Run the model of ``artifact`` (``semel.models.ModelArtifact``) on ``batch`` without gradients.

    ``share``: the request side once per request, from ``states`` (``request_states``) where they are given; else every
    candidate is a request of its own. A binary task's prediction is the sigmoid of its logit, a regression's and a
    next-item model's the output itself. Raises ValueError for outputs that are not ``[C]`` or ``[C, tasks]``. NaN is
    the caller's to refuse.
    """
    import torch

    if not batch.candidates:
        nothing = np.zeros(0, np.float32)
        return Scores(nothing, np.zeros((0, max(1, len(artifact.features.tasks))), np.float32), nothing)
    with torch.inference_mode():
        logits = _logits(artifact, batch, share, states)
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


def _logits(artifact: Any, batch: RequestBatch, share: bool, states: Sequence[Any] | None) -> Tensor:
    import torch

    from semel.models.states import join

    if not share:
        parts = [artifact.model(part) for part in broadcast(batch)]
        return torch.cat(parts) if parts else artifact.model(batch)
    if not shares(artifact) or not batch.requests:
        return artifact.model(batch)
    if states is None:
        states = request_states(artifact, batch)
    state = states[0] if len(states) == 1 else join(states)
    return artifact.model.score(state, batch.candidate, batch.candidate_offsets)


Way = Literal["eager", "folded", "broadcast"]
"""``eager``: the request side once a request; ``folded``: and the item side once an item (``semel.serving.folding``);
``broadcast``: everything once a candidate."""


def path_name(way: Way) -> str:
    """How scores are computed here, as exposures name it: with another number of threads the last bits may differ."""
    import torch

    return f"{way} threads={torch.get_num_threads()}"


@contextmanager
def on_path(path: str) -> Iterator[Way]:
    """Compute as ``path`` (of an exposure) says; yields the way. Raises ValueError for a path that this
    version does not have."""
    import torch

    match = re.fullmatch(r"(eager|folded|broadcast)(?: threads=(\d{1,4}))?", path)
    if match is None:
        raise ValueError(f"exposures were scored on path {path!r}, which this version does not have; it has "
                         "'eager', 'folded' and 'broadcast'")
    before = torch.get_num_threads()
    wanted = int(match[2]) if match[2] else before
    if wanted < 1:
        raise ValueError(f"exposures were scored on path {path!r}: no such number of threads")
    try:
        if wanted != before:
            torch.set_num_threads(wanted)
        yield cast(Way, match[1])
    finally:
        if wanted != before:
            torch.set_num_threads(before)
