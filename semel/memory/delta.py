"""One record of the log: what changed in a memory, or all of it (a snapshot), as bytes that say whether they are whole.

    0   8 bytes   b"SEMELMEM"
    8   uint32    format version, 1
    12  uint32    CRC-32 of the payload
    16  uint64    length of the payload
    24  payload   safetensors: ``key``, ``step``, ``written``, ``tower`` [N] int64 and ``vector`` [N, dim] float32 of
                  rows that were written, ``gone`` [M] int64 of keys that left; metadata: the fields of ``Place``

A record of kind "model" (dense weights, a version of them) holds ``description`` (JSON) and ``weights`` (safetensors)
instead, both uint8 [bytes]. All little-endian. A record is read whole or refused.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from semel.memory.table import Changes, Rows

FORMAT_VERSION = 1
_MAGIC = b"SEMELMEM"
_HEADER = struct.Struct("<8sIIQ")
_COLUMNS = {"key": "keys", "vector": "vectors", "step": "step", "written": "written", "tower": "tower"}


class CorruptDelta(ValueError):
    """A record that was cut, altered, or is not what its name says."""


@dataclass(frozen=True)
class Place:
    """Where a record belongs. ``kind``: a delta is what changed since ``sequence - 1``, a snapshot all rows after
    ``sequence``, a model the dense weights that go with them. ``step``: of training; ``published``: microseconds since
    1970, by the publisher's clock."""

    kind: Literal["delta", "snapshot", "model"]
    epoch: int
    shard: int
    sequence: int
    step: int = 0
    published: int = 0

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.epoch:08d}/{self.kind}-{self.shard:04d}-{self.sequence:012d}"


def encode(place: Place, changes: Changes) -> bytes:
    rows = changes.rows
    tensors = {name: getattr(rows, column).contiguous() for name, column in _COLUMNS.items()}
    return _record(place, {**tensors, "gone": changes.gone})


def encode_model(place: Place, description: bytes, weights: bytes) -> bytes:
    """``description`` says what the ``weights`` are of; both are the caller's."""
    return _record(place, {name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
                           if content else torch.empty(0, dtype=torch.uint8)
                           for name, content in (("description", description), ("weights", weights))})


def _record(place: Place, tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save

    payload = save(tensors, {name: str(value) for name, value in asdict(place).items()})
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, zlib.crc32(payload), len(payload)) + payload


def decode(content: bytes, name: str) -> tuple[Place, Changes]:
    """The record in ``content``, which was found as ``name``. Raises CorruptDelta naming it."""
    place, tensors = _tensors(content, name)
    try:
        changes = Changes(Rows(**{column: tensors[key] for key, column in _COLUMNS.items()}), tensors["gone"])
    except KeyError as error:
        raise CorruptDelta(f"{name}: not in the layout of a record ({error})") from None
    _check(changes, name)
    return place, changes


def decode_model(content: bytes, name: str) -> tuple[Place, bytes, bytes]:
    """The record of kind "model" in ``content``: its place, description and weights. Raises CorruptDelta."""
    place, tensors = _tensors(content, name)
    try:
        description, weights = (tensors[key].numpy().tobytes() for key in ("description", "weights"))
    except KeyError as error:
        raise CorruptDelta(f"{name}: not in the layout of a record of weights ({error})") from None
    return place, description, weights


def _tensors(content: bytes, name: str) -> tuple[Place, dict[str, torch.Tensor]]:
    import json

    from safetensors import SafetensorError
    from safetensors.torch import load

    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise CorruptDelta(f"{name}: no record of a memory ({len(content)} bytes)")
    _, version, crc, length = _HEADER.unpack_from(content)
    if version != FORMAT_VERSION:
        raise CorruptDelta(f"{name}: format version {version}; this version of semel reads {FORMAT_VERSION}")
    payload = content[_HEADER.size:]
    if len(payload) != length:
        raise CorruptDelta(f"{name}: cut short or too long: {len(payload)} of {length} bytes")
    if zlib.crc32(payload) != crc:
        raise CorruptDelta(f"{name}: its checksum does not fit, some of its bytes were altered")
    try:
        tensors = load(payload)
        size = int.from_bytes(payload[:8], "little")
        fields = json.loads(payload[8:8 + size])["__metadata__"]
        place = Place(kind=fields["kind"], **{key: int(fields[key]) for key in asdict(Place("delta", 0, 0, 0))
                                              if key != "kind"})
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptDelta(f"{name}: not in the layout of a record ({error})") from None
    if place.name != name:
        raise CorruptDelta(f"{name}: holds the record {place.name}")
    return place, tensors


def _check(changes: Changes, name: str) -> None:
    rows = changes.rows
    vectors = [rows.keys, rows.step, rows.written, rows.tower, changes.gone]
    if any(v.dtype != torch.int64 or v.dim() != 1 for v in vectors) or len({len(v) for v in vectors[:4]}) != 1 or \
            rows.vectors.dtype != torch.float32 or rows.vectors.dim() != 2 or len(rows.vectors) != len(rows):
        raise CorruptDelta(f"{name}: its columns do not fit each other")
