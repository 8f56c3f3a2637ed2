"""The loader: request rows in, ``RequestBatch``es out, histories read just in time.

What a step trains on depends on the rows, ``seed`` and ``epoch`` only. All ranks cut the same global batches in the
same order, and each rank takes its part of every batch, neighbours staying together: the union over ranks is the same
for any world size, and every rank makes the same number of steps (with few requests left, some get an empty batch).
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from semel.batch import RequestBatch, RequestRows
from semel.examples.materialization import materialize, read_ahead
from semel.examples.order import full_order, token_cuts, window_order
from semel.examples.plain_features import plain_features
from semel.examples.prefetch import pipeline
from semel.examples.row_files import RowFiles
from semel.examples.rows import rows_from_table
from semel.examples.shared_reads import Histories, ReadCounters, is_withheld
from semel.features import FeatureSpec
from semel.history import HistoryStore, Projection

if TYPE_CHECKING:
    import os

    Examples: TypeAlias = RequestRows | pa.Table | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_ALL = 1 << 62

Shuffle: TypeAlias = Literal["window", "full"] | bool | None
Withheld: TypeAlias = Literal["keep", "drop", "fail"]


class WithheldHistory(ValueError):
    """A request may have seen events that a deletion or retention has taken since."""


class RequestLoader:
    """An iterable of ``RequestBatch``: one pass is one epoch.

    ``examples``: request rows, their table, or Parquet files of them, which are read by row group when their batches
    come and need not fit into memory (``RowFiles``; with ``shuffle="full"`` they must). A batch has ``batch_requests``
    requests over all ranks, or, with ``batch_tokens``, as many as keep history events + candidates within that (a
    larger request is a batch alone). ``features``: what a model reads, and what ``projection`` overrides which events
    it is read of; without them everything that the projection, the rows and the catalogue name (``plain_features``).

    ``shuffle``: "window" mixes the requests within windows of ``window``, as they lie in the examples, and lets up to
    ``together`` requests of one user that are neighbours in time follow each other, so that one read of a history
    serves them all; "full" (or True) is any order; None (or False) that of the examples. Whatever the order, requests
    of one user in a batch share reads, and get what they would get alone.

    ``withheld``: what becomes of a request from whose history a deletion or retention may have taken events: "keep"
    trains on what is left, "drop" on none of its candidates (their labels are masked; the batch keeps its shape),
    "fail" raises WithheldHistory. ``counters.withheld`` counts them.

    ``workers`` threads read the next batches while as many materialize, 0 does both in the consumer's own.
    ``wait_seconds``: how long the consumer has waited for batches so far; a trainer that starves sees it grow.
    ``counters``: what the batches that it got took to read. ``len()``: batches of the current epoch.

    Raises ValueError for impossible settings, for neither ``features`` nor ``projection``, and for a state of other
    examples; what goes wrong in a worker is raised in the consumer, at the batch it concerns.
    """

    def __init__(
        self, examples: Examples, store: HistoryStore, projection: Projection | None = None, *,
        features: FeatureSpec | None = None, catalogue: HistoryStore | None = None, batch_requests: int = 64,
        batch_tokens: int | None = None, shuffle: Shuffle = "window", window: int = 65_536, together: int = 8,
        seed: int = 0, rank: int = 0, world_size: int = 1, workers: int = 1, withheld: Withheld = "keep",
    ) -> None:
        for name, value, least in (("batch_requests", batch_requests, 1), ("batch_tokens", batch_tokens, 1),
                                   ("window", window, 1), ("together", together, 1), ("world_size", world_size, 1),
                                   ("workers", workers, 0), ("seed", seed, 0)):
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0..{world_size - 1}, got {rank}")
        if shuffle not in ("window", "full", True, False, None):
            raise ValueError(f'shuffle must be "window", "full" or None, got {shuffle!r}')
        if withheld not in get_args(Withheld):
            raise ValueError(f'withheld must be "keep", "drop" or "fail", got {withheld!r}')
        self.withheld = withheld
        self.store, self.catalogue, self.projection = store, catalogue, projection
        self.batch_requests, self.batch_tokens = batch_requests, batch_tokens
        self.shuffle = "full" if shuffle is True else shuffle or None
        self.window, self.together = window, together
        self.rows = _rows(examples, near=2 * window if self.shuffle == "window" else
                          _ALL if self.shuffle == "full" else batch_requests)
        blank = self.rows.blank if isinstance(self.rows, RowFiles) else self.rows
        self.features = plain_features(blank, projection, store, catalogue) if features is None else features
        self.seed, self.rank, self.world_size, self.workers = seed, rank, world_size, workers
        self.epoch = 0
        self.wait_seconds = 0.0
        self.counters = ReadCounters()
        self._start = 0   # the batch at which the next pass begins: not 0 only after load_state_dict
        self._next = 0    # the batch after the last one that the consumer got
        self._costs: np.ndarray | None = None
        self._users_and_shards: tuple[np.ndarray, np.ndarray] | None = None
        self._fingerprint: int | None = None
        self._plan: tuple[int, list[np.ndarray]] | None = None

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[RequestBatch]:
        batches, begin = self._batches(), self._start
        self._start, self._next = 0, begin
        parts = (np.array_split(batch, self.world_size)[self.rank] for batch in batches[begin:])
        made = pipeline(parts, self._read_ahead, self._make, self.workers) if self.workers else \
            (self._make(self._read_ahead(part)) for part in parts)
        try:
            while True:
                started = time.perf_counter()
                batch, counters = next(made, (None, None))
                self.wait_seconds += time.perf_counter() - started
                if batch is None or counters is None:
                    break
                self._next += 1
                self.counters += counters
                yield batch
        finally:
            made.close()  # ends its threads, also when the consumer stops early
        self.epoch, self._next = self.epoch + 1, 0

    def upcoming(self) -> list[np.ndarray]:
        """The global batches of the current epoch that are still to come, as indices of requests: what a trainer that
        makes its own stages goes through, with ``costs``, ``read`` and ``took``."""
        return self._batches()[self._next:]

    def costs(self, index: np.ndarray) -> np.ndarray:
        """History events + candidates of some requests, [len(index)] int64; no history is read."""
        return self._tokens()[index]

    def read(self, index: np.ndarray) -> RequestRows:
        """Some of the requests, with their pointers. Any number of threads may ask."""
        return self.rows.select(index)

    def took(self) -> None:
        """One of ``upcoming`` is done: ``state_dict`` is behind it."""
        self._next += 1

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
            self._fingerprint = _checksum(self.rows.request_ids() if isinstance(self.rows, RowFiles)
                                          else [self.rows.request_id])
            if self.shuffle == "window":  # what else its order depends on
                for array in (self._places()[1], self.rows.pointers.as_of):
                    self._fingerprint = zlib.crc32(array.tobytes(), self._fingerprint)
        windows = {"window": self.window, "together": self.together} if self.shuffle == "window" else {}
        return {"seed": self.seed, "shuffle": self.shuffle, **windows, "batch_requests": self.batch_requests,
                "batch_tokens": self.batch_tokens, "requests": len(self.rows), "fingerprint": self._fingerprint}

    def _read_ahead(self, index: np.ndarray) -> tuple[RequestRows, Histories]:
        rows = self.read(index)
        return rows, read_ahead(rows, self.store, self.features, projection=self.projection)

    def _make(self, read: tuple[RequestRows, Histories]) -> tuple[RequestBatch, ReadCounters]:
        rows, histories = read
        batch = materialize(rows, self.store, self.catalogue, self.features, projection=self.projection,
                            histories=histories)
        if histories.counters.withheld and self.withheld != "keep":
            batch = self._without(batch, is_withheld(histories.status))
        return batch, histories.counters

    def _without(self, batch: RequestBatch, lost: np.ndarray) -> RequestBatch:
        if self.withheld == "fail":
            some = ", ".join(map(str, batch.request_id[lost][:5]))
            raise WithheldHistory(f"{int(lost.sum())} requests of a batch may have seen events that were deleted or "
                                  f"have expired since ({some} ...); build the examples anew, or load them with "
                                  'withheld="drop"')
        rows = batch.candidate_to_request()
        keep = ~rows.new_tensor(lost).bool()[rows]
        return dataclasses.replace(batch, label_mask={name: mask & keep for name, mask in batch.label_mask.items()})

    def _batches(self) -> list[np.ndarray]:
        """The global batches of the current epoch: index arrays into ``rows``."""
        if self._plan is None or self._plan[0] != self.epoch:
            order = self._order(np.random.default_rng([self.seed, self.epoch]))
            if self.batch_tokens is None:
                cuts = np.arange(0, len(order) + self.batch_requests, self.batch_requests).clip(max=len(order))
            else:
                cuts = token_cuts(self._tokens()[order], self.batch_tokens)
            self._plan = self.epoch, [order[a:b] for a, b in pairwise(cuts) if b > a]
        return self._plan[1]

    def _order(self, random: np.random.Generator) -> np.ndarray:
        if self.shuffle is None:
            return np.arange(len(self.rows))
        if self.shuffle == "full":
            return full_order(len(self.rows), random)
        return window_order(*self._places(), self.rows.pointers.as_of, self.window, self.together, random)

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """[R] a number for each user, [R] its shard."""
        if self._users_and_shards is None:
            users = self.rows.pointers.user_id
            codes = pa.array(users).dictionary_encode().indices.to_numpy(zero_copy_only=False)
            self._users_and_shards = codes.astype(np.int64), self.store.shards_of(users)
        return self._users_and_shards

    def _tokens(self) -> np.ndarray:
        """[R] history events + candidates of each request."""
        if self._costs is None:
            projection = self.projection or Projection(columns=("event_time",), last=self.features.history_last)
            lengths, _ = self.store.lengths(self.rows.pointers, projection)
            candidates = (self.rows.candidate_counts if isinstance(self.rows, RowFiles)
                          else self.rows.candidates.lengths)
            self._costs = np.asarray(lengths, dtype=np.int64) + candidates
        return self._costs


def _rows(examples: Examples, near: int) -> RequestRows | RowFiles:
    if isinstance(examples, RequestRows):
        return examples
    if isinstance(examples, pa.Table):
        return rows_from_table(examples)
    if isinstance(examples, Sequence) and not isinstance(examples, str):
        return RowFiles([Path(path) for path in examples], near)
    return RowFiles([Path(examples)], near)


def _checksum(ids: Iterable[np.ndarray]) -> int:
    """Of the ids, a line each, whatever the parts."""
    crc, between = 0, ""
    for part in ids:
        if len(part):
            crc = zlib.crc32((between + "\n".join(part.tolist())).encode(), crc)
            between = "\n"
    return crc
