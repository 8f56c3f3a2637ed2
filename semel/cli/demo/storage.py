"""Bytes on disk: pointers and one store, against rows that each carry their history. Measured, then scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semel.batch import RequestRows
from semel.history import HistoryStore, Projection

SAMPLE_EVENTS = 4_000_000
"""About how many history events are written to measure one layout."""


@dataclass(frozen=True)
class Stored:
    """``store_bytes``: the event store; ``rows_bytes``: the example rows with their pointers; ``fat_bytes``: what the
    same rows take with the last ``last`` events of each history inside, ``fat_whole_bytes`` with all of them.
    ``measured_rows``: how many rows were written to measure; the others are taken to be like them."""

    events: int
    rows: int
    store_bytes: int
    rows_bytes: int
    fat_bytes: int
    fat_whole_bytes: int
    last: int
    measured_rows: int

    @property
    def ratio(self) -> float:
        return self.fat_bytes / (self.store_bytes + self.rows_bytes)

    @property
    def whole_ratio(self) -> float:
        return self.fat_whole_bytes / (self.store_bytes + self.rows_bytes)


def fat_bytes(store: HistoryStore, rows: RequestRows, columns: Sequence[str], last: int | None, folder: Path,
              measured: np.ndarray) -> int:
    """Bytes of a Parquet file (zstd) of the ``measured`` rows with their histories inside, one list a column.

    Rows are written as a log would hold them, in the order of time; 1,024 of them are read at once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from semel.examples import rows_to_table

    path = folder / "fat.parquet"
    writer = None
    try:
        for start in range(0, len(measured), 1024):
            part = rows.select(measured[start : start + 1024])
            histories = store.read(part.pointers, Projection(tuple(columns), last=last))
            table = rows_to_table(part)
            offsets = pa.array(histories.offsets.astype(np.int32))
            for name in ("event_time", *columns):
                values = _arrow(histories, name)
                table = table.append_column(f"history.{name}", pa.ListArray.from_arrays(offsets, values))
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    written = path.stat().st_size
    path.unlink()
    return written


def blocks(rows: RequestRows, lengths: np.ndarray, events: int = SAMPLE_EVENTS, size: int = 1024,
           seed: int = 0) -> np.ndarray:
    """Which rows to measure: all of them, or whole runs of ``size`` neighbours in the order of time, drawn until their
    histories hold about ``events`` events. Neighbours stay together, since they compress together."""
    order = np.argsort(rows.pointers.as_of, kind="stable")
    if lengths.sum() <= events:
        return order
    starts = np.random.default_rng(seed).permutation(np.arange(0, len(order), size))
    chosen, total = [], 0
    for start in starts:
        chosen.append(start)
        total += int(lengths[order[start : start + size]].sum())
        if total >= events:
            break
    return np.concatenate([order[start : start + size] for start in sorted(chosen)])


def bytes_under(path: Path, without: Sequence[str] = ()) -> int:
    """Bytes of all files in a folder (or of one file), its direct children named ``without`` left out."""
    if path.is_file():
        return path.stat().st_size
    return sum(bytes_under(child) for child in path.iterdir() if child.name not in without)


def _arrow(histories: Any, name: str) -> Any:
    import pyarrow as pa

    if name in (histories.dictionaries or {}):
        return pa.array(histories.strings(name), pa.string())
    valid = (histories.validity or {}).get(name)
    return pa.array(np.asarray(histories.columns[name]), mask=None if valid is None else ~np.asarray(valid))
