"""Item vectors that lie ready: what an early ranker makes of an item's row and of its catalogue features, computed when
either changes and not once a candidate. A candidate then costs one lookup, as in a cache that a bulk job fills, and its
features are not read.

A vector's bits depend on the item's row and features alone (``semel.memory.folded``): what was kept, what is computed
for a request that must see an older catalogue, and what a replay computes are the same.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from semel.serving.item_rows import joined

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch
    from semel.history import HistoryStore
    from semel.memory import Changes, FoldedMemory, ItemMemory
    from semel.models import ModelArtifact

_EVER = int(np.iinfo(np.int64).max)
_NOBODY = uuid.uuid4().hex
"""An item that no catalogue has."""
_SHARED = 16
"""Changes whose vectors one table has computed and the other has not yet taken, at most."""


def with_vectors(batch: RequestBatch, artifact: Any) -> RequestBatch:
    """``batch`` with rows of a memory and catalogue features of its candidates (``item_rows.joined``) -> with their
    vectors, computed now."""
    from semel.memory.folded import fold
    from semel.models.early_ranker import HIT, ROW, VECTOR

    model, candidate = artifact.model, batch.candidate
    vectors = fold(model.item, lambda: model.item_fields(candidate)[1], candidate[ROW], candidate[HIT])
    return replace(batch, candidate={**candidate, VECTOR: vectors})


class Folding:
    """Of one early ranker. Safe to use from several threads.

    One table for each memory object that is read (a subscriber has two, which change places); ``follow`` tells what was
    written to one before requests see it. What the first of two tables has computed, the second takes over. Catalogue
    features are followed when a request comes whose catalogue is newer.
    """

    def __init__(self, artifact: ModelArtifact, catalogue: HistoryStore | None) -> None:
        from semel.memory import ItemMemory

        self.artifact = artifact
        self._catalogue = catalogue if artifact.features.candidate else None
        layer: Any = artifact.model.item
        self._nothing = ItemMemory(1, layer.memory.dim).eval()
        self._tables: WeakKeyDictionary[ItemMemory, _Table] = WeakKeyDictionary()
        self._shared: dict[int, _Shared] = {}
        self._lock = threading.Lock()

    def folded(self, batch: RequestBatch, items: np.ndarray, version: Any, memory: ItemMemory | None) -> RequestBatch:
        """``batch`` with the vectors of its candidates, whose raw ids are ``items`` [C]; ``version``: of the catalogue
        as of which they are read, [R] or one for all; ``memory``: None for misses only."""
        import torch

        from semel.models.early_ranker import VECTOR

        memory = self._nothing if memory is None else memory
        ids, as_of = batch.candidate["item_id"], batch.request["as_of"].numpy()
        versions = np.asarray(0 if self._catalogue is None else version, np.int64)
        table = self._table(memory)
        with table.lock:
            table.catch_up()
            table.see(int(versions.max(initial=0)))
            vectors = table.folded.read(ids)
            older = (versions != table.version) | (as_of <= table.newest)
            other = table.others(items, ids.numpy(), older, batch.candidate_offsets)
        if other is not None and other.any():
            where = np.flatnonzero(other)
            some, lengths = torch.from_numpy(where), batch.candidate_offsets.diff().numpy()
            versions = np.broadcast_to(versions, as_of.shape)
            candidate = {"item_id": ids[some], **self._features(items[where], np.repeat(as_of, lengths)[where],
                                                                np.repeat(versions, lengths)[where])}
            part = replace(batch, candidate=candidate)
            part = with_vectors(joined(part, self.artifact, memory)[0], self.artifact)
            vectors[some] = part.candidate[VECTOR]
        return replace(batch, candidate={**batch.candidate, VECTOR: vectors})

    def follow(self, memory: ItemMemory, changes: Sequence[Changes] | None, at_once: bool = True) -> None:
        """``memory`` has taken ``changes``, or is new (None), and is going to be read; not ``at_once``: by a request
        that may never come, which then waits for what is computed."""
        with self._lock:
            table = self._tables.get(memory)
        if table is None:
            if at_once:
                self._table(memory)
            return
        with table.lock:
            table.behind += changes or ()
            if at_once:
                table.catch_up()
            elif sum(len(one.rows) for one in table.behind) > len(memory):  # then all anew is less work
                with self._lock:
                    self._tables.pop(memory, None)

    def shared(self, changes: Changes, table: _Table) -> Changes:
        """``changes`` with their vectors for ``table``, which the other table may have computed."""
        with self._lock:
            found = self._shared.pop(id(changes), None)
        if found is not None and found.version == table.version:
            table.newest = max(table.newest, found.newest)
            table.ahead = np.union1d(table.ahead, found.ahead)
            return found.vectors
        vectors = table.folded.folded(changes)
        with self._lock:
            self._shared[id(changes)] = _Shared(changes, table.version, table.newest, table.ahead, vectors)
            while len(self._shared) > _SHARED:
                self._shared.pop(next(iter(self._shared)))
        return vectors

    def _table(self, memory: ItemMemory) -> _Table:
        with self._lock:
            if memory not in self._tables:
                self._tables[memory] = _Table(self, memory)
            return self._tables[memory]

    def _features(self, items: np.ndarray, as_of: Any, version: Any) -> dict[str, Any]:
        from semel.examples.materialization import catalogue_features

        return catalogue_features(items, as_of, version, self._catalogue, self.artifact.features)


@dataclass(frozen=True)
class _Shared:
    """``vectors`` of ``changes`` by features of ``version``; ``newest`` and ``ahead`` as of ``_Table``."""

    changes: Changes  # held, so that no other ones get their id
    version: int
    newest: int
    ahead: np.ndarray
    vectors: Changes


class _Table:
    """The vectors of what one memory object holds, by catalogue features of ``version``, to be used under ``lock``.

    ``newest``: the time of the newest features that were read; a request as of that time, or before, sees others.
    ``ahead`` [N]: items with features of a time that had not come yet. ``behind``: what the memory has taken and the
    vectors have not."""

    def __init__(self, folding: Folding, memory: ItemMemory) -> None:
        self.lock = threading.Lock()
        self._folding, self._catalogue, self._artifact = folding, folding._catalogue, folding.artifact
        self._memory = memory
        self.behind: list[Changes] = []
        self.version = 0 if self._catalogue is None else self._catalogue.version
        self._expired = self._expired_now()
        self._build()

    def _expired_now(self) -> tuple[int, int] | None:
        """What retention has taken: up to when, and the compaction that did, since one may also take what came late."""
        if self._catalogue is None or self._catalogue.expired_before <= 0:
            return None
        return self._catalogue.expired_before, self._catalogue.generation

    def _build(self) -> None:
        from semel.memory import FoldedMemory

        self.newest, self.ahead = -_EVER, np.empty(0, np.int64)
        self._names()
        layer: Any = self._artifact.model.item
        self.folded: FoldedMemory = FoldedMemory(layer, self._memory, self._always_on)

    def catch_up(self) -> None:
        for one in self.behind:
            self.folded.rows.merge(self._folding.shared(one, self))
        self.behind = []

    def _names(self) -> None:
        """The raw ids of items, where they are not their stable ids."""
        from semel.features import stable_id

        self._raw: tuple[Any, Any] | None = None
        if self._catalogue is not None and self._catalogue.schema.string_keys:
            keys = np.append(np.asarray(self._catalogue.keys(), object), _NOBODY)
            ids = stable_id(keys)
            order = np.argsort(ids, kind="stable")
            self._raw = ids[order], keys[order]

    def _raw_of(self, ids: np.ndarray) -> np.ndarray:
        if self._raw is None:
            return ids
        known, keys = self._raw
        place = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        return np.where(known[place] == ids, keys[place], _NOBODY)

    def others(self, items: np.ndarray, ids: np.ndarray, older: np.ndarray, offsets: Tensor) -> np.ndarray | None:
        """Which candidates [C] (None: not one) have other features than those that vectors were made of: the request
        sees an older catalogue (``older`` [R]), or they share their stable id with an item of it, as "4.0" does with
        "4"."""
        if not older.any() and not len(self.ahead) and self._raw is None:
            return None
        other = np.repeat(older, offsets.diff().numpy())
        if len(self.ahead):
            other |= np.isin(ids, self.ahead)
        if self._raw is not None:
            raw = self._raw_of(ids)
            other |= (raw != items) & (raw != _NOBODY)
        return other

    def see(self, version: int) -> None:
        """The catalogue as of ``version``, if that is newer, and without what retention has taken since."""
        import torch

        from semel.features import stable_id

        if self._catalogue is None:
            return
        expired = self._expired_now()
        if expired != self._expired:
            self._expired, self.version = expired, max(version, self.version)
            self._build()
            return
        if version <= self.version:
            return
        changed = self._catalogue.changed_keys(self.version)
        self.version = version
        if len(changed):
            self._names()
            self.folded.renew(torch.from_numpy(stable_id(changed).copy()), self._memory)

    def _always_on(self, ids: Tensor) -> Any:
        """What the always-on module takes of items by their stable ids."""
        from semel.history import Pointers, Projection

        candidate: dict[str, Any] = {"item_id": ids}
        if self._catalogue is not None:
            items = self._raw_of(ids.numpy())
            ever, version = np.array(_EVER), np.array(self.version)
            candidate |= self._folding._features(items, ever, version)
            rows = self._catalogue.read(Pointers(items, ever, version), Projection(("event_time",), last=1))
            times = np.full(len(items), -_EVER)
            times[rows.lengths > 0] = rows.columns["event_time"]
            ahead = times >= time.time_ns() // 1000
            self.newest = max([self.newest, *times[~ahead].tolist()])
            if ahead.any():
                self.ahead = np.union1d(self.ahead, ids.numpy()[ahead])
        return self._artifact.model.item_fields(candidate)[1]  # type: ignore[operator]
