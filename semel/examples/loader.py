"""The loader: request rows in, ``RequestBatch``es out, histories read just in time.

What a step trains on depends on the rows, ``seed`` and ``epoch`` only. All ranks cut the same global batches in the
same order, and rank r takes requests r, r + world_size, ... of each: the union over ranks is the same for any world
size, and every rank makes the same number of steps (with few requests left, some ranks get an empty batch).
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from semel.batch import RequestBatch, RequestRows, offsets_of
from semel.examples.materialization import materialize
from semel.examples.rows import concat_rows, read_rows, rows_from_table
from semel.features import FeatureSpec
from semel.history import HistoryStore, Projection

if TYPE_CHECKING:
    import os

    Examples: TypeAlias = RequestRows | pa.Table | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

AHEAD = 4
"""Batches that are made ahead of the consumer, beside those in work."""


class RequestLoader:
    """An iterable of ``RequestBatch``: one pass is one epoch.

    ``examples``: request rows, their table, or Parquet files of them. A batch has ``batch_requests`` requests over all
    ranks, or, with ``batch_tokens``, as many as keep history events + candidates within that (a larger request is a
    batch alone). ``workers`` threads materialize ahead of the consumer, 0 does it in the consumer's own. ``projection``
    overrides which events are read. ``len()``: batches of the current epoch. ``wait_seconds``: how long the consumer
    has waited for batches so far; a trainer that starves sees it grow.

    Raises ValueError for impossible sizes and for a state of other examples; what goes wrong in a worker is raised in
    the consumer, at the batch it concerns.
    """

    def __init__(
        self, examples: Examples, store: HistoryStore, projection: Projection | None = None, *, features: FeatureSpec,
        catalogue: HistoryStore | None = None, batch_requests: int = 64, batch_tokens: int | None = None,
        shuffle: bool = True, seed: int = 0, rank: int = 0, world_size: int = 1, workers: int = 1,
    ) -> None:
        for name, value, least in (("batch_requests", batch_requests, 1), ("batch_tokens", batch_tokens, 1),
                                   ("world_size", world_size, 1), ("workers", workers, 0), ("seed", seed, 0)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        self.rows = _read(examples)
        self.store, self.catalogue, self.features, self.projection = store, catalogue, features, projection
        self.batch_requests, self.batch_tokens = batch_requests, batch_tokens
        self.shuffle, self.seed, self.rank, self.world_size, self.workers = shuffle, seed, rank, world_size, workers
        self.epoch = 0
        self.wait_seconds = 0.0
        self._start = 0   # the batch at which the next pass begins: not 0 only after load_state_dict
        self._next = 0    # the batch after the last one that the consumer got
        self._costs: np.ndarray | None = None
        self._fingerprint: int | None = None
        self._plan: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[RequestBatch]:
        batches, begin = self._batches(), self._start
        self._start, self._next = 0, begin
        parts = (batch[self.rank :: self.world_size] for batch in batches[begin:])
        made = self._ahead(parts) if self.workers else map(self._make, parts)
        try:
            while True:
                started = time.perf_counter()
                batch = next(made, None)
                self.wait_seconds += time.perf_counter() - started
                if batch is None:
                    break
                self._next += 1
                yield batch
        finally:
            if isinstance(made, Generator):
                made.close()  # ends its threads, also when the consumer stops early
        self.epoch, self._next = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is epoch ``epoch`` (each pass moves on by one by itself). Keeps a loaded position in it."""
        if epoch != self.epoch:
            self.epoch, self._start, self._next = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is: JSON values only. The batch it got last counts as done."""
        return {"epoch": self.epoch, "batch": self._next, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the batch that ``state`` names; ``rank``, ``world_size`` and ``workers`` may be others. Raises
        ValueError if the examples or what decides on their order are not the same."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(f"cannot resume: the loader has {name}={value}, its state was saved with "
                                 f"{state.get(name)}")
        self.epoch = int(state["epoch"])
        self._start = self._next = int(state["batch"])

    def _identity(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = zlib.crc32("\n".join(self.rows.request_id.tolist()).encode())
        return {"seed": self.seed, "shuffle": self.shuffle, "batch_requests": self.batch_requests,
                "batch_tokens": self.batch_tokens, "requests": len(self.rows), "fingerprint": self._fingerprint}

    def _make(self, index: np.ndarray) -> RequestBatch:
        return materialize(self.rows.select(index), self.store, self.catalogue, self.features,
                           projection=self.projection)

    def _ahead(self, parts: Iterator[np.ndarray]) -> Generator[RequestBatch]:
        """``_make`` of each part, in order, a bounded number of them ahead in threads that end with the pass."""
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="semel-loader")
        waiting: deque[Future[RequestBatch]] = deque()
        try:
            for part in parts:
                waiting.append(pool.submit(self._make, part))
                if len(waiting) >= AHEAD + self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batches(self) -> list[np.ndarray]:
        """The global batches of the current epoch: index arrays into ``rows``."""
        if self._plan is None or self._plan[0] != self.epoch:
            order = np.arange(len(self.rows))
            if self.shuffle:
                order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
            if self.batch_tokens is None:
                cuts = np.arange(0, len(order) + self.batch_requests, self.batch_requests).clip(max=len(order))
            else:
                cuts = token_cuts(self._tokens()[order], self.batch_tokens)
            self._plan = self.epoch, [order[a:b] for a, b in pairwise(cuts) if b > a]
        return self._plan[1]

    def _tokens(self) -> np.ndarray:
        """[R] history events + candidates of each request."""
        if self._costs is None:
            projection = self.projection or Projection(columns=("event_time",), last=self.features.history_last)
            lengths, _ = self.store.lengths(self.rows.pointers, projection)
            self._costs = np.asarray(lengths, dtype=np.int64) + self.rows.candidates.lengths
        return self._costs


def token_cuts(tokens: np.ndarray, limit: int) -> np.ndarray:
    """Where to cut requests of these sizes, in this order, so that each run keeps within ``limit``: [runs + 1] indices.
    A request larger than the limit is a run of its own."""
    ends = offsets_of(tokens)
    cuts = [0]
    while cuts[-1] < len(tokens):
        end = int(np.searchsorted(ends, ends[cuts[-1]] + limit, side="right")) - 1
        cuts.append(max(end, cuts[-1] + 1))
    return np.asarray(cuts)


def _read(examples: Examples) -> RequestRows:
    if isinstance(examples, RequestRows):
        return examples
    if isinstance(examples, pa.Table):
        return rows_from_table(examples)
    if isinstance(examples, Sequence) and not isinstance(examples, str):
        return concat_rows([read_rows(Path(path)) for path in examples])
    return read_rows(Path(examples))
