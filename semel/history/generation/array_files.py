"""Array files: sealed, memory-mapped.

A sealed array file (``docs/formats/history.md``) is a 64-byte header, the values from byte 64 on, plain, packed, or
packed and compressed, zero padding to 8 bytes, then one CRC-32 for each 64 KiB of values. The header's own CRC covers
the block CRCs too, so the pair (size, header CRC) that the generation's manifest keeps identifies a file.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa

from semel.history.durable import naming
from semel.history.errors import CorruptFile, GenerationGone, StoreError

if TYPE_CHECKING:
    from semel.history.kernels.packing import Packed

MAGIC = b"SEMELCOL"
FORMAT = 1
CODEC_PLAIN, CODEC_PACKED, CODEC_COLD = 0, 1, 2
Codec = Literal["packed", "plain", "cold"]
CODECS = get_args(Codec)
BLOCK_BYTES = 1 << 16  # what a range of an object must be fetched with, to be checked; files say how much theirs is
# magic, format, codec, bytes a row, rows, bytes of values as they are stored, bytes a checksum block, CRC of all after
# the values, bytes of the values decompressed (0 where they are not compressed), padding; the CRC of these 60 bytes
_HEADER = struct.Struct("<8sIIIQQIIQ8x")
HEADER_BYTES = 64
ZSTD_LEVEL = 1
"""Higher ones take 4 to 20 times as long on packed columns and gain nothing (``docs/results.md``)."""
SHRINKS = 0.95
"""A column whose first block stays above this part of its size under zstd is not compressed."""


def write_array(path: Path, array: np.ndarray) -> dict[str, int]:
    """Write ``array`` (C order; first axis = rows) to ``path``, not yet durable; what the manifest keeps of it."""
    return write_pieces(path, [array], len(array), array.dtype, array.shape[1:])


def write_pieces(path: Path, pieces: Iterable[np.ndarray], rows: int, dtype: np.dtype, shape: tuple[int, ...],
                 codec: Codec = "plain") -> dict[str, int]:
    """``write_array`` of [rows, *shape] values that come piece by piece. ``packed``: in blocks, of which each piece but
    the last has whole ones (``kernels.packing``). ``cold``: packed, and compressed too where that helps; the
    manifest then keeps ``decompressed``, the bytes of the packed values."""
    if codec != "plain":
        from semel.history.kernels.packing import pack_pieces

        pieces = pack_pieces(pieces)
    compressed = codec == "cold"
    checksums: list[int] = []
    sizes: list[int] = []
    count = 0
    with naming(path), open(path, "xb") as file:
        file.write(bytes(HEADER_BYTES))
        for block in _blocks(pieces):
            stored = block
            if compressed:
                frame = pa.Codec("zstd", ZSTD_LEVEL).compress(block, asbytes=True)
                compressed = len(sizes) > 0 or len(frame) < SHRINKS * len(block)
                stored = frame if compressed else block
            file.write(stored)
            checksums.append(zlib.crc32(stored))
            sizes.append(len(stored))
            count += len(block)
        compressed &= count > 0
        size = sum(sizes)
        footer = bytes(-size % 8) + np.array(checksums + (sizes if compressed else []), "<u4").tobytes()
        file.write(footer)
        number = CODEC_COLD if compressed else CODEC_PLAIN if codec == "plain" else CODEC_PACKED
        head = _HEADER.pack(MAGIC, FORMAT, number, _row_bytes(dtype, shape), rows, size, BLOCK_BYTES,
                            zlib.crc32(footer), count if compressed else 0)
        seal = zlib.crc32(head)
        file.seek(0)
        file.write(head + struct.pack("<I", seal))
    entry = {"bytes": HEADER_BYTES + size + len(footer), "seal": seal}
    return {**entry, "decompressed": count} if compressed else entry


def _blocks(pieces: Iterable[np.ndarray]) -> Iterator[memoryview | bytes]:
    """The bytes of all pieces, BLOCK_BYTES at a time."""
    left = b""
    for piece in pieces:
        data = memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data if piece.size else b"")
        if left:
            need = BLOCK_BYTES - len(left)
            left, data = left + data[:need], data[need:]
            if len(left) < BLOCK_BYTES:
                continue
            yield left
        whole = len(data) - len(data) % BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            yield data[at : at + BLOCK_BYTES]
        left = bytes(data[whole:])
    if left:
        yield left


def _row_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def map_column(path: Path, entry: dict[str, int], dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray | Packed:
    """The read-only array [rows, *shape] in the file, or the column as kernels take it where it is packed (decompressed
    into memory, where it is compressed); every block checked against its CRC (about 1 GB/s, once a file and handle).
    Raises CorruptFile naming the file and block, GenerationGone when the file is not there."""
    dtype = np.dtype(dtype)
    mapped, head, starts = checked(path, entry)
    check_rows(head, dtype, shape, path)
    if head.codec == CODEC_PLAIN:
        return np.frombuffer(mapped, dtype, head.count // dtype.itemsize, HEADER_BYTES).reshape(head.rows, *shape)
    from semel.history.kernels.packing import view_packed

    if head.codec == CODEC_PACKED:
        payload = np.frombuffer(mapped, np.uint8, head.count, HEADER_BYTES)
    else:
        payload = np.empty(head.count, np.uint8)
        data = memoryview(mapped)[HEADER_BYTES:]
        for index, at in enumerate(range(0, head.count, head.block)):
            block = decompressed(data[starts[index] : starts[index + 1]], index, head, path)
            payload[at : at + head.block] = np.frombuffer(block, np.uint8)
        payload.flags.writeable = False
    try:
        return view_packed(payload, head.rows * head.width // dtype.itemsize)
    except ValueError as error:
        raise CorruptFile(f"{path}: {error}") from None


def checked(path: Path, entry: dict[str, int]) -> tuple[mmap.mmap, Header, np.ndarray]:
    """The mapped file, its header, and where its blocks begin, every block checked against its CRC."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise CorruptFile(f"{path}: {size} bytes, its manifest says {entry['bytes']}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GenerationGone(f"{path} is missing") from None
    head = parse_header(mapped[:HEADER_BYTES], entry, path)
    checksums, starts = parse_footer(mapped[HEADER_BYTES + head.stored :], head, path)
    data = memoryview(mapped)[HEADER_BYTES:]
    for index in range(len(checksums)):
        check_block(data[starts[index] : starts[index + 1]], checksums, index, head, path)
    return mapped, head, starts


@dataclass(frozen=True)
class Header:
    """``count`` bytes of values, ``width`` a row where they are plain, in checksum blocks of ``block`` bytes.
    Compressed, they are ``stored`` bytes."""

    codec: int
    width: int
    rows: int
    stored: int
    block: int
    footer_crc: int
    count: int

    @property
    def blocks(self) -> int:
        return -(-self.count // self.block)


def parse_header(head: bytes, entry: dict[str, int], path: Path | str) -> Header:
    """The first ``HEADER_BYTES`` of an array file. Raises CorruptFile, StoreError for a format that is not known."""
    if head[:8] != MAGIC:
        raise CorruptFile(f"{path}: not a column file (starts with {bytes(head[:8])!r})")
    _, version, codec, width, rows, stored, block, footer_crc, count = _HEADER.unpack(head[:-4])
    seal = zlib.crc32(head[:-4])
    if (seal,) != struct.unpack("<I", head[-4:]) or seal != entry["seal"]:
        raise CorruptFile(f"{path}: header does not match its checksum")
    if version != FORMAT or codec not in (CODEC_PLAIN, CODEC_PACKED, CODEC_COLD):
        raise StoreError(f"{path}: format {version}, codec {codec}; this Semel reads format {FORMAT}, codecs 0 to 2")
    return Header(codec, width, rows, stored, block, footer_crc, count if codec == CODEC_COLD else stored)


def parse_footer(footer: bytes, head: Header, path: Path | str) -> tuple[np.ndarray, np.ndarray]:
    """(CRC of each block, [blocks + 1] int64 where each begins, from the first one on), from all that follows the
    values. Raises CorruptFile."""
    if zlib.crc32(footer) != head.footer_crc:
        raise CorruptFile(f"{path}: block checksums are damaged")
    words = np.frombuffer(footer, "<u4", offset=-head.stored % 8)
    starts = np.minimum(np.arange(head.blocks + 1) * head.block, head.count)
    if head.codec == CODEC_COLD:
        np.cumsum(words[head.blocks :], out=starts[1:])
    return words[: head.blocks], starts


def check_block(data: memoryview | bytes, checksums: np.ndarray, index: int, head: Header, path: Path | str) -> None:
    """Raises CorruptFile where block ``index`` is not what was written."""
    if zlib.crc32(data) != checksums[index]:
        raise CorruptFile(f"{path}: block {index} (bytes {HEADER_BYTES + index * head.block} on"
                          f"{', decompressed' if head.codec == CODEC_COLD else ''}) does not match its checksum")


def decompressed(frame: memoryview | bytes, index: int, head: Header, path: Path | str) -> pa.Buffer:
    """A block as it was before zstd. Raises CorruptFile."""
    size = min(head.block, head.count - index * head.block)
    try:
        return pa.decompress(frame, decompressed_size=size, codec="zstd")
    except (OSError, pa.ArrowInvalid) as error:
        raise CorruptFile(f"{path}: block {index} cannot be decompressed ({error})") from None


def check_rows(head: Header, dtype: np.dtype, shape: tuple[int, ...], path: Path | str) -> None:
    """Raises CorruptFile where the file does not hold rows of this type."""
    if head.width != _row_bytes(dtype, shape) or (head.codec == CODEC_PLAIN and head.width * head.rows != head.count):
        raise CorruptFile(f"{path}: {head.rows} rows of {head.width} bytes, expected rows of {dtype} {list(shape)}")


def write_strings(path: Path, values: list[bytes]) -> dict[str, dict[str, int]]:
    """UTF-8 strings as two sealed arrays, ``path.offsets`` (int64 [n + 1]) and ``path.bytes``; manifest entries by
    file name."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    blob = np.frombuffer(b"".join(values), np.uint8)
    return {
        f"{path.name}.offsets": write_array(path.with_name(f"{path.name}.offsets"), offsets),
        f"{path.name}.bytes": write_array(path.with_name(f"{path.name}.bytes"), blob),
    }


def split_strings(offsets: np.ndarray, blob: np.ndarray) -> list[bytes]:
    data, ends = blob.tobytes(), offsets.tolist()
    return [data[a:b] for a, b in pairwise(ends)]
