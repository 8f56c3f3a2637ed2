"""What training predicted of each request before it learned from it: the other side of a skew."""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from semel.batch import Jagged

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch

SCHEMA = pa.schema([
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("step", pa.int64(), nullable=False),
    pa.field("history_checksum", pa.uint64(), nullable=False),
    pa.field("features_checksum", pa.uint64(), nullable=False),
    pa.field("items", pa.list_(pa.int64()), nullable=False),
    pa.field("logits", pa.list_(pa.float32()), nullable=False),
])


def features_checksums(batch: RequestBatch) -> np.ndarray:
    """[R] uint64: of each request's features and its candidates', in the order of candidates; without the history,
    which has a checksum of its own, and without memory rows."""
    ends = batch.candidate_offsets.numpy()
    columns: list[tuple[bytes, bool, np.ndarray, np.ndarray | None]] = []
    for side, values in (("request", batch.request), ("candidate", batch.candidate)):
        for name in sorted(values):
            if not name.startswith(("history", "memory_")):
                value = values[name]
                whole, offsets = (value.values, value.offsets.numpy()) if isinstance(value, Jagged) else (value, None)
                columns.append((f"{side}.{name}\0".encode(), side == "request", whole.contiguous().numpy(), offsets))
    found = np.empty(batch.requests, np.uint64)
    for row in range(batch.requests):
        digest = blake2b(digest_size=8)
        for label, of_request, whole, offsets in columns:
            start, stop = (row, row + 1) if of_request else (int(ends[row]), int(ends[row + 1]))
            digest.update(label)
            if offsets is not None:
                own = offsets[start : stop + 1]
                digest.update((own - own[0]).tobytes())
                start, stop = int(own[0]), int(own[-1])
            digest.update(whole[start:stop].tobytes())
        found[row] = int.from_bytes(digest.digest(), "little")
    return found


class PredictionLog:
    """``add`` what a model gave before it learned; ``save(step)`` writes it as one file of ``folder``, whole.
    ``forget_after(step)`` takes away what later steps wrote, which will be taken again. ``rank``: of the writer."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._parts: list[pa.Table] = []

    def add(self, step: int, batch: RequestBatch, logits: Tensor) -> None:
        """``batch`` with ``history_checksum`` among its request features; ``logits`` [C, tasks]."""
        offsets = batch.candidate_offsets.numpy().astype(np.int32)
        tasks = logits.shape[1]
        self._parts.append(pa.table({
            "request_id": pa.array([str(name) for name in batch.request_id]),
            "step": np.full(batch.requests, step),
            "history_checksum": batch.request["history_checksum"].numpy().view(np.uint64),
            "features_checksum": features_checksums(batch),
            "items": pa.ListArray.from_arrays(pa.array(offsets), pa.array(batch.candidate["item_id"].numpy())),
            "logits": pa.ListArray.from_arrays(pa.array(offsets * tasks), pa.array(logits.float().numpy().reshape(-1))),
        }, schema=SCHEMA))

    def save(self, step: int) -> None:
        if not self._parts:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:09d}-{self.rank:04d}.parquet"
        part = path.with_name(f".{path.name}.part")
        pq.write_table(pa.concat_tables(self._parts), part)
        os.replace(part, path)
        self._parts = []

    def forget_after(self, step: int) -> None:
        for path in self.folder.glob("step-*.parquet"):
            if int(path.name.split("-")[1]) > step:
                path.unlink()


def read_predictions(folder: Path, requests: Sequence[str] | None = None) -> pa.Table:
    """All that was saved, of the ``requests`` named where they are; of a request that was learned from twice the first
    time counts. FileNotFoundError where nothing was saved."""
    paths = sorted(folder.glob("step-*.parquet"))
    if not paths:
        raise FileNotFoundError(f"no predictions at {folder}: only a run that follows (semel train --follow) scores "
                                "what it then learns from")
    filters = None if requests is None else [("request_id", "in", list(requests))]
    table = pa.concat_tables([pq.read_table(path, filters=filters).cast(SCHEMA) for path in paths])
    first = np.unique(table["request_id"].to_numpy(), return_index=True)[1]
    return table.take(np.sort(first))
