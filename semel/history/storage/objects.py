"""A bucket's objects under one prefix, through obstore (S3, Google Cloud Storage, Azure, R2, MinIO): the few operations
that a store needs, with errors that name the object.

What an operation that failed did is known or not, and the classes say which: ``FileExistsError`` and ``Changed`` are
the storage's own refusal, ``FileNotFoundError`` and ``PermissionError`` too; any other failure (a connection that
broke, a server's error after all retries) is ``Unanswered``, after which nobody knows whether the object was written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from semel.history.errors import StoreError

T = TypeVar("T")
CONNECTIONS = 16
"""Requests of one call under way at a time."""


Tag = tuple[str | None, str | None]
"""What tells one content of an object from another: entity tag, version (which of them depends on the storage)."""


_used = False  # by this process or, where it was forked, by the one before
_lost = False


def _after_fork() -> None:
    global _lost
    _lost = _used


os.register_at_fork(after_in_child=_after_fork)


class Changed(Exception):
    """The object is no longer the one that was to be replaced."""


class Unanswered(StoreError, OSError):
    """The object storage did not answer in the end; whether it did what was asked is unknown."""


class Objects:
    """The objects whose names start with ``url``. Names here are relative to it. ``options``: keyword arguments of
    ``obstore.store.from_url``. Any number of threads may use it. Raises ValueError for a URL or options that obstore
    does not know."""

    near = False  # for the block cache

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ValueError(f"{url}: object storage needs obstore: pip install obstore ({error})") from None
        self.url = url.rstrip("/")
        self._obstore = obstore
        try:
            self._store: Any = from_url(self.url, **(options or {}))
        except (obstore.exceptions.BaseError, TypeError, ValueError) as error:
            raise ValueError(f"{url} cannot be opened: {_first_line(error)}") from None

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def get(self, name: str, unless: Tag | None = None) -> tuple[bytes, Tag] | None:
        """(content, tag); None where its tag still is ``unless``. Raises FileNotFoundError."""
        options: Any = {"if_none_match": unless[0]} if unless is not None and unless[0] else {}

        def get() -> tuple[bytes, Tag]:
            answer = self._obstore.get(self._store, name, options=options)
            return bytes(answer.bytes()), _tag(answer.meta)

        try:
            return self._ask(name, get)
        except self._obstore.exceptions.NotModifiedError:
            return None

    def tag(self, name: str) -> Tag:
        """The object's tag. Raises FileNotFoundError."""
        return self._ask(name, lambda: _tag(self._obstore.head(self._store, name)))

    def size(self, name: str) -> int:
        """In bytes. Raises FileNotFoundError."""
        return self._ask(name, lambda: int(self._obstore.head(self._store, name)["size"]))

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[Any]:
        """The bytes of several ranges, fetched together. Raises FileNotFoundError."""
        return self._ask(name, lambda: list(self._obstore.get_ranges(self._store, name, starts=starts, ends=ends,
                                                                     coalesce=0)))

    def put(self, name: str, content: bytes, replacing: Tag | None = None) -> Tag:
        """Write an object; its tag. Unless it is there (FileExistsError), or with ``replacing`` only where it has that
        tag (Changed)."""
        mode: Any = "create" if replacing is None else {
            key: value for key, value in zip(("e_tag", "version"), replacing, strict=True) if value is not None}
        try:
            return self._ask(name, lambda: _tag(self._obstore.put(self._store, name, content, mode=mode)))
        except self._obstore.exceptions.AlreadyExistsError:
            raise FileExistsError(f"{self.where(name)} is there already") from None
        except self._obstore.exceptions.PreconditionError:
            if replacing is None:
                raise FileExistsError(f"{self.where(name)} is there already") from None
            raise Changed(f"{self.where(name)} is not the one that was read") from None

    def upload(self, files: Mapping[str, Path]) -> None:
        """Files to objects of these names, in parts where they are large, ``CONNECTIONS`` at a time."""
        def upload(item: tuple[str, Path]) -> None:
            name, path = item
            self._ask(name, lambda: self._obstore.put(self._store, name, path))

        _each(upload, files.items())

    def download(self, files: Mapping[str, Path]) -> None:
        """Objects to files, a piece at a time. Raises FileNotFoundError."""
        def download(item: tuple[str, Path]) -> None:
            name, path = item

            def copy() -> None:
                with open(path, "wb") as file:
                    for piece in self._obstore.get(self._store, name).stream(min_chunk_size=1 << 20):
                        file.write(piece)

            self._ask(name, copy)

        _each(download, files.items())

    def entries(self, folder: str, after: str | None = None) -> list[tuple[str, int]]:
        """(name, bytes) of the objects in ``folder`` and below, by name; with ``after`` those behind that name."""
        def list_all() -> list[tuple[str, int]]:
            pages = self._obstore.list(self._store, folder, offset=after)
            return sorted((entry["path"], entry["size"]) for page in pages for entry in page)

        return self._ask(folder, list_all)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is removed already."""
        names = list(names)

        def delete() -> None:
            try:
                self._obstore.delete(self._store, names)
            except FileNotFoundError:  # some storages say so
                pass

        if names:
            self._ask(names[0], delete)

    def _ask(self, name: str, request: Callable[[], T]) -> T:
        global _used
        if _lost:  # obstore's threads stayed in the parent, so a request would never end
            raise StoreError(f"{self.where(name)}: this process was forked from one that had used object storage, so "
                             'it cannot; start processes with "spawn" or "forkserver"')
        _used = True
        errors = self._obstore.exceptions
        try:
            return request()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.where(name)} is missing ({_first_line(error)})") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError) as error:
            raise PermissionError(f"{self.where(name)}: access denied ({_first_line(error)})") from None
        except errors.NotSupportedError as error:
            raise StoreError(f"{self.where(name)}: this storage knows no conditional writes, which keep two writers "
                             f"apart ({_first_line(error)})") from None
        except (errors.GenericError, errors.JoinError, errors.InvalidPathError) as error:
            raise Unanswered(f"{self.where(name)}: {_first_line(error)}") from None


def _tag(found: Mapping[str, Any]) -> Tag:
    return found.get("e_tag"), found.get("version")


def gathered(function: Callable[[Any], T], items: Iterable[Any]) -> Iterator[T]:
    """``map`` with ``CONNECTIONS`` threads: results in order; raises what the first failing one raised."""
    items = list(items)
    if len(items) <= 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(min(CONNECTIONS, len(items)), "semel-objects") as pool:
        yield from pool.map(function, items)


def _each(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    for _ in gathered(function, items):
        pass


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:300]
