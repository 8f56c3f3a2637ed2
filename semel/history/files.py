"""Files of the store: sealed arrays that are memory-mapped, JSON with a checksum, and durable renames.

A sealed array file (``docs/formats/history.md``) is a 64-byte header, the values from byte 64 on, plain or packed, zero
padding to 8 bytes, then one CRC-32 for each 64 KiB of values. The header's own CRC covers the block CRCs too, so the
pair (size, header CRC) that the generation's manifest keeps identifies a file.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.history.errors import CorruptFile, GenerationGone, StoreError

if TYPE_CHECKING:
    from semel.history.packing import Packed

MAGIC = b"SEMELCOL"
FORMAT = 1
CODEC_PLAIN, CODEC_PACKED = 0, 1
BLOCK_BYTES = 1 << 16  # what a range of an object must be fetched with, to be checked; files say how much theirs is
# magic, format, codec, bytes a row, rows, bytes of values, bytes a checksum block, CRC of the block CRCs, padding,
# CRC of the 60 bytes before it
_HEADER = struct.Struct("<8sIIIQQIII12x")
HEADER_BYTES = 64


def write_array(path: Path, array: np.ndarray) -> dict[str, int]:
    """Write ``array`` (C order; first axis = rows) to ``path``, not yet durable; what the manifest keeps of it."""
    return write_pieces(path, [array], len(array), array.dtype, array.shape[1:])


def write_pieces(path: Path, pieces: Iterable[np.ndarray], rows: int, dtype: np.dtype, shape: tuple[int, ...],
                 packed: bool = False) -> dict[str, int]:
    """``write_array`` of [rows, *shape] values that come piece by piece; ``packed``: in blocks, of which each piece but
    the last has whole ones (``semel.history.packing``)."""
    if packed:
        from semel.history.packing import pack_pieces

        pieces = pack_pieces(pieces)
    checksums: list[int] = []
    size = crc = 0
    with open(path, "xb") as file:
        file.write(bytes(HEADER_BYTES))
        for piece in pieces:
            data = memoryview(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data if piece.size else b"")
            file.write(data)
            while data:
                part = data[: BLOCK_BYTES - size % BLOCK_BYTES]
                crc, size, data = zlib.crc32(part, crc), size + len(part), data[len(part) :]
                if size % BLOCK_BYTES == 0:
                    checksums.append(crc)
                    crc = 0
        if size % BLOCK_BYTES:
            checksums.append(crc)
        footer = bytes(-size % 8) + np.array(checksums, "<u4").tobytes()
        file.write(footer)
        codec = CODEC_PACKED if packed else CODEC_PLAIN
        head = _HEADER.pack(MAGIC, FORMAT, codec, _row_bytes(dtype, shape), rows, size, BLOCK_BYTES, zlib.crc32(footer),
                            0)
        seal = zlib.crc32(head)
        file.seek(0)
        file.write(head + struct.pack("<I", seal))
    return {"bytes": HEADER_BYTES + size + len(footer), "seal": seal}


def _row_bytes(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


def map_column(path: Path, entry: dict[str, int], dtype: Any, shape: tuple[int, ...] = ()) -> np.ndarray | Packed:
    """The read-only array [rows, *shape] in the file, or the column as kernels take it where it is packed; every block
    checked against its CRC (about 1 GB/s, once a file and handle). Raises CorruptFile naming the file and block,
    GenerationGone when the file is not there."""
    dtype = np.dtype(dtype)
    mapped, head = checked(path, entry)
    check_rows(head, dtype, shape, path)
    if head.codec == CODEC_PACKED:
        from semel.history.packing import view_packed

        try:
            return view_packed(np.frombuffer(mapped, np.uint8, head.count, HEADER_BYTES),
                               head.rows * head.width // dtype.itemsize)
        except ValueError as error:
            raise CorruptFile(f"{path}: {error}") from None
    return np.frombuffer(mapped, dtype, head.count // dtype.itemsize, HEADER_BYTES).reshape(head.rows, *shape)


def checked(path: Path, entry: dict[str, int]) -> tuple[mmap.mmap, Header]:
    """The mapped file and its header, every block checked against its CRC."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["bytes"]:
                raise CorruptFile(f"{path}: {size} bytes, its manifest says {entry['bytes']}")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise GenerationGone(f"{path} is missing") from None
    head = parse_header(mapped[:HEADER_BYTES], entry, path)
    stored = block_checksums(mapped[HEADER_BYTES + head.count :], head, path)
    data = memoryview(mapped)[HEADER_BYTES : HEADER_BYTES + head.count]
    for index, at in enumerate(range(0, head.count, head.block)):
        check_block(data[at : at + head.block], stored, index, head, path)
    return mapped, head


@dataclass(frozen=True)
class Header:
    """``count`` bytes of values, ``width`` a row, in checksum blocks of ``block`` bytes."""

    codec: int
    width: int
    rows: int
    count: int
    block: int
    footer_crc: int


def parse_header(head: bytes, entry: dict[str, int], path: Path | str) -> Header:
    """The first ``HEADER_BYTES`` of an array file. Raises CorruptFile, StoreError for a format that is not known."""
    if head[:8] != MAGIC:
        raise CorruptFile(f"{path}: not a column file (starts with {bytes(head[:8])!r})")
    _, version, codec, width, rows, count, block, footer_crc, _ = _HEADER.unpack(head[:-4])
    seal = zlib.crc32(head[:-4])
    if (seal,) != struct.unpack("<I", head[-4:]) or seal != entry["seal"]:
        raise CorruptFile(f"{path}: header does not match its checksum")
    if version != FORMAT or codec not in (CODEC_PLAIN, CODEC_PACKED):
        raise StoreError(f"{path}: format {version}, codec {codec}; this Semel reads format {FORMAT}, codecs 0 and 1")
    return Header(codec, width, rows, count, block, footer_crc)


def block_checksums(footer: bytes, head: Header, path: Path | str) -> np.ndarray:
    """The CRC of each block, from all that follows the values. Raises CorruptFile."""
    if zlib.crc32(footer) != head.footer_crc:
        raise CorruptFile(f"{path}: block checksums are damaged")
    return np.frombuffer(footer, "<u4", offset=-head.count % 8)


def check_block(data: memoryview | bytes, stored: np.ndarray, index: int, head: Header, path: Path | str) -> None:
    """Raises CorruptFile where block ``index`` is not what was written."""
    if zlib.crc32(data) != stored[index]:
        raise CorruptFile(f"{path}: block {index} (bytes {HEADER_BYTES + index * head.block} on) does not match its "
                          "checksum")


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


def sync(handle: int) -> None:
    """Force a file's bytes to the disk. macOS's fsync stops at the drive's cache, F_FULLFSYNC does not."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
    else:
        os.fsync(handle)


def sync_files(paths: Iterable[Path]) -> None:
    """``sync`` for many files, together: a file system commits them as one group, 10-20 times faster than in turn."""
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sync_folder, paths):
            pass


def sync_folder(path: Path) -> None:
    """Make names created in, renamed into or removed from the folder ``path`` durable (or a file's bytes)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        sync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Swap ``path`` for ``content``: a reader sees the old or the new file, a crash leaves one of them."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path, option: str) -> Iterator[Path]:
    """A folder to fill, hidden beside ``path``; renamed to it where the block ends well, removed where it does not.
    Raises FileExistsError, naming ``option``, where ``path`` is there and not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise FileExistsError(f"{path} exists already; remove it (rm -r {path}) or choose another {option}")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        yield scratch / path.name
        os.rename(scratch / path.name, path)  # also over an empty folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def dump_json(body: dict[str, Any]) -> bytes:
    """JSON whose last entry, ``checksum``, is the CRC-32 of all bytes before the comma that precedes it."""
    text = json.dumps(body, ensure_ascii=False, indent=1).removesuffix("\n}").encode()
    return text + f',\n "checksum": {zlib.crc32(text)}\n}}\n'.encode()


def parse_json(content: bytes, path: Path | str) -> dict[str, Any]:
    """The inverse of ``dump_json``; CorruptFile where text and checksum disagree."""
    try:
        text, _, tail = content.rpartition(b',\n "checksum": ')
        if tail != f"{zlib.crc32(text)}\n}}\n".encode():
            raise ValueError("checksum")
        return dict(json.loads(content))
    except ValueError:
        raise CorruptFile(f"{path}: not valid, or does not match its checksum") from None
