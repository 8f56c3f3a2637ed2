"""Step 3: bytes on disk. Pointers and one store, against training rows that each carry their history ("fat rows").

Fat rows are written as Parquet with zstd, for a sample that holds enough events, and scaled; nothing is estimated from
lengths alone. Three layouts: a row a request, a row a candidate in the order of time (neighbours repeat one history,
which zstd finds), and a row a candidate in random order, as trainers read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semel.batch import RequestRows, expand_rows
from semel.cli import output
from semel.cli.demo.state import Demo
from semel.history import HistoryStore, Projection

LAYOUTS = ("request", "candidate", "candidate, shuffled")
SAMPLE_EVENTS = 2_000_000
BLOCK = 128
"""Requests that are neighbours in time and are sampled together, since they compress together."""
CHUNK_EVENTS = 500_000
"""About as many history events are held in memory at once, as one row group."""


def step(demo: Demo) -> None:
    from semel.examples import concat_rows, open_examples

    examples = open_examples(demo.store, demo.facts["examples"]["set"])
    rows = concat_rows([examples.rows(split) for split in examples.paths])
    features = demo.recipe("rank").features
    columns, last = [feature.name for feature in features.history], features.history_last
    sample = SAMPLE_EVENTS // (4 if demo.quick else 1)
    measured: dict[str, Any] = {}
    with HistoryStore.open(demo.store) as store, output.progress_bar() as bar:
        task = bar.add_task("fat rows", total=2 * len(LAYOUTS), detail="")
        for length, name in ((last, "last"), (None, "whole")):
            lengths, _ = store.lengths(rows.pointers, Projection(("event_time", *columns), last=length))
            demo.facts["history_lengths"] = lengths
            for layout in LAYOUTS:
                bar.update(task, description=f"fat rows: one a {layout}, {name}")
                key = f"a row a {layout}, " + (f"last {length}" if length else "whole histories")
                measured[key] = fat_bytes(store, rows, lengths, columns, length, layout, demo.folder, sample)
                bar.advance(task)
    store_bytes = bytes_under(demo.store, ("catalogue", "examples", "exposures", "outcomes"))
    rows_bytes = sum(path.stat().st_size for path in examples.paths.values())
    usual = measured[f"a row a {LAYOUTS[-1]}, last {last}"]
    demo.facts["stored"] = {
        "events": demo.facts["data"]["events"], "requests": len(rows), "candidates": len(rows.candidates.values),
        "store_bytes": store_bytes, "rows_bytes": rows_bytes, "bytes": store_bytes + rows_bytes,
        "fat_rows_bytes": usual, "ratio": usual / (store_bytes + rows_bytes), "fat_rows_by_layout": measured,
    }
    demo.say(f"{output.size(store_bytes + rows_bytes)} for the store and rows with pointers; as fat rows "
             f"{output.size(min(measured.values()))} to {output.size(max(measured.values()))}, by layout")


def fat_bytes(store: HistoryStore, rows: RequestRows, lengths: np.ndarray, columns: Sequence[str], last: int | None,
              layout: str, folder: Path, sample_events: int = SAMPLE_EVENTS, seed: int = 0) -> int:
    """Bytes of all ``rows`` as fat rows in one of LAYOUTS: a sample is written, and scaled by its rows and events.

    ``lengths`` [R]: of the histories with ``last``. The sample makes shuffled rows look smaller than they are: fewer
    histories mean more repetitions near by.
    """
    per_request = np.ones(len(rows), np.int64) if layout == "request" else np.asarray(rows.candidates.lengths)
    weight = per_request * (1 + lengths)
    chosen = blocks(np.argsort(rows.pointers.as_of, kind="stable"), weight, sample_events, seed)
    request = np.repeat(chosen, per_request[chosen])
    _, offsets = expand_rows(rows.candidates.offsets, chosen)
    candidate = (np.repeat(rows.candidates.offsets[chosen] - offsets[:-1], per_request[chosen])
                 + np.arange(offsets[-1])) if layout != "request" else None
    if layout == LAYOUTS[-1]:
        order = np.random.default_rng(seed).permutation(len(request))
        request, candidate = request[order], None if candidate is None else candidate[order]
    written = _write(store, rows, request, candidate, lengths, columns, last, folder / "fat.parquet")
    return round(written * weight.sum() / weight[chosen].sum())


def blocks(order: np.ndarray, weight: np.ndarray, enough: int, seed: int) -> np.ndarray:
    """Runs of BLOCK neighbours of ``order``, drawn until their weights add up to ``enough``, in that order."""
    starts = np.random.default_rng(seed).permutation(np.arange(0, len(order), BLOCK))
    sums = np.cumsum([weight[order[start : start + BLOCK]].sum() for start in starts])
    chosen = np.sort(starts[: int(np.searchsorted(sums, enough)) + 1])
    return np.concatenate([order[start : start + BLOCK] for start in chosen])


def bytes_under(path: Path, without: Sequence[str] = ()) -> int:
    """Bytes of all files in a folder (or of one file), its direct children named ``without`` left out."""
    if path.is_file():
        return path.stat().st_size
    return sum(bytes_under(child) for child in path.iterdir() if child.name not in without)


def _write(store: HistoryStore, rows: RequestRows, request: np.ndarray, candidate: np.ndarray | None,
           lengths: np.ndarray, columns: Sequence[str], last: int | None, path: Path) -> int:
    """Write one fat row for each of ``request`` (with its one ``candidate``, or all of its candidates); the bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from semel.examples import rows_to_table

    writer = None
    try:
        for part in _chunks(lengths[request] + 1, CHUNK_EVENTS):
            unique, place = np.unique(request[part], return_inverse=True)
            histories = store.read(rows.pointers[unique], Projection(("event_time", *columns), last=last))
            index, offsets = expand_rows(histories.offsets, place)
            if candidate is None:
                table = rows_to_table(rows.select(request[part]))
            else:
                table = pa.table(_candidate_columns(rows, request[part], candidate[part]))
            for name in ("event_time", *columns):
                values = _arrow(histories, name).take(pa.array(index))
                lists = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)
                table = table.append_column(f"history.{name}", lists)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
    written = path.stat().st_size
    path.unlink()
    return written


def _candidate_columns(rows: RequestRows, request: np.ndarray, candidate: np.ndarray) -> dict[str, Any]:
    import pyarrow as pa

    columns = {"user_id": rows.pointers.user_id[request], "as_of": rows.pointers.as_of[request],
               "item_id": rows.candidates.values[candidate]}
    columns |= {name: column[request] for name, column in rows.context.items()}
    columns |= {f"label.{task}": label[candidate] for task, label in rows.label.items()}
    return {name: pa.array(column) for name, column in columns.items()}


def _chunks(weight: np.ndarray, enough: int) -> Iterator[slice]:
    """Consecutive slices of about ``enough`` weight each."""
    edges = np.flatnonzero(np.diff(np.cumsum(weight) // enough)) + 1
    bounds = [0, *edges.tolist(), len(weight)]
    return (slice(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start)


def _arrow(histories: Any, name: str) -> Any:
    import pyarrow as pa

    if name in (histories.dictionaries or {}):
        return pa.array(histories.strings(name), pa.string())
    valid = (histories.validity or {}).get(name)
    return pa.array(np.asarray(histories.columns[name]), mask=None if valid is None else ~np.asarray(valid))
