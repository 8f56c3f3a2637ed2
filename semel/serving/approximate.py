"""Nearest vectors by FAISS (``pip install 'semel[faiss]'``): for catalogues whose every vector is too many to look at.

FAISS gives places that are probably the best; they are scored exactly, beside the blocks that came after its index was
made. So a new item is found at once here too, scores and ties are those of the exact scan, and only which items are
compared at all is approximate.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from semel.serving.item_index import Block, Items

log = logging.getLogger("semel.serving")
STALE = 0.1
"""Share of a catalogue that may have come, or moved, since an index was made, before the next one is made."""


@dataclass(frozen=True)
class _Made:
    """``index`` over the vectors of ``blocks``, whose first place in it is ``starts``."""

    index: Any
    blocks: tuple[Block, ...]
    starts: np.ndarray


class FaissIndex:
    """``factory``: what ``faiss.index_factory`` makes ("Flat", "HNSW32"), and behind a semicolon what
    ``faiss.ParameterSpace`` sets ("IVF1024,Flat;nprobe=32"). HNSW looks at as many as are asked for, or more
    (``efSearch``): with its default of 16 it would not find them. Raises ValueError for what FAISS does not know, and
    where it is not installed. Safe to use from several threads."""

    def __init__(self, factory: str, dim: int):
        self.factory, self.dim = factory, dim
        self._made: _Made | None = None
        self._making = threading.Lock()
        self._new()

    def near(self, vector: np.ndarray, count: int, items: Items) -> tuple[np.ndarray, list[int]]:
        """Places in ``items`` of about the ``count`` highest products with ``vector`` [dim], and the numbers of the
        blocks that they are not from, which must be looked at. The first call makes the index."""
        made = self._made
        if made is None:
            with self._making:
                made = self._made = self._made or self._make(items)
        place_of = {block.number: place for place, block in enumerate(items.blocks)}
        now = np.array([place_of.get(block.number, -1) for block in made.blocks], np.int64)
        others = sorted(set(range(len(items.blocks))) - set(now.tolist()))
        if sum(len(items.blocks[number].ids) for number in others) > max(STALE * len(items), 1024):
            self._make_later(items)
        if not len(made.blocks):
            return np.empty(0, np.int64), others
        count = min(count, made.index.ntotal)
        found = made.index.search(vector[None].astype(np.float32), count, params=self._effort(made.index, count))[1][0]
        found = found[found >= 0]
        of = np.searchsorted(made.starts, found, "right") - 1
        places = [np.empty(0, np.int64)]
        for number in np.unique(of[now[of] >= 0]).tolist():  # a block that is gone has left its items to others
            ids = made.blocks[number].ids[found[of == number] - made.starts[number]]
            block = items.blocks[now[number]]
            rows = np.minimum(np.searchsorted(block.ids, ids), len(block.ids) - 1)
            places.append(items.offsets[now[number]] + rows[block.ids[rows] == ids])  # those that have not left it
        return np.concatenate(places), others

    def _new(self) -> Any:
        try:
            import faiss
        except ModuleNotFoundError:
            raise ValueError("FAISS is not installed: pip install 'semel[faiss]', or retrieve without it") from None
        factory, _, parameters = self.factory.partition(";")
        try:
            index = faiss.index_factory(self.dim, factory, faiss.METRIC_INNER_PRODUCT)
            if parameters:
                faiss.ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError:
            raise ValueError(f"FAISS makes no index of {self.factory!r}; try Flat, HNSW32 or IVF256,Flat;nprobe=16"
                             ) from None
        return index

    @staticmethod
    def _effort(index: Any, count: int) -> Any:
        import faiss

        if not isinstance(index, faiss.IndexHNSW):
            return None
        return faiss.SearchParametersHNSW(efSearch=max(count, index.hnsw.efSearch))

    def _make(self, items: Items) -> _Made:
        index = self._new()
        blocks = items.blocks
        if blocks:
            vectors = np.concatenate([block.payload for block in blocks])
            try:
                index.train(vectors)
                index.add(vectors)
            except RuntimeError as error:  # more clusters than items, for one
                raise ValueError(f"FAISS cannot index {len(vectors):,} items as {self.factory!r}: "
                                 f"{str(error).splitlines()[-1]}") from None
        return _Made(index, blocks, np.cumsum([0, *(len(block.ids) for block in blocks)])[:-1])

    def _make_later(self, items: Items) -> None:
        """In a thread of its own: requests go on with what there is."""
        def work() -> None:
            try:
                self._made = self._make(items)
            except Exception as error:  # whatever it is, what there is serves
                log.error("the FAISS index %s cannot be made anew: %s", self.factory, error)
            finally:
                self._making.release()

        if self._making.acquire(blocking=False):
            threading.Thread(target=work, name="semel-faiss", daemon=True).start()
