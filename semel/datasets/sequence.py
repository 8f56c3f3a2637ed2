"""Plain sequences, one user a line: ``user item item ...``, separated by blanks. They have an order but no time.

The event time is the event's position in its user's history, counted from 1, in **microseconds**: enough for as-of
reads and leave-one-out, no base for splits by date or for features of time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semel.datasets.dataset import Tables, build_events
from semel.datasets.delimited import require_file
from semel.datasets.ids import compact_ids
from semel.datasets.impressions import codes_of


def read_sequences(path: Path) -> Tables:
    """The events of a sequence file. A user may have several lines (also one a pair): they follow on each other."""
    require_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8 text") from None
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        raise ValueError(f"{path}: the file is empty")
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pa.array(lines, pa.large_string())))
    offsets = words.offsets.to_numpy()
    values = words.values.cast(pa.string())
    lengths = np.diff(offsets) - 1  # the first word is the user
    short = np.flatnonzero(lengths < 1)
    if len(short):
        raise ValueError(f"{path}, line {short[0] + 1}: a user without items ({lines[short[0]][:40]!r})")
    is_item = np.ones(len(values), dtype=bool)
    is_item[offsets[:-1]] = False
    owner = np.repeat(np.arange(len(lines)), lengths)
    users = compact_ids(values.take(pa.array(offsets[:-1]))).take(pa.array(owner))
    items = compact_ids(values.filter(pa.array(is_item)))
    events = build_events({"user_id": users, "item_id": items, "event_time": pa.array(positions(users))}, str(path))
    return Tables(events, notes=("no times in this layout: the event time is the position, in microseconds",))


def positions(users: pa.Array) -> np.ndarray:
    """[N] int64: which event of its user each row is, from 1, in row order."""
    codes = codes_of(pa.chunked_array([users]))
    order = np.argsort(codes, kind="stable")
    ranked = codes[order]
    first = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    out = np.empty(len(codes), dtype=np.int64)
    out[order] = np.arange(1, len(codes) + 1) - np.repeat(first, np.diff(np.r_[first, len(codes)]))
    return out
