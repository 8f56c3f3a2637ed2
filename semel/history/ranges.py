"""Where events lie in the log: what a tail keeps of them until somebody reads them, and what a compaction reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from semel.history.errors import GenerationGone
from semel.history.log import read_records
from semel.history.records import appends_of, versions_of


@dataclass(frozen=True)
class LogRange:
    """Records that follow one another in a segment: its bytes ``start`` to ``end``, with ``rows`` events of the
    versions ``first`` to ``last``. These bytes never change."""

    path: Path
    start: int
    end: int
    rows: int
    first: int
    last: int

    def joined(self, other: LogRange) -> LogRange | None:
        """This range and ``other`` as one, or None where ``other`` does not follow it."""
        if self.path != other.path or self.end != other.start:
            return None
        return replace(self, end=other.end, rows=self.rows + other.rows, last=other.last)

    def read(self) -> Iterator[tuple[pa.RecordBatch, int | np.ndarray]]:
        """(batch, its version or [rows] versions) of each record, checked against its CRC. Raises CorruptFile, and
        GenerationGone where a compaction has removed the segment: the next generation holds its events."""
        try:
            for metadata, batch, _ in read_records(self.path, self.start, sealed=self.end):
                appends = appends_of(metadata, batch.num_rows)
                yield batch, appends[-1].version if len(appends) == 1 else versions_of(appends)
        except FileNotFoundError:
            raise GenerationGone(f"{self.path} is missing") from None


def extended(ranges: tuple[LogRange, ...], more: LogRange) -> tuple[LogRange, ...]:
    """``ranges`` and the one that follows them."""
    whole = ranges[-1].joined(more) if ranges else None
    return (*ranges, more) if whole is None else (*ranges[:-1], whole)
