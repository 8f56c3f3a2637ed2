"""Event keys: which events were accepted before, so that a client may send an event again without it counting twice.

Events and keys lie in two files, and a crash may come between them. So a group of events is first written here, whole,
as an intent with a token (write-ahead); then it is appended to the store under that token. After a crash the last
intent is appended once more under its token, which the store ignores if it has it. An acknowledged event is therefore
in the store and its key is known; an event that was not acknowledged may be in the store, and its key is then known.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from semel.examples.recent_keys import DAY_US, DIGEST_BYTES, REMEMBERED, RecentKeys
from semel.history import SegmentWriter, read_segments

SEGMENT_BYTES = 16 << 20
_COLUMN = "__event_key"
_DIGEST = pa.binary(DIGEST_BYTES)
FORMAT_VERSION = 1


def event_digest(user_id: int | str, key: str) -> bytes:
    """16 bytes for one user's event key: keys of different users never meet."""
    kind = "s" if isinstance(user_id, str) else "i"
    text = f"{kind}{user_id}".encode()
    return blake2b(len(text).to_bytes(4, "little") + text + key.encode(), digest_size=DIGEST_BYTES).digest()


class EventKeys:
    """The keys of the last ``window_us`` (24 h), at most ``capacity`` (1,000,000, the oldest go first), in ``folder``.

    One writer. ``pending``: the intent that may not be in the store yet, as (token, events), or None; the owner appends
    it before anything else and then calls ``settle``. Raises CorruptFile for damage, ValueError for a format that this
    version does not know.
    """

    def __init__(self, folder: str | Path, now: int, window_us: int = DAY_US, capacity: int = REMEMBERED,
                 segment_bytes: int = SEGMENT_BYTES):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._window, self._segment_bytes = window_us, segment_bytes
        self._known = RecentKeys(capacity, window_us)
        self._ends: dict[Path, int] = {}  # newest time in each segment, for their removal
        self._writer: SegmentWriter | None = None
        self.pending: tuple[str, pa.Table] | None = None
        self._load()
        self._forget(now)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def __len__(self) -> int:
        return len(self._known)

    def known(self, digests: Sequence[bytes | None]) -> list[bool]:
        """[n] of each whether it was accepted before; None was not."""
        return self._known.known(digests)

    def intend(self, token: str, events: pa.Table, digests: Sequence[bytes | None], now: int) -> None:
        """Make durable that ``events`` (with a digest or None each) will be appended under ``token``."""
        if self.pending is not None:
            raise RuntimeError("an earlier intent is not settled")
        batch = events.append_column(_COLUMN, pa.array(digests, _DIGEST))
        self._segment(now).append(batch, {"format": FORMAT_VERSION, "token": token, "at": now})
        self.pending = (token, events)
        self._known.add(digests, now)
        self._forget(now)

    def settle(self) -> None:
        """The pending intent is in the store."""
        self.pending = None

    def withdraw(self, digests: Sequence[bytes | None], now: int) -> None:
        """The store refused the pending intent for what it contains: it will never be appended, its keys are free."""
        if self.pending is None:
            return
        token, events = self.pending
        self._segment(now).append(events.slice(0, 0), {"format": FORMAT_VERSION, "withdrawn": token, "at": now})
        self.pending = None
        self._known.discard(digests)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _segment(self, now: int) -> SegmentWriter:
        if self._writer is not None and self._writer.size >= self._segment_bytes:
            self.close()
        if self._writer is None:
            number = max((int(path.stem) for path in self._ends), default=0) + 1
            path = self.folder / f"{number:08d}.log"
            self._writer = SegmentWriter(path)
            self._ends[path] = now
        self._ends[self._writer.path] = now
        return self._writer

    def _load(self) -> None:
        paths = sorted(path for path in self.folder.glob("*.log") if path.stem.isdigit())
        withdrawn: dict[str, list[bytes | None]] = {}
        for path in paths:
            self._ends[path] = 0
            for metadata, batch in read_segments(path):
                if metadata.get("format") != FORMAT_VERSION:
                    raise ValueError(f"{path}: event keys in format {metadata.get('format')!r}, this version reads "
                                     f"{FORMAT_VERSION}")
                self._ends[path] = at = metadata["at"]
                if "withdrawn" in metadata:
                    self._known.discard(withdrawn.pop(metadata["withdrawn"], []))
                    self.pending = None
                    continue
                table = pa.Table.from_batches([batch])
                digests = table[_COLUMN].to_pylist()
                self.pending = (metadata["token"], table.drop_columns([_COLUMN]))
                withdrawn = {metadata["token"]: digests}
                self._known.add(digests, at)

    def _forget(self, now: int) -> None:
        self._known.forget(now)
        oldest = now - self._window
        paths = sorted(self._ends)
        for path in paths[:-1]:  # the last one holds the intent that a restart looks at
            if self._ends[path] < oldest:
                path.unlink(missing_ok=True)
                del self._ends[path]
