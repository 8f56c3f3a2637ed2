"""Fused re-indexing of jagged rows: what goes around an exchange.

Each is one pass over memory, whatever the number of ranks; written with slices and concatenations (``reference``) it is
one operation a rank, row or key, which takes longer than the exchange itself from some tens of ranks on (FreeScale,
arXiv 2604.24073, figure 7). Arrays are numpy, CPU tensors (numba) or CUDA tensors (Triton) of any fixed-size dtype.

A row's values are ``values[offsets[row]:offsets[row + 1]]``, ``values`` [N, ...]; ``lengths`` [rows].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from semel.batch import Array, _is_tensor


def permute(values: Array, offsets: Array, order: Array) -> tuple[Array, Array]:
    """The rows ``order`` [M] of ``values``, in that order, once for each time they are named -> (values, [M + 1]
    offsets). Raises IndexError for a row that is not there (on a CPU)."""
    if _is_cuda(values):
        from semel.comm import triton_jagged

        return triton_jagged.copy_ranges(values, offsets[order], (offsets[1:] - offsets[:-1])[order])
    source, wanted = _numpy(offsets), _numpy(order)
    try:
        starts, new = _rows(source, wanted)
    except IndexError:
        raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a jagged array of {len(source) - 1} rows") from None
    return _copied(values, starts, new), _like(new, offsets)


@dataclass(frozen=True)
class Dispatched:
    """Rows in order of destination. ``values``: [N, ...]; ``lengths``: [rows]; ``order``: [rows], which row of the
    sender each was; ``rows`` and ``counts``: [world_size], how many rows and values each destination gets."""

    values: Array
    lengths: Array
    order: Array
    rows: Array
    counts: Array


def dispatch(values: Array, offsets: Array, ranks: Array, world_size: int) -> Dispatched:
    """Rows of which row i goes to rank ``ranks[i]`` -> in order of destination, rows of one destination in their old
    order. Raises ValueError for a rank outside ``world_size``."""
    if _is_cuda(values):
        import torch

        order = torch.argsort(ranks, stable=True)
        lengths = offsets[1:] - offsets[:-1]
        rows = torch.bincount(ranks, minlength=world_size)
        counts = torch.zeros(world_size, dtype=torch.int64, device=values.device).index_add_(0, ranks, lengths)
        moved, _ = permute(values, offsets, order)
        return Dispatched(moved, lengths[order], order, rows, counts)
    source, to = _numpy(offsets), _numpy(ranks)
    if len(to) != len(source) - 1:
        raise ValueError(f"{len(to)} ranks for {len(source) - 1} rows")
    try:
        starts, new, order, rows, counts = _by_destination(source, to, world_size)
    except IndexError:
        raise ValueError(f"ranks run from {to.min()} to {to.max()}, the world has {world_size}") from None
    return Dispatched(_copied(values, starts, new), *(_like(x, offsets) for x in (np.diff(new), order, rows, counts)))


def combine(values: Array, lengths: Array, places: Array) -> tuple[Array, Array]:
    """Rows as they arrived, one source after the other, row i of which belongs at place ``places[i]`` (each place
    once) -> (values, [rows + 1] offsets) in order of place: with the order of a ``dispatch`` its inverse. Raises
    ValueError for places that are not each row once (on a CPU)."""
    if _is_cuda(values):
        import torch

        order = torch.empty_like(places)
        order[places] = torch.arange(len(places), device=places.device)
        return permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), order)
    try:
        starts, new = _by_place(_numpy(lengths), _numpy(places))
    except IndexError:
        raise ValueError(f"places must be 0 to {len(lengths) - 1}, each once, got {places}") from None
    return _copied(values, starts, new), _like(new, lengths)


def transpose(values: Array, lengths: Array, rows: Array, keys: int) -> tuple[Array, Array]:
    """Values of several keys (columns) from several sources: rank-major -> key-major.

    In: for each source r, for each key k, the values of its ``rows[r]`` rows; ``lengths`` [keys * sum(rows)] in the
    same order. Out: for each key, the rows of all sources -> (values, lengths). ``rows`` [ranks] lies on the host. The
    way back, from key-major to rank-major, is ``untranspose``. Raises ValueError for lengths that do not fit.
    """
    return _transposed(values, lengths, rows, keys, True)


def untranspose(values: Array, lengths: Array, rows: Array, keys: int) -> tuple[Array, Array]:
    """The inverse of ``transpose``: for each key the rows of all destinations -> for each destination all its keys."""
    return _transposed(values, lengths, rows, keys, False)


def _transposed(values: Array, lengths: Array, rows: Array, keys: int, from_ranks: bool) -> tuple[Array, Array]:
    counts = _numpy(rows)
    if _is_cuda(values):
        import torch

        order = torch.from_numpy(_block_order(counts, keys, from_ranks)).to(values.device)
        moved, _ = permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), order)
        return moved, lengths[order]
    try:
        starts, new, new_lengths = _blocks(_numpy(lengths), counts, keys, from_ranks)
    except IndexError:
        raise ValueError(f"{len(lengths)} lengths for {keys} keys of {counts.sum()} rows") from None
    return _copied(values, starts, new), _like(new_lengths, lengths)


def _is_cuda(array: Array) -> bool:
    return _is_tensor(array) and array.is_cuda


def _numpy(array: Array) -> np.ndarray:
    return array.numpy() if _is_tensor(array) else array


def _like(array: np.ndarray, other: Array) -> Array:
    if not _is_tensor(other):
        return array
    import torch

    return torch.from_numpy(array)


def _copied(values: Array, starts: np.ndarray, offsets: np.ndarray) -> Array:
    """The ranges from ``starts`` on, one after the other, as long as ``offsets`` says; moved as the largest integers
    that divide a row."""
    count, tail = int(offsets[-1]), values.shape[1:]
    if _is_tensor(values):
        import torch

        item = values.element_size()
        flat = values.detach().contiguous()
        if tail:
            flat = flat.reshape(-1)
        source = (flat if flat.dtype == torch.int64 else flat.view(torch.uint8)).numpy()  # which lacks some types
    else:
        if values.dtype.hasobject:
            raise ValueError("jagged rows of Python objects cannot be moved as bytes; encode them first")
        item = values.dtype.itemsize
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    size = item * math.prod(tail)
    word, unit = next((word, unit) for word, unit in _WORDS
                      if size % unit == 0 and (item % unit == 0 or source.ctypes.data % unit == 0))
    width = size // unit
    if not count * width:
        return values.new_empty(count, *tail) if _is_tensor(values) else np.empty((count, *tail), values.dtype)
    moved = np.empty(count * width, word)
    _copy(source if source.dtype == word else source.view(word), starts, offsets, width, moved)
    if not _is_tensor(values):
        return moved.view(values.dtype).reshape(count, *tail)
    out = torch.from_numpy(moved)
    if values.dtype != torch.int64 or out.dtype != torch.int64:
        out = out.view(torch.uint8).view(values.dtype)
    return out.reshape(count, *tail) if tail else out


_WORDS = tuple((np.dtype(f"i{unit}"), unit) for unit in (8, 4, 2, 1))


@numba.njit(cache=True, nogil=True)
def _copy(source: Any, starts: Any, offsets: Any, width: int, out: Any) -> None:
    for row in range(len(starts)):  # unsigned: an index from the end is not looked for, and whole vectors are copied
        at, start = np.uint64(offsets[row] * width), np.uint64(starts[row] * width)
        for i in range(np.uint64((offsets[row + 1] - offsets[row]) * width)):
            out[at + i] = source[start + i]


@numba.njit(cache=True, nogil=True)
def _rows(offsets: Any, order: Any) -> Any:
    starts, new = np.empty(len(order), np.int64), np.empty(len(order) + 1, np.int64)
    new[0] = 0
    for i in range(len(order)):
        if not 0 <= order[i] < len(offsets) - 1:
            raise IndexError
        starts[i] = offsets[order[i]]
        new[i + 1] = new[i] + offsets[order[i] + 1] - starts[i]
    return starts, new


@numba.njit(cache=True, nogil=True)
def _by_destination(offsets: Any, ranks: Any, world_size: int) -> Any:
    """A stable counting sort of the rows by destination."""
    rows, counts = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    for i in range(len(ranks)):
        if not 0 <= ranks[i] < world_size:
            raise IndexError
        rows[ranks[i]] += 1
        counts[ranks[i]] += offsets[i + 1] - offsets[i]
    place = np.cumsum(rows) - rows
    order = np.empty(len(ranks), np.int64)
    for i in range(len(ranks)):
        order[place[ranks[i]]] = i
        place[ranks[i]] += 1
    starts, new = _rows(offsets, order)
    return starts, new, order, rows, counts


@numba.njit(cache=True, nogil=True)
def _by_place(lengths: Any, places: Any) -> Any:
    rows = len(lengths)
    if len(places) != rows:
        raise IndexError
    starts, new = np.full(rows, -1), np.zeros(rows + 1, np.int64)
    at = 0
    for i in range(rows):
        if not 0 <= places[i] < rows or starts[places[i]] >= 0:
            raise IndexError
        starts[places[i]] = at
        new[places[i] + 1] = lengths[i]
        at += lengths[i]
    for i in range(rows):
        new[i + 1] += new[i]
    return starts, new


@numba.njit(cache=True, nogil=True)
def _blocks(lengths: Any, rows: Any, keys: int, from_ranks: bool) -> Any:
    """Blocks, of one rank and one key each, trade places: where each of the new order starts, their new offsets, and
    the lengths in the new order."""
    ranks, total = len(rows), rows.sum()
    if len(lengths) != keys * total:
        raise IndexError
    row_starts = np.cumsum(rows) - rows
    new_lengths = np.empty_like(lengths)
    blocks = ranks * keys
    starts, offsets = np.empty(blocks, np.int64), np.zeros(blocks + 1, np.int64)
    at = 0
    for block in range(blocks):  # in the old order
        r, k = (block // keys, block % keys) if from_ranks else (block % ranks, block // ranks)
        by_rank, by_key = keys * row_starts[r] + k * rows[r], k * total + row_starts[r]
        first, target = (by_rank, by_key) if from_ranks else (by_key, by_rank)
        size = 0
        for i in range(rows[r]):
            size += lengths[first + i]
            new_lengths[target + i] = lengths[first + i]
        place = k * ranks + r if from_ranks else r * keys + k
        starts[place], offsets[place + 1] = at, size
        at += size
    for block in range(blocks):
        offsets[block + 1] += offsets[block]
    return starts, offsets, new_lengths


@numba.njit(cache=True, nogil=True)
def _block_order(rows: Any, keys: int, from_ranks: bool) -> Any:
    """[keys * sum(rows)] which (rank, key, row) each place of the result takes."""
    ranks, total = len(rows), rows.sum()
    row_starts = np.cumsum(rows) - rows
    order = np.empty(keys * total, np.int64)
    for r in range(ranks):
        for k in range(keys):
            by_rank, by_key = keys * row_starts[r] + k * rows[r], k * total + row_starts[r]
            for i in range(rows[r]):
                if from_ranks:
                    order[by_key + i] = by_rank + i
                else:
                    order[by_rank + i] = by_key + i
    return order
