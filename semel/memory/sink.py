"""Where a log of deltas lies: named records that are written once, each whole or not at all.

A folder, object storage through obstore (S3, Google Cloud Storage, Azure: any URL that it knows), a Redis or Valkey
server (``semel.memory.redis_sink``), or NATS JetStream (``semel.memory.nats_sink``).
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

from semel.memory import nats_sink, redis_sink


class Sink(Protocol):
    """Names have ``/`` in them. Any number of processes may read while one writes."""

    url: str

    def create(self, name: str, content: bytes) -> None:
        """FileExistsError where there is such a record; OSError where the sink does not answer (it may exist then)."""
        ...

    def read(self, name: str) -> bytes:
        """FileNotFoundError where there is none."""
        ...

    def names(self, prefix: str = "") -> list[str]:
        """Of the records below a folder (``prefix`` ends in ``/`` or is empty), sorted."""
        ...

    def remove(self, name: str) -> None:
        """Nothing happens where there is none."""
        ...


class FolderSink:
    """Records are files under ``path``, which appear in one step, by a link from a hidden one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.url = str(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{path} is a file; a log of deltas is a folder, name another path")

    def create(self, name: str, content: bytes) -> None:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".part-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, target)
        finally:
            os.unlink(temporary)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def names(self, prefix: str = "") -> list[str]:
        folder = self.path / prefix
        if not folder.is_dir():
            return []
        found = []
        for below, folders, files in os.walk(folder):
            folders[:] = [one for one in folders if not one.startswith(".")]
            found += [str((Path(below) / file).relative_to(self.path)) for file in files if not file.startswith(".")]
        return sorted(found)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


class ObjectSink:
    """Records are objects under ``url``; creating one is a single conditional put."""

    def __init__(self, url: str) -> None:
        try:
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ValueError(f"{url}: object storage needs obstore: pip install obstore ({error})") from None
        self.url = url
        try:
            self._store: Any = from_url(url)
        except Exception as error:
            raise ValueError(f"{url}: {_said(error)}") from None

    def create(self, name: str, content: bytes) -> None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        try:
            obstore.put(self._store, name, content, mode="create")
        except (AlreadyExistsError, PreconditionError):
            raise FileExistsError(f"{self.url}/{name} exists already") from None
        except BaseError as error:
            raise OSError(f"{self.url}/{name}: {_said(error)}") from error

    def read(self, name: str) -> bytes:
        import obstore
        from obstore.exceptions import BaseError

        try:
            return bytes(obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            raise
        except BaseError as error:
            raise OSError(f"{self.url}/{name}: {_said(error)}") from error

    def names(self, prefix: str = "") -> list[str]:
        import obstore
        from obstore.exceptions import BaseError

        try:
            return sorted(item["path"] for part in obstore.list(self._store, prefix.rstrip("/") or None)
                          for item in part)
        except BaseError as error:
            raise OSError(f"{self.url}/{prefix}: {_said(error)}") from error

    def remove(self, name: str) -> None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            pass
        except BaseError as error:
            raise OSError(f"{self.url}/{name}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Without the structures of the client that obstore prints below its message."""
    return str(error).partition("\n")[0]


_OBJECTS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https", "memory")


def open_sink(url: str | Path) -> Sink:
    """A folder for a path (or ``file://``), object storage or a server for a URL. ValueError for another scheme."""
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return FolderSink(text)
    if scheme == "file":
        return FolderSink(rest)
    if scheme in _OBJECTS:
        return ObjectSink(text)
    if scheme in redis_sink.SCHEMES:
        return redis_sink.RedisSink(text)
    if scheme in nats_sink.SCHEMES:
        return nats_sink.NatsSink(text)
    raise ValueError(f"{text}: unknown scheme {scheme!r}; give a folder, or one of "
                     f"{', '.join([*_OBJECTS, *redis_sink.SCHEMES, *nats_sink.SCHEMES])}")
