"""Packed columns: blocks of 128 values, each stored with as many bits as its own range needs.

Frame of reference (Zukowski et al., "Super-Scalar RAM-CPU Cache Compression", ICDE 2006) with a common divisor: value i
of a block is ``base + scale * bits[i]``, all of the block's ``bits`` equally wide. Times of whole seconds, floats that
hold small integers, flags and constant columns become narrow; and since the place of a value follows from its number,
one value or a range is read without what lies before it. Arithmetic is modulo 2**64, so every bit pattern survives.

The bits lie in four lanes of 32-bit words (two of 64-bit words where they are wider than 32), value i in lane i mod 4,
so that one vector instruction works on four values (Lemire, Boytsov, "Decoding billions of integers per second through
vectorization", 2015).

Kernels take a column as it lies in memory: a plain array, or the tuple (bytes, starts) of a packed one. ``value_at``
and ``copy_range`` read either; ``unpack_range`` takes addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numba
import numpy as np
from numba.extending import overload

from semel.history.kernels import kernel
from semel.history.kernels.loads import (
    copy_values,
    load8,
    load32,
    load64,
    row_of_2,
    row_of_2_scaled,
    row_of_4,
    row_of_4_scaled,
)

BLOCK = 128
_SHIFT, _INSIDE = np.uint64(7), np.uint64(BLOCK - 1)
_0, _1, _2, _3, _4, _5, _6, _8, _15, _31, _32, _63, _64 = (
    np.uint64(n) for n in (0, 1, 2, 3, 4, 5, 6, 8, 15, 31, 32, 63, 64))

Packed = tuple[np.ndarray, np.ndarray]
"""(the payload's blocks as bytes, [blocks + 1] uint32 where each block begins)."""


def pack(values: np.ndarray) -> np.ndarray:
    """Flat values of any fixed width -> uint8 payload: the blocks, 16 or more zero bytes up to a multiple of 8, then
    [blocks + 1] uint32 offsets of the blocks. Raises ValueError beyond 4 GiB."""
    flat = values.reshape(-1)
    kind = "u" if flat.dtype.kind in "ub" else "i"  # a number stays itself; a float is its bits
    words = flat.view(f"{kind}{flat.dtype.itemsize}").astype(f"{kind}8", copy=False).view(np.uint64)
    blocks = -(-len(words) // BLOCK)
    starts = np.zeros(blocks + 1, np.int64)
    base, scale, width = (np.empty(blocks, np.uint64) for _ in range(3))
    _measure(words, base, scale, width, starts)
    if starts[-1] >= 1 << 32:
        raise ValueError(f"a shard's column of {len(words)} values packs to {starts[-1]} bytes, 4 GiB at most: "
                         "create the store with more shards")
    out = np.zeros(_before_directory(int(starts[-1])), np.uint8)
    _write(words, base, scale, width, starts, out)
    return np.concatenate([out, starts.astype("<u4").view(np.uint8)])


def pack_pieces(pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The payload that ``pack`` makes of all pieces together, part by part. Each piece but the last one has a multiple
    of BLOCK values."""
    end = 0
    starts = [np.zeros(1, "<u4")]
    for piece in pieces:
        payload = pack(piece)
        directory = payload[len(payload) - 4 * (-(-piece.size // BLOCK) + 1) :].view("<u4")
        size = int(directory[-1])
        if end + size >= 1 << 32:
            raise ValueError("a shard's column packs to more than 4 GiB: create the store with more shards")
        starts.append(directory[1:] + np.uint32(end))
        end += size
        yield payload[:size]
    yield np.zeros(_before_directory(end) - end, np.uint8)
    yield np.concatenate(starts).view(np.uint8)


def view_packed(payload: np.ndarray, values: int) -> Packed:
    """The column in ``payload`` (uint8, 8-byte aligned). Raises ValueError where it cannot be one of ``values``
    values: after this check no read leaves the payload."""
    data, starts = view_directory(payload, values)
    if not _fits(data, starts, values):
        raise ValueError("blocks do not lie where they should")
    return data, starts


def directory_at(size: int, values: int) -> int:
    """Where the directory begins in a payload of ``size`` bytes. Raises ValueError where that cannot be one of
    ``values`` values."""
    end = size - 4 * (-(-values // BLOCK) + 1)
    if end < 16 or end % 8:
        raise ValueError(f"{size} bytes cannot hold {values} packed values")
    return end


def view_directory(payload: np.ndarray, values: int) -> Packed:
    """``view_packed`` where only the directory is there yet: blocks are not looked at."""
    end = directory_at(len(payload), values)
    data, starts = payload[:end], payload[end:].view("<u4")
    if starts[0] or (np.diff(starts.astype(np.int64)) < 2).any() or _before_directory(int(starts[-1])) != end:
        raise ValueError("blocks do not lie where they should")
    return data, starts


def unpack(column: Packed, values: int, dtype: Any) -> np.ndarray:
    """All values (read-only)."""
    out = np.empty(values, dtype)
    copy_all(column, values, out.view(f"u{out.dtype.itemsize}"))
    out.flags.writeable = False
    return out


def _before_directory(end: int) -> int:
    return -(-end // 8) * 8 + 16  # reading the word after a lane's last one, or eight bytes of a header, stays inside


@kernel
def _size(width, count):
    """Bytes of ``count`` values of ``width`` bits: whole words of every lane."""
    if width <= 32:
        return 16 * (((count + 3) // 4 * width + 31) // 32)
    return 16 * (((count + 1) // 2 * width + 63) // 64)


@kernel
def _measure(values, base, scale, width, starts):
    """Each block's least value, common divisor, width in bits, and place."""
    for block in range(len(base)):
        first, stop = block * BLOCK, min((block + 1) * BLOCK, len(values))
        low = np.int64(values[first])
        for i in range(first + 1, stop):
            low = min(low, np.int64(values[i]))
        least = np.uint64(low)
        most, divisor = _0, _0
        for i in range(first, stop):
            above = values[i] - least
            most = max(most, above)
            if divisor != _0 and above % divisor == _0:
                continue
            while above != _0:  # Euclid
                divisor, above = above, divisor % above
            if divisor == _1:
                for j in range(i + 1, stop):
                    most = max(most, values[j] - least)
                break
        divisor = max(divisor, _1)
        bits = _bits(most // divisor)
        base[block], scale[block], width[block] = least, divisor, bits
        size = 2 + _bytes_of(least) + (_bytes_of(divisor) if divisor > _1 else 0)
        starts[block + 1] = starts[block] + size + _size(np.int64(bits), stop - first)


@kernel
def _bits(value):
    bits = _0
    while value != _0:
        value >>= _1
        bits += _1
    return bits


@kernel
def _bytes_of(value):
    """Bytes that hold ``value``, the upper ones being the sign's: 8 for what does not fit 7."""
    size = _0
    while size < _8 and _widen(value, size) != value:
        size += _1
    return np.int64(size)


@kernel
def _widen(value, size):
    """The lowest ``size`` bytes of ``value``, sign extended."""
    if size == _0:
        return _0
    drop = _64 - _8 * size
    return np.uint64(np.int64(value << drop) >> np.int64(drop))


@kernel
def _write(values, base, scale, width, starts, data):
    lanes = np.zeros(2 * BLOCK + 2, np.uint64)
    halves, content = lanes.view(np.uint32), lanes.view(np.uint8)
    for block in range(len(base)):
        first, stop = block * BLOCK, min((block + 1) * BLOCK, len(values))
        at, bits = starts[block], width[block]
        base_bytes = _bytes_of(base[block])
        scale_bytes = _bytes_of(scale[block]) if scale[block] > _1 else 0
        data[at] = bits
        data[at + 1] = base_bytes | (scale_bytes << 4)
        at += 2
        for i in range(base_bytes):
            data[at + i] = (base[block] >> np.uint64(8 * i)) & np.uint64(255)
        at += base_bytes
        for i in range(scale_bytes):
            data[at + i] = (scale[block] >> np.uint64(8 * i)) & np.uint64(255)
        at += scale_bytes
        lanes[:] = 0
        for i in range(stop - first):
            value = (values[first + i] - base[block]) // scale[block]
            if bits <= _32:
                bit = np.uint64(i >> 2) * bits
                word, shift = (bit >> _5 << _2) + np.uint64(i & 3), bit & _31
                halves[word] |= np.uint32(value << shift)
                halves[word + _4] |= np.uint32(value >> (_32 - shift))
            else:
                bit = np.uint64(i >> 1) * bits
                word, shift = (bit >> _6 << _1) + np.uint64(i & 1), bit & _63
                lanes[word] |= value << shift
                lanes[word + _2] |= (value >> _1) >> (_63 - shift)
        for i in range(starts[block + 1] - at):
            data[at + i] = content[i]  # a slice would compile for longer


@kernel
def _fits(data, starts, values):
    """Whether each block's header agrees with its size."""
    if starts[0] != 0:
        return False
    for block in range(len(starts) - 1):
        at, end = np.int64(starts[block]), np.int64(starts[block + 1])
        if end < at + 2 or end > len(data):
            return False
        count = min(BLOCK, values - block * BLOCK)
        base_bytes, scale_bytes = np.int64(data[at + 1] & 15), np.int64(data[at + 1] >> 4)
        if data[at] > 64 or base_bytes > 8 or scale_bytes > 8:
            return False
        if at + 2 + base_bytes + scale_bytes + _size(np.int64(data[at]), count) != end:
            return False
    return True


@kernel
def block_header(data, starts, block):
    """(address of its lanes, width, base, scale) of a block of the column at the addresses ``data``, ``starts``."""
    at = data + load32(starts + _4 * block)
    width, sizes = load8(at), load8(at + _1)
    base_bytes, scale_bytes = sizes & _15, sizes >> _4
    at += _2
    base = _widen(load64(at), base_bytes)
    at += base_bytes
    scale = _widen(load64(at), scale_bytes) if scale_bytes else _1
    return at + scale_bytes, width, base, scale


@kernel
def lane_value_32(lanes, width, inside):
    """The bits of value ``inside`` of a block with four lanes, as uint64."""
    bit = (inside >> _2) * width
    at = lanes + (bit >> _5 << _4) + ((inside & _3) << _2)
    return ((load32(at) | (load32(at + np.uint64(16)) << _32)) >> (bit & _31)) & _mask(width)


@kernel
def lane_value_64(lanes, width, inside):
    """The same with two lanes."""
    bit = (inside >> _1) * width
    at = lanes + (bit >> _6 << _4) + ((inside & _1) << _3)
    shift = bit & _63
    return ((load64(at) >> shift) | ((load64(at + np.uint64(16)) << _1) << (_63 - shift))) & _mask(width)


@kernel
def lane_value(lanes, width, inside):
    return lane_value_32(lanes, width, inside) if width <= _32 else lane_value_64(lanes, width, inside)


@kernel
def _mask(width):
    return ((_1 << (width >> _1)) << (width - (width >> _1))) - _1  # in two steps: 64 bits at once would be undefined


@kernel
def unpack_value(data, starts, row):
    lanes, width, base, scale = block_header(data, starts, row >> _SHIFT)
    return base + scale * lane_value(lanes, width, row & _INSIDE)


@kernel
def unpack_range(data, starts, first, count, out, to):
    """Values ``first`` to ``first + count`` of the column at the addresses ``data``, ``starts`` into ``out`` (unsigned,
    as wide as the column's type) from ``to`` on. All uint64."""
    row, stop = first, first + count
    while row < stop:
        lanes, width, base, scale = block_header(data, starts, row >> _SHIFT)
        inside = row & _INSIDE
        end = min(_INSIDE + _1, inside + stop - row)
        row += end - inside
        per_row = _4 if width <= _32 else _2
        while inside < end and inside & (per_row - _1):  # up to the first whole row of lanes
            out[to] = base + scale * lane_value(lanes, width, inside)
            inside += _1
            to += _1
        rows = (end - inside) // per_row
        mask = _mask(width)
        if width <= _32:
            bit = (inside >> _2) * width
            for _ in range(rows):
                if scale == _1:
                    row_of_4(out, to, lanes + (bit >> _5 << _4), bit & _31, mask, base, scale)
                else:
                    row_of_4_scaled(out, to, lanes + (bit >> _5 << _4), bit & _31, mask, base, scale)
                bit += width
                to += _4
        else:
            bit = (inside >> _1) * width
            for _ in range(rows):
                if scale == _1:
                    row_of_2(out, to, lanes + (bit >> _6 << _4), bit & _63, mask, base, scale)
                else:
                    row_of_2_scaled(out, to, lanes + (bit >> _6 << _4), bit & _63, mask, base, scale)
                bit += width
                to += _2
        inside += rows * per_row
        while inside < end:
            out[to] = base + scale * lane_value(lanes, width, inside)
            inside += _1
            to += _1


@kernel
def _addresses(column):
    return np.uint64(column[0].ctypes.data), np.uint64(column[1].ctypes.data)


@kernel
def _value_of(column, row):
    data, starts = _addresses(column)
    return unpack_value(data, starts, np.uint64(row))


@kernel
def _range_of(column, first, count, out, to):
    data, starts = _addresses(column)
    unpack_range(data, starts, np.uint64(first), np.uint64(count), out, np.uint64(to))


def value_at(column: Any, row: int) -> Any:
    """Value ``row`` of a column as kernels take it: of a plain one as it is, of a packed one as uint64."""
    return column[row] if isinstance(column, np.ndarray) else _value_of(column, row)


@overload(value_at, inline="always")
def _value_at(column, row):
    if isinstance(column, numba.types.Array):
        return lambda column, row: column[row]
    return lambda column, row: _value_of(column, row)


def copy_range(column: Any, first: int, count: int, out: np.ndarray, to: int) -> None:
    """Values ``first`` to ``first + count`` into ``out`` (unsigned, as wide as the column's type) from ``to`` on."""
    if isinstance(column, np.ndarray):
        out[to : to + count] = column[first : first + count]
    else:
        _range_of(column, first, count, out, to)


@overload(copy_range)
def _copy_range(column, first, count, out, to):
    if isinstance(column, numba.types.Array):
        def copy(column, first, count, out, to):
            address = np.uint64(column.ctypes.data) + np.uint64(first) * np.uint64(column.itemsize)
            copy_values(out, np.uint64(to), address, np.uint64(count))

        return copy
    return lambda column, first, count, out, to: _range_of(column, first, count, out, to)


@kernel
def copy_all(column, count, out):
    copy_range(column, 0, count, out, 0)
