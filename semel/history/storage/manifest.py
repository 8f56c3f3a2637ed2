"""The manifest: the one file that says what a store consists of. Swapped atomically; everything else is immutable or
append-only."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from semel.history.durable import dump_json, parse_json, replace_file
from semel.history.errors import CorruptFile, StoreError, StoreNotFound
from semel.history.schema import EventSchema

MAGIC = "semel-history"
FORMAT = 1
NAME = "manifest.json"
HASH = "splitmix64"  # of int64 ids; strings: FNV-1a 64 of the UTF-8 bytes, then splitmix64


@dataclass(frozen=True)
class Segment:
    """A sealed log segment: complete, never written again."""

    number: int
    bytes: int
    last_version: int


@dataclass(frozen=True)
class Manifest:
    """``generation``: its number, 0 for none; ``generation_seal``: the checksum of its ``generation.json``;
    ``compacted`` [shards]: the highest version in the generation; ``versions`` [shards]: the highest version when the
    manifest was written (later ones are in the active segment); ``sealed`` and ``active``: the log. On object storage
    also ``folder``: the generation's name, and ``writer``: the handle that took the store over last."""

    schema: EventSchema
    shards: int
    generation: int
    generation_seal: int
    compacted: tuple[int, ...]
    versions: tuple[int, ...]
    sealed: tuple[Segment, ...]
    active: int
    folder: str = ""
    writer: str = ""

    @classmethod
    def new(cls, schema: EventSchema, shards: int) -> Manifest:
        return cls(schema, shards, 0, 0, (0,) * shards, (0,) * shards, (), 1)

    def replace(self, **changes: Any) -> Manifest:
        return replace(self, **changes)

    @property
    def compacted_version(self) -> int:
        """The highest version in the generation (the local writer fills all shards from one counter)."""
        return max(self.compacted)

    @property
    def first_segment(self) -> int:
        return self.sealed[0].number if self.sealed else self.active

    def content(self) -> bytes:
        body: dict[str, Any] = {
            "magic": MAGIC, "format": FORMAT, "hash": HASH, "shards": self.shards, **self.schema.to_json(),
            "generation": self.generation, "generation_seal": self.generation_seal,
            "compacted": list(self.compacted), "versions": list(self.versions),
            "log": {
                "sealed": [{"segment": s.number, "bytes": s.bytes, "last_version": s.last_version}
                           for s in self.sealed],
                "active": self.active,
            },
        }
        body |= {key: value for key, value in (("folder", self.folder), ("writer", self.writer)) if value}
        return dump_json(body)

    def save(self, folder: Path) -> None:
        replace_file(folder / NAME, self.content())


def read_manifest(folder: Path) -> bytes:
    """The manifest's bytes; StoreNotFound where there is no store."""
    try:
        return (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise StoreNotFound(f"no history store at {folder}: the folder does not exist") from None
        raise StoreNotFound(f"no history store at {folder}: there is no {NAME} in it") from None


def parse_manifest(content: bytes, folder: Path | str) -> Manifest:
    path = f"{folder}/{NAME}"
    body = parse_json(content, path)
    if body.get("magic") != MAGIC:
        raise StoreNotFound(f"{path} does not belong to a history store")
    if body["format"] != FORMAT or body["hash"] != HASH:
        raise StoreError(f"{path}: store format {body['format']} with hash {body['hash']}; this Semel reads format "
                         f"{FORMAT} with {HASH}")
    try:
        sealed = tuple(Segment(s["segment"], s["bytes"], s["last_version"]) for s in body["log"]["sealed"])
        return Manifest(EventSchema.from_json(body), body["shards"], body["generation"], body["generation_seal"],
                        tuple(body["compacted"]), tuple(body["versions"]), sealed, body["log"]["active"],
                        body.get("folder", ""), body.get("writer", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path}: {error}") from None


def segment_path(folder: Path, number: int) -> Path:
    return folder / "log" / f"{number:08d}.log"


def generation_path(folder: Path, number: int) -> Path:
    return folder / "generations" / f"{number:08d}"


def local_path(url: str | os.PathLike[str]) -> Path:
    """The folder that a path or file:// URL names; ValueError for another scheme."""
    text = os.fspath(url)
    if "://" not in text and not text.startswith("file:/"):  # a file:// URL that was taken for a path
        return Path(text)
    parts = urlsplit(text)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(f"{text!r} is no local folder (a path or file:// URL)")
    return Path(unquote(parts.path))
