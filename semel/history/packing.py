"""Packed columns: blocks of 128 values, each stored with as many bits as its own range needs.

Frame of reference (Zukowski et al., "Super-Scalar RAM-CPU Cache Compression", ICDE 2006) with a common divisor: value i
of a block is ``base + scale * bits[i]``, all of the block's ``bits`` equally wide. Times of whole seconds, floats that
hold small integers, flags and constant columns become narrow; and since the place of a value follows from its number,
one value or a range is read without what lies before it. Arithmetic is modulo 2**64, so every bit pattern survives.

Kernels take a column as it lies in memory: a plain array, or the tuple (words, bytes, starts) of a packed one.
``value_at`` and ``copy_range`` read either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic, overload

from semel.history.kernels import kernel

BLOCK = 128
_SHIFT, _INSIDE = np.uint64(7), np.uint64(BLOCK - 1)
_0, _1, _3, _6, _7, _8, _63, _64 = (np.uint64(n) for n in (0, 1, 3, 6, 7, 8, 63, 64))
_ONE_LOAD = np.uint64(57)
"""Widest value that eight bytes hold wherever in a byte it begins."""

Packed = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(the payload as uint64 words, the same as bytes, [blocks + 1] uint32 where each block begins)."""


def pack(values: np.ndarray) -> np.ndarray:
    """Flat values of any fixed width -> uint8 payload: the blocks, 8 or more zero bytes up to a multiple of 8, then
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
    out = np.zeros(_words_before_directory(int(starts[-1])), np.uint64)
    _write(words, base, scale, width, starts, out, out.view(np.uint8))
    return np.concatenate([out.view(np.uint8), starts.astype("<u4").view(np.uint8)])


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
    yield np.zeros(8 * _words_before_directory(end) - end, np.uint8)
    yield np.concatenate(starts).view(np.uint8)


def view_packed(payload: np.ndarray, values: int) -> Packed:
    """The column in ``payload`` (uint8, 8-byte aligned). Raises ValueError where it cannot be one of ``values``
    values: after this check no read leaves the payload."""
    blocks = -(-values // BLOCK)
    end = len(payload) - 4 * (blocks + 1)
    if end < 8 or end % 8:
        raise ValueError(f"{len(payload)} bytes cannot hold {values} packed values")
    data, starts = payload[:end], payload[end:].view("<u4")
    if _words_before_directory(int(starts[-1])) * 8 != end or not _fits(data, starts, values):
        raise ValueError("blocks do not lie where they should")
    return data.view(np.uint64), data, starts


def unpack(column: Packed, values: int, dtype: Any) -> np.ndarray:
    """All values (read-only)."""
    out = np.empty(values, dtype)
    copy_all(column, values, out.view(f"u{out.dtype.itemsize}"))
    out.flags.writeable = False
    return out


def _words_before_directory(end: int) -> int:
    return end // 8 + 2  # reading a value's second word stays inside


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
        starts[block + 1] = starts[block] + size + (np.int64(bits) * (stop - first) + 7) // 8


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
    size = 0
    while size < 8 and np.uint64(_widen(value, size)) != value:
        size += 1
    return size


@kernel
def _widen(value, size):
    """The lowest ``size`` bytes of ``value``, sign extended."""
    if size == 0:
        return np.int64(0)
    drop = np.uint64(64 - 8 * size)
    return np.int64(value << drop) >> np.int64(drop)


@kernel
def _write(values, base, scale, width, starts, words, data):
    for block in range(len(base)):
        first, stop = block * BLOCK, min((block + 1) * BLOCK, len(values))
        at = starts[block]
        base_bytes = _bytes_of(base[block])
        scale_bytes = _bytes_of(scale[block]) if scale[block] > _1 else 0
        data[at] = width[block]
        data[at + 1] = base_bytes | (scale_bytes << 4)
        at += 2
        for i in range(base_bytes):
            data[at + i] = (base[block] >> np.uint64(8 * i)) & np.uint64(255)
        at += base_bytes
        for i in range(scale_bytes):
            data[at + i] = (scale[block] >> np.uint64(8 * i)) & np.uint64(255)
        bit = np.uint64(at + scale_bytes) * _8
        for i in range(first, stop):
            value = (values[i] - base[block]) // scale[block]
            word, shift = bit >> _6, bit & _63
            words[word] |= value << shift
            words[word + _1] |= (value >> _1) >> (_63 - shift)
            bit += width[block]


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
        if at + 2 + base_bytes + scale_bytes + (np.int64(data[at]) * count + 7) // 8 != end:
            return False
    return True


@kernel
def _number(data, at, size):
    """A little-endian number of ``size`` bytes, sign extended."""
    value = _0
    for i in range(size):
        value |= np.uint64(data[at + np.uint64(i)]) << np.uint64(8 * i)
    return np.uint64(_widen(value, size))


@kernel
def _header(column, block):
    """(bit where its values begin, width, base, scale)."""
    data = column[1]
    at = np.uint64(column[2][block])
    width = np.uint64(data[at])
    sizes = data[at + _1]
    at += _1 + _1
    base = _number(data, at, sizes & 15)
    at += np.uint64(sizes & 15)
    scale = _number(data, at, sizes >> 4) if sizes >> 4 else _1
    return (at + np.uint64(sizes >> 4)) * _8, width, base, scale


def _load_code(typing, data, at):
    """The eight bytes of ``data`` from ``at`` on as one number: aligned or not, one instruction."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        word = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        loaded = builder.load(word)
        loaded.align = 1
        return loaded

    return numba.types.uint64(data, at), generate


_load: Any = intrinsic(_load_code)


@kernel
def _two_words(words, place):
    """64 bits from bit ``place`` on."""
    word, shift = place >> _6, place & _63
    return (words[word] >> shift) | ((words[word + _1] << _1) << (_63 - shift))


@kernel
def _unpack_value(column, row):
    row = np.uint64(row)
    bit, width, base, scale = _header(column, row >> _SHIFT)
    if width == _0:
        return base
    value = _two_words(column[0], bit + (row & _INSIDE) * width)
    return base + scale * (value & (~_0 >> (_64 - width)))


@kernel
def _unpack_range(column, first, count, out, to):
    data = column[1]
    row, stop = np.uint64(first), np.uint64(first + count)
    at = np.uint64(to)
    while row < stop:
        bit, width, base, scale = _header(column, row >> _SHIFT)
        inside = row & _INSIDE
        size = min(_INSIDE + _1 - inside, stop - row)
        if width == _0:
            for i in range(size):
                out[at + i] = base
        else:
            mask = ~_0 >> (_64 - width)
            bit += inside * width
            if width > _ONE_LOAD:
                for i in range(size):
                    out[at + i] = base + scale * (_two_words(column[0], bit + i * width) & mask)
            elif scale == _1:
                for i in range(size):
                    place = bit + i * width
                    out[at + i] = base + ((_load(data, place >> _3) >> (place & _7)) & mask)
            else:
                for i in range(size):
                    place = bit + i * width
                    out[at + i] = base + scale * ((_load(data, place >> _3) >> (place & _7)) & mask)
        row += size
        at += size


def value_at(column: Any, row: int) -> Any:
    """Value ``row`` of a column as kernels take it: of a plain one as it is, of a packed one as uint64."""
    return column[row] if isinstance(column, np.ndarray) else _unpack_value(column, row)


@overload(value_at, inline="always")
def _value_at(column, row):
    if isinstance(column, numba.types.Array):
        return lambda column, row: column[row]
    return lambda column, row: _unpack_value(column, row)


def copy_range(column: Any, first: int, count: int, out: np.ndarray, to: int) -> None:
    """Values ``first`` to ``first + count`` into ``out`` (unsigned, as wide as the column's type) from ``to`` on."""
    if isinstance(column, np.ndarray):
        out[to : to + count] = column[first : first + count]
    else:
        _unpack_range(column, first, count, out, to)


@overload(copy_range)
def _copy_range(column, first, count, out, to):
    if isinstance(column, numba.types.Array):
        def copy(column, first, count, out, to):
            for i in range(count):
                out[to + i] = column[first + i]

        return copy
    return lambda column, first, count, out, to: _unpack_range(column, first, count, out, to)


@kernel
def copy_all(column, count, out):
    copy_range(column, 0, count, out, 0)
