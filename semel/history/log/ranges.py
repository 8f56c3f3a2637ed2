"""Where events lie in the log: what a tail keeps of them until somebody reads them, and what a compaction reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from semel.history.errors import GenerationGone
from semel.history.log.records import appends_of, versions_of
from semel.history.log.segments import read_records


class Range(Protocol):
    """``rows`` events of the versions ``first`` to ``last``, as they lie in the log, where they never change."""

    @property
    def rows(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...

    def joined(self, other: Any) -> Any:
        """This range and ``other`` as one, or None where ``other`` does not follow it."""

    def read(self) -> Iterator[tuple[pa.RecordBatch, int | np.ndarray]]:
        """(batch, its version or [rows] versions) of each record, checked against its CRC. Raises CorruptFile, and
        GenerationGone where a compaction has removed it: the next generation holds its events."""


PlaceOf = Callable[[int, int, int], Range]
"""Makes the range of a record that was just read or written, of its rows, first and last version."""

Take = Callable[[dict[str, Any], pa.RecordBatch, Any, PlaceOf], None]
"""What is done with a record: its JSON, its batch, where it was read, what makes its range."""


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
        if self.path != other.path or self.end != other.start:
            return None
        return replace(self, end=other.end, rows=self.rows + other.rows, last=other.last)

    def read(self) -> Iterator[tuple[pa.RecordBatch, int | np.ndarray]]:
        try:
            for metadata, batch, _ in read_records(self.path, self.start, sealed=self.end):
                yield batch, versions_in(metadata, batch)
        except FileNotFoundError:
            raise GenerationGone(f"{self.path} is missing") from None


def versions_in(metadata: dict[str, Any], batch: pa.RecordBatch) -> int | np.ndarray:
    """The version of a record's events, or [rows] versions."""
    appends = appends_of(metadata, batch.num_rows)
    return appends[-1].version if len(appends) == 1 else versions_of(appends)


def extended(ranges: tuple[Range, ...], more: Range) -> tuple[Range, ...]:
    """``ranges`` and the one that follows them."""
    whole = ranges[-1].joined(more) if ranges else None
    return (*ranges, more) if whole is None else (*ranges[:-1], whole)
