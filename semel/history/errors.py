"""What can go wrong with a store, one class each. All are ``StoreError``; messages name the file and the remedy."""


class StoreError(Exception):
    """Base of everything that a history store raises about itself (bad arguments are ValueError)."""

    def __str__(self) -> str:  # FileNotFoundError's own __str__ would win in the subclasses that mix it in
        return str(self.args[0]) if self.args else ""


class StoreNotFound(StoreError, FileNotFoundError):
    """There is no store at the path."""


class StoreExists(StoreError, FileExistsError):
    """There is a store at the path already."""


class StoreLocked(StoreError):
    """Another writer holds the store; the message names its process id."""


class WriterFenced(StoreError):
    """Another writer took the store over; what this one was about to append is not acknowledged, and it writes no
    more."""


class WriterUnavailable(StoreError, ConnectionError):
    """The writer server did not answer. Whether the append is in the store is unknown unless the message says so; to
    append it again is safe with a token."""


class PositionMoved(StoreError):
    """An append goes on from a position of its source that another append has left; nothing was appended."""


class VersionNotVisible(StoreError):
    """A pointer names a version that this handle cannot see, even after one refresh; or that lies after the version
    at which the handle is frozen."""


class NotCompacted(StoreError):
    """A read that asked for compacted events only names versions that are still in the log; the message gives their
    range."""


class CorruptFile(StoreError):
    """A file's bytes are not those that were written; the message names the file and the place."""


class GenerationGone(StoreError):
    """A compaction removed this generation while it was being opened. Internal: the reader retries with the new one."""


class Overtaken(Exception):
    """On object storage: the version that an append was to get is taken by a late write of the owner before.
    Internal: the writer reads that record and gives the append the next version."""
