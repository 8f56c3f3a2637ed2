"""The item side of what a predictor scores: whence rows and vectors of candidates come, all of one moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.serving.folding import Folding
from semel.serving.item_rows import joined

if TYPE_CHECKING:
    from semel.batch import RequestBatch
    from semel.history import HistoryStore
    from semel.memory import Changes, DeltaSubscriber, ItemMemory, Position
    from semel.models import ModelArtifact
    from semel.serving.scoring import Way

Rows = Callable[["RequestBatch", np.ndarray, Any], "RequestBatch"]
"""A batch, the raw ids of its candidates [C], versions of the catalogue ([R] or one) -> the batch with their rows."""
_KEPT = 3
"""Models whose vectors are kept: the present one, the one before it and one that may take its place."""


class ItemSide:
    """``memory``: what rows are read from, of a model that has a memory; ``share``: candidates have vectors that are
    kept (``semel.serving.folding``), not rows. Safe to use from several threads."""

    def __init__(self, catalogue: HistoryStore | None, memory: DeltaSubscriber | None, share: bool) -> None:
        self._catalogue, self._memory, self._share = catalogue, memory, share
        self._foldings: dict[str, Folding] = {}  # the last that was asked for is the last
        self._asked: set[str] = set()  # since rows came
        self._lock = threading.Lock()
        if memory is not None:
            memory.on_new = self._follow

    def way(self, artifact: ModelArtifact) -> Way:
        """How candidates of this model are scored."""
        from semel.models.early_ranker import memory_layer

        if not self._share:
            return "broadcast"
        return "eager" if memory_layer(artifact.model) is None else "folded"

    @contextmanager
    def rows(self, artifact: ModelArtifact) -> Iterator[tuple[Rows, Position | None]]:
        """A function that puts what there is of the candidates into a batch, and of which position it is."""
        if self._memory is None or self._memory.position is None:
            yield self._of(artifact, None), None
        else:
            with self._memory.reading() as (memory, position):
                yield self._of(artifact, memory), position

    def _of(self, artifact: ModelArtifact, memory: ItemMemory | None) -> Rows:
        if self.way(artifact) != "folded":
            return lambda batch, items, version: joined(batch, artifact, memory)[0]
        folding = self._folding(artifact)
        return lambda batch, items, version: folding.folded(batch, items, version, memory)

    def forget(self) -> None:
        """Let go of all vectors: features that they were made of were erased."""
        with self._lock:
            self._foldings.clear()

    def _folding(self, artifact: ModelArtifact) -> Folding:
        with self._lock:
            folding = self._foldings.pop(artifact.version, None) or Folding(artifact, self._catalogue)
            self._foldings[artifact.version] = folding
            self._asked.add(artifact.version)
            for old in list(self._foldings)[:-_KEPT]:
                del self._foldings[old]
            return folding

    def _follow(self, memory: ItemMemory, changes: Sequence[Changes] | None) -> None:
        """``memory`` has taken ``changes`` and is going to be read. Models that nobody asks meanwhile follow when they
        are asked again: each would hold up the rows of all."""
        with self._lock:
            foldings, asked = dict(self._foldings), self._asked | set(list(self._foldings)[-1:])
            self._asked = set()
        for version, folding in foldings.items():
            folding.follow(memory, changes, at_once=version in asked)
