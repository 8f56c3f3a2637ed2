"""Retrieval: the best items of a whole catalogue for one request, whose side is computed once.

Items are scored block by block, so memory for activations depends on the block and not on the catalogue; of all items
only their scores are held at once, 4 bytes each. The best are then found exactly, filters and diversity included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.serving.checks import show
from semel.serving.errors import NonFiniteScore
from semel.serving.item_index import ItemIndex, Items
from semel.serving.selection import best, capped, without

if TYPE_CHECKING:
    from semel.batch import RequestBatch
    from semel.history import HistoryStore
    from semel.models import ModelArtifact
    from semel.serving.approximate import FaissIndex
    from semel.serving.item_side import Rows

NEAR = 2
"""How many times the items that are wanted FAISS is asked for."""


@dataclass(frozen=True)
class Found:
    """``ids``: the items, in ascending order. ``scanned`` of ``items``: how many of the catalogue were scored, at its
    ``version``."""

    ids: np.ndarray
    items: int
    scanned: int
    version: int


class CatalogueScan:
    """Scores a catalogue by one model. Where its logit is a product of two vectors (``DotProduct``) items' vectors are
    kept and a score is one sum over their width, in an order that depends on nothing but the width: equal vectors score
    equal to the bit, wherever they lie. Else items' features are kept, and the model's candidate side is run on them.
    """

    def __init__(self, artifact: ModelArtifact, catalogue: HistoryStore, faiss: str | None = None):
        """``faiss``: compare those items only that an index of this kind finds near (``semel.serving.approximate``).
        Raises ValueError for a model that has no vectors."""
        from semel.models.states import DotProduct

        self._artifact, self._catalogue = artifact, catalogue
        self._dot = isinstance(artifact.model, DotProduct)
        self.index = ItemIndex(catalogue, self._vectors if self._dot else self.features)
        self._near: FaissIndex | None = None
        if faiss is not None:
            from semel.serving.approximate import FaissIndex

            if not self._dot:
                raise ValueError(f"FAISS finds near vectors; a {artifact.config.kind} model has none for its items: "
                                 "retrieve by a next-item model, or without FAISS")
            self._near = FaissIndex(faiss, self._vectors(np.empty(0, np.int64), 0, 0).shape[1])

    def prepare(self) -> None:
        """Read the catalogue, so that no request has to."""
        items = self.index.items()
        if self._near is not None:
            self._near.near(np.zeros(self._near.dim, np.float32), 1, items)

    def find(self, batch: RequestBatch, states: list[Any] | None, as_of: int, limit: int, excluded: np.ndarray,
             rows: Rows = lambda batch, ids, version: batch,
             values_of: Callable[[np.ndarray, int], np.ndarray] | None = None, most: int = 0,
             deadline: float | None = None) -> Found:
        """The ``limit`` best items for ``batch``'s one request that are not ``excluded``, at most ``most`` of one value
        of ``values_of(ids, version)`` where that is given; equal scores in the order of their ids. ``rows``: puts what
        a memory has of items into a batch. After ``deadline`` (``time.perf_counter``) no further block is begun.
        Raises NonFiniteScore.
        """
        items = self.index.items()

        def chosen(scores: np.ndarray) -> np.ndarray:
            wanted = limit + len(excluded)
            while True:
                places = best(scores, wanted, items.ids_at)
                ids = items.ids_at(places)
                ids = ids[without(ids, excluded)]
                if values_of is not None:
                    ids = ids[capped(values_of(ids, items.version), most)]
                if len(ids) >= limit or len(places) < wanted:
                    return ids[:limit]
                wanted *= 4  # a few values take all the best places: look further down

        if self._near is not None:
            scores, scanned = self._near_scores(states, items, as_of, limit + len(excluded))
            ids = chosen(scores)
            if len(ids) == limit or scanned == len(items):
                return Found(np.sort(ids), len(items), scanned, items.version)
        scores, scanned = self._scores(batch, states, items, as_of, rows, deadline)
        return Found(np.sort(chosen(scores)), len(items), scanned, items.version)

    def _scores(self, batch: RequestBatch, states: list[Any] | None, items: Items, as_of: int,
                rows: Rows, deadline: float | None) -> tuple[np.ndarray, int]:
        """[len(items)] float32, -inf for what is not there yet at ``as_of`` and what there was no time for."""
        score = self._dot_scorer(states) if self._dot else \
            self._model_scorer(batch, states, items.version, as_of, rows)
        scores = np.full(len(items), -np.inf, np.float32)
        scanned = 0
        for number, block in enumerate(items.blocks):
            if deadline is not None and number and time.perf_counter() > deadline:
                break
            found = score(block)
            if not np.isfinite(found).all():
                item = block.ids[~np.isfinite(found)].tolist()[0]
                raise NonFiniteScore(f"the model gave NaN or infinity for item {show(item)} of the catalogue; no score "
                                     "is made up for it. Check its weights and the item's features")
            if block.last_begin >= as_of:
                found = np.where(block.begins < as_of, found, -np.inf)
            scores[items.offsets[number] : items.offsets[number + 1]] = found
            scanned += len(block.ids)
        return scores, scanned

    def _near_scores(self, states: list[Any] | None, items: Items, as_of: int, wanted: int) -> tuple[np.ndarray, int]:
        """As ``_scores``, of the items that are probably among the ``wanted`` best, and of those that are new."""
        assert self._near is not None
        vector = self._request_vector(states)
        places, others = self._near.near(vector, NEAR * wanted, items)
        for number in others:
            places = np.concatenate([places, np.arange(*items.offsets[number : number + 2])])
        scores = np.full(len(items), -np.inf, np.float32)
        of = np.searchsorted(items.offsets, places, "right") - 1
        for number in np.unique(of).tolist():
            block, mine = items.blocks[number], places[of == number]
            rows = mine - items.offsets[number]
            found = np.einsum("nd,d->n", block.payload[rows], vector)
            scores[mine] = np.where(block.begins[rows] < as_of, found, -np.inf)
        return scores, len(places)

    def _dot_scorer(self, states: list[Any] | None) -> Callable[[Any], np.ndarray]:
        vector = self._request_vector(states)
        return lambda block: np.einsum("nd,d->n", block.payload, vector)

    def _request_vector(self, states: list[Any] | None) -> np.ndarray:
        import torch

        assert states is not None
        with torch.inference_mode():
            return self._artifact.model.request_vector(states[0])[0].float().cpu().numpy()  # type: ignore[operator]

    def _model_scorer(self, batch: RequestBatch, states: list[Any] | None, version: int, as_of: int,
                      rows: Rows) -> Callable[[Any], np.ndarray]:
        import torch

        from semel.serving.scoring import score

        def scores(block: Any) -> np.ndarray:
            # Rows that are newer than the request would tell it of the future.
            candidate = block.payload if block.changed < as_of else self.features(block.ids, as_of, version)
            part = replace(batch, candidate=candidate, candidate_offsets=torch.tensor([0, len(block.ids)]), label={},
                           label_mask={})
            return score(self._artifact, rows(part, block.ids, version), states=states).logits

        return scores

    def _vectors(self, ids: np.ndarray, as_of: int, version: int) -> np.ndarray:
        import torch

        from semel.features import stable_id

        with torch.inference_mode():
            vectors = self._artifact.model.item_vector(torch.from_numpy(stable_id(ids)))  # type: ignore[operator]
        return np.ascontiguousarray(vectors.float().cpu().numpy())

    def features(self, ids: np.ndarray, as_of: int, version: int) -> dict[str, Any]:
        import torch

        from semel.examples.materialization import catalogue_features
        from semel.features import stable_id

        stable = stable_id(ids)
        return {"item_id": torch.from_numpy(stable if stable.flags.writeable else stable.copy()),
                **catalogue_features(ids, as_of, version, self._catalogue, self._artifact.features)}
