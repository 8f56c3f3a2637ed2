"""Reading a log as it grows: what came since the last look, from a position that can be kept over restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from semel.examples.exposures import conform
from semel.examples.logs import ExposureLog, OutcomeLog
from semel.history.log.segments import SEGMENT_HEADER, read_records


class LogPosition(NamedTuple):
    """Behind a record: the number of its segment, the byte at which the next one begins, how many records of the
    segment came before, and which file it was: erasing users writes a segment anew, with as many records."""

    segment: int = 0
    offset: int = 0
    records: int = 0
    file: int = 0


BEGINNING = LogPosition()


class LogTail:
    """``read()`` gives the records of ``log`` since ``position``, each whole, with the position behind it. One process
    appends to the log meanwhile, or nobody; a segment that has a later one beside it is not appended to any more."""

    def __init__(self, log: ExposureLog | OutcomeLog, position: LogPosition = BEGINNING) -> None:
        self._log, self.position = log._log, position
        self._schema: pa.Schema | None = None

    def read(self) -> Iterator[tuple[pa.Table, LogPosition]]:
        """Tables in the schema of the log. Raises CorruptFile for a damaged record, ValueError for another log."""
        if self._schema is None:
            self._schema = self._log.stored_schema()
        if self._schema is None:
            return
        # The segments are listed first: one that is closed behind our back is read to its end the next time.
        numbers = [int(path.stem) for path in self._log.segments() if int(path.stem) >= self.position.segment]
        for number in numbers:
            path = Path(self._log.path) / f"{number:08d}.log"
            found = path.stat()
            if found.st_size < SEGMENT_HEADER:
                continue  # just made, or left by a process that was killed
            here = self.position if number == self.position.segment else LogPosition(number)
            again = here.file not in (0, found.st_ino)  # written anew: counted from its beginning
            offset, count = (SEGMENT_HEADER, 0) if again else (max(here.offset, SEGMENT_HEADER), here.records)
            for _, batch, end in read_records(path, offset):
                count += 1
                if again and count <= here.records:
                    continue
                self.position = LogPosition(number, end, count, found.st_ino)
                table = pa.Table.from_batches([batch])
                if table.schema != self._schema:
                    table = conform(table, self._schema, str(path))
                yield table, self.position
            if number != numbers[-1]:
                self.position = LogPosition(number + 1)
