"""The item memory of a model in training: written once an item a step, kept fresh beside it, published as it changes.

What the tower computed for a batch's items goes to the ranks that hold their rows (``semel.training.memory_shards``);
of an item that came twice the first one counts, in the order of ranks and pieces, so that rows do not depend on which
thread was faster. Beside it runs the candidate-pool stream: within a budget a step, items of the catalogue that no
request showed are computed too, without a label or a loss, so that there is no bulk job.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semel.examples.materialization import item_features
from semel.features import FeatureSpec, stable_id
from semel.history import HistoryStore
from semel.memory import DeltaPublisher, DeltaSubscriber, Fenced, ItemMemory, pool
from semel.memory.layer import MemoryLayer
from semel.memory.table import MISS, Changes
from semel.models import exported
from semel.models.early_ranker import EarlyRanker, memory_layer
from semel.models.embeddings import ITEM
from semel.training.memory_shards import MemoryShards, first_of_each
from semel.training.ranks import Ranks
from semel.training.recipe import Recipe
from semel.training.stages import Work

logger = logging.getLogger(__name__)

_piece: ContextVar[int] = ContextVar("semel_piece", default=0)
LOOK_S = 0.5
"""How often the catalogue is looked at for new items."""
POOL = "pool.safetensors"
"""In a checkpoint's folder of rows: what the candidate pool is at."""
IDLE_ITEMS = 4096
"""Items without a row that are computed at once while no batch comes."""


class MemoryWriter:
    """``piece(number)``: around the forward pass of a piece; ``recall(work)`` before that of a batch, of a model that
    reads its memory in training while other ranks hold rows; ``write(work)`` after it. ``publish()``: what has changed,
    now; ``publish_model``: weights behind it; ``start()``: from now on, every ``interval`` seconds; ``close()``. All
    but ``piece`` are called by all ranks together, each of which publishes a shard of one log.

    Alone, a thread publishes in the background. Ranks do so at the end of a step (or while none comes), so that a
    sequence number is of one step in all shards; none of them goes on to the next number before all can.
    """

    def __init__(self, model: EarlyRanker, recipe: Recipe, url: str | Path, ranks: Ranks, catalogue: HistoryStore | None
                 ) -> None:
        layer = model.item
        self.model, self.layer, self.config, self.url, self.ranks = model, layer, recipe.memory, url, ranks
        self.elsewhere = recipe.memory.url is not None
        self.shards = MemoryShards(layer, ranks)
        self.pool = CandidatePool(self.shards, catalogue, recipe.features,
                                  model.tables.encoders[recipe.features.item].ids)  # type: ignore[arg-type]
        self.publisher: DeltaPublisher | None = None
        self._error: Exception | None = None  # of the log, which was said
        self._due = math.inf
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        layer.keep = self._take
        self.recalls = layer.reads == "cached" and ranks.world_size > 1
        self._recalled: tuple[Tensor, Tensor, Tensor] | None = None
        if self.recalls:
            layer.recall = self._rows_of

    @contextmanager
    def piece(self, number: int) -> Iterator[None]:
        token = _piece.set(number)
        try:
            yield
        finally:
            _piece.reset(token)

    def _take(self, items: Tensor, vectors: Tensor) -> None:
        self._made[_piece.get()] = items, vectors

    def recall(self, work: Work) -> None:
        """For every batch, before its forward pass: its rows, as they were left by the batch before it."""
        none = torch.empty(0, dtype=torch.int64)
        items = torch.unique(torch.cat([none, *(piece.candidate[ITEM] for _, piece in work.pieces)]))
        vectors, hit, _ = self.shards.shared.read(items)
        self._recalled = items, vectors, hit

    def _rows_of(self, items: Tensor) -> tuple[Tensor, Tensor]:
        assert self._recalled is not None
        known, vectors, hit = self._recalled
        place = torch.searchsorted(known, items)
        return vectors[place], hit[place]

    def write(self, work: Work) -> None:
        """For every batch, after its forward pass."""
        found = [self._made.pop(number) for number, _ in work.pieces if number in self._made]
        items = torch.cat([torch.empty(0, dtype=torch.int64), *(items for items, _ in found)])
        vectors = torch.cat([torch.empty(0, self.layer.memory.dim), *(vectors.float() for _, vectors in found)])
        self.layer.step += 1
        self.shards.write(*first_of_each(items, vectors), int(self.layer.step))
        if work.last:
            self._lead(lambda: self._refresh(self.pool.take(self.config.pool)))
        if self.publisher is not None and isinstance(self.publisher.error, Fenced):
            raise self.publisher.error

    def idle(self) -> None:
        """While no batch comes: items that have no row get one."""
        self._lead(lambda: self._refresh(self.pool.new(IDLE_ITEMS)))

    def fill(self) -> None:
        """Rows for all items that have none, whatever the budget: before a model is first served."""
        def fill() -> None:
            while len(some := self.pool.new(IDLE_ITEMS)):
                self._refresh(some)

        self.shards.lead(fill)

    def _lead(self, work: Callable[[], None]) -> None:
        if self.shards.lead(work, lambda: time.monotonic() >= self._due):
            self._due = time.monotonic() + self.config.interval
            self._publish_together()

    def _refresh(self, rows: np.ndarray) -> None:
        """On rank 0."""
        if not len(rows):
            return
        with torch.no_grad():
            candidate = self.pool.candidates(rows)
            items, vectors = self.layer.computed(candidate["item_id"], self.model.item_fields(candidate)[0])
            self.shards.put(items, vectors, int(self.layer.step))

    def publish(self) -> None:
        """Raises what ``DeltaPublisher`` raises, Fenced among it: then nothing else is to be published."""
        if self.publisher is None:
            config = self.config
            self.publisher = self.shards.shared.publisher(self.url, interval=config.interval, keep=config.keep,
                                                          snapshot_every=config.snapshot_every)
        elif self.ranks.world_size > 1:
            self._publish_together()
        else:
            self._unless_running(self.publisher.flush)

    def _publish_together(self) -> None:
        """One record of every shard, or none where a rank cannot reach the log; one that is being written to while it
        follows tries again later."""
        assert self.publisher is not None
        error: Exception | None = None
        try:
            self.publisher.check()
        except (OSError, Fenced) as found:
            error = found
        failed, fenced = self.ranks.sum([error is not None, isinstance(error, Fenced)])
        if fenced:
            raise error if isinstance(error, Fenced) else Fenced(f"{self.url}: another rank was told that a newer "
                                                                 "publisher has begun; only one trainer may publish")
        if not failed:
            try:
                self.publisher.record(int(self.layer.step))
            except OSError as found:
                error = found
        following = self._due < math.inf
        if failed and error is None and not following:
            error = OSError(f"{self.url}: another rank cannot publish to it")
        if error is not None and not following:
            raise error
        if error is not None and self._error is None:
            logger.warning("deltas of rank %d wait, %d rows: %s", self.ranks.rank, self.publisher.backlog, error)
        self._error = error

    def publish_model(self, run: Path, version: str) -> None:
        """A version that rank 0 has just saved in ``run``, into a log that lies elsewhere: readers there may not see
        ``run``. Raises as ``publish`` does."""
        if self.publisher is None or not self.elsewhere:
            return
        if self.ranks.rank == 0:
            model = exported(run, version)
            self._unless_running(lambda: self.publisher.publish_model(*model))  # type: ignore[union-attr]
        if self.ranks.world_size > 1:
            self._publish_together()

    def _unless_running(self, publish: Callable[[], Any]) -> None:
        try:
            publish()
        except OSError:
            if self.publisher is None or not self.publisher.running:
                raise
            # Its thread says so, and tries again: rows wait meanwhile.

    def start(self) -> None:
        """Publish every ``interval`` seconds until ``close``."""
        self.publish()
        if self.publisher is not None and self.ranks.world_size == 1:
            self.publisher.start()
        else:
            self._due = time.monotonic() + self.config.interval

    def save(self, folder: Path) -> None:
        """This rank's rows, into a folder that becomes part of a checkpoint; rank 0 also what the pool is at."""
        from safetensors.torch import save_file

        self.shards.save(folder)
        if self.ranks.rank == 0:
            save_file({"queue": self.pool.queue}, folder / POOL)

    def load(self, checkpoint: Path) -> None:
        """What ``save`` saved, on any number of ranks."""
        from safetensors.torch import load_file

        folder = checkpoint / "memory"
        self.shards.load(folder)
        if self.ranks.rank == 0 and (folder / POOL).exists():
            self.pool.restore(load_file(folder / POOL)["queue"])

    def close(self) -> None:
        """What is published by a thread is published to the end; what ``publish`` was not called for is not."""
        self.layer.keep = self.layer.recall = None
        if self.publisher is not None and self.publisher.running:
            self.publisher.close()


class CandidatePool:
    """Which items of the catalogue are computed next: those without a row, in the catalogue's order, then the oldest
    rows; without a catalogue the ``known`` ids [N]. Items are named by their place in ``ids``."""

    def __init__(self, memory: ItemMemory | MemoryShards, catalogue: HistoryStore | None, features: FeatureSpec,
                 known: Tensor) -> None:
        self.memory, self.catalogue, self.features = memory, catalogue, features
        self.keys = known.numpy()
        self.ids = known
        self._version, self._look_at = -1, 0.0
        self._queue = np.empty(0, np.int64)

    def take(self, budget: int) -> np.ndarray:
        """The next ``budget`` of them, places [N]; none of them twice before all have been."""
        new = self.new(budget) if self._look() else self._queue[:0]
        if len(self._queue) < budget - len(new):
            self._queue = self._order()
        old, self._queue = np.split(self._queue, [min(budget - len(new), len(self._queue))])
        return np.concatenate([new, old[~np.isin(old, new)]])

    def new(self, most: int) -> np.ndarray:
        """Up to ``most`` that have no row, as many as the memory has room for."""
        self._look()
        missing = np.flatnonzero(self.memory.ages(self.ids).numpy() == MISS)
        return missing[: min(most, self.memory.capacity - len(self.memory))]

    @property
    def queue(self) -> Tensor:
        """The ids [N] of those that come next, before any is taken twice."""
        return self.ids[torch.from_numpy(self._queue)]

    def restore(self, queue: Tensor) -> None:
        """Goes on with a ``queue``, without what the catalogue no longer has."""
        self._look()
        order = np.argsort(self.ids.numpy(), kind="stable")
        known = self.ids.numpy()[order]
        place = np.minimum(np.searchsorted(known, queue.numpy()), max(len(known) - 1, 0))
        self._queue = order[place[known[place] == queue.numpy()]] if len(known) else order

    def candidates(self, rows: np.ndarray) -> dict[str, Any]:
        """What a batch's ``candidate`` would hold of them now."""
        if self.catalogue is None:
            return {"item_id": self.ids[torch.from_numpy(rows)]}
        return item_features(self.keys[rows], time.time_ns() // 1000, self.catalogue, self.features)

    def _look(self) -> bool:
        """Whether the catalogue has changed since the last time."""
        if self.catalogue is None or time.monotonic() < self._look_at:
            return False
        self._look_at = time.monotonic() + LOOK_S
        self.catalogue.refresh()
        if self.catalogue.version == self._version:
            return False
        self._version = self.catalogue.version
        self.keys = self.catalogue.keys()
        self.ids = torch.from_numpy(np.ascontiguousarray(stable_id(self.keys)))
        self._queue = self._queue[:0]
        return True

    def _order(self) -> np.ndarray:
        """All of them by urgency; of those without a row as many as there is room for: no row leaves for one that
        nobody asked for."""
        by_id = np.argsort(self.ids.numpy(), kind="stable")
        urgent = pool(self.memory, self.ids, len(self.ids)).numpy()
        order = by_id[np.searchsorted(self.ids.numpy(), urgent, sorter=by_id)]
        missing = self.memory.ages(self.ids[order]).numpy() == MISS
        return order[~missing | (np.cumsum(missing) <= self.memory.capacity - len(self.memory))]


def memory_writer(model: Any, recipe: Recipe, run: Path, ranks: Ranks, catalogue: HistoryStore | None
                  ) -> MemoryWriter | None:
    """For a model that has a memory; its log lies where the recipe says, else in the run."""
    if memory_layer(model) is None:
        return None
    return MemoryWriter(model, recipe, recipe.memory.url or run / "memory", ranks, catalogue)


def take_over(layer: MemoryLayer, url: str | Path) -> None:
    """Into a new memory, the rows that were last published at ``url``, if any."""
    subscriber = DeltaSubscriber(url)
    subscriber.poll()
    if subscriber.memory is not None:
        rows = subscriber.memory.rows()
        layer.memory.merge(Changes(rows, torch.empty(0, dtype=torch.int64)))
        layer.step.fill_(int(rows.step.max()) if len(rows) else 0)
