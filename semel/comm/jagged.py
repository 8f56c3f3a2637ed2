"""Fused re-indexing of jagged rows: what goes around an exchange.

Each is one pass over memory, whatever the number of ranks; written with slices and concatenations (``reference``) it is
one operation a rank, row or key, which takes longer than the exchange itself from some tens of ranks on (FreeScale,
arXiv 2604.24073, figure 7). Arrays are numpy, CPU tensors (numba) or CUDA tensors (Triton) of any fixed-size dtype.

A row's values are ``values[offsets[row]:offsets[row + 1]]``, ``values`` [N, ...]; ``lengths`` [rows].
"""

from __future__ import annotations

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

        starts, lengths = offsets[order], (offsets[1:] - offsets[:-1])[order]
        return triton_jagged.copy_ranges(values, starts, lengths)
    source, wanted = _numpy(offsets), _numpy(order)
    if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(source) - 1:
        raise IndexError(f"rows {wanted.min()} to {wanted.max()} of a jagged array of {len(source) - 1} rows")
    starts, new = _rows(source, wanted)
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
    if len(to) and not 0 <= to.min() <= to.max() < world_size:
        raise ValueError(f"ranks run from {to.min()} to {to.max()}, the world has {world_size}")
    order, starts, new, rows, counts = _by_destination(source, to, world_size)
    return Dispatched(_copied(values, starts, new), _like(np.diff(new), offsets),
                      *(_like(x, offsets) for x in (order, rows, counts)))


def combine(values: Array, lengths: Array, places: Array) -> tuple[Array, Array]:
    """Rows as they arrived, one source after the other, row i of which belongs at place ``places[i]`` (each place
    once) -> (values, [rows + 1] offsets) in order of place: with the order of a ``dispatch`` its inverse. Raises
    ValueError for places that are not each row once (on a CPU)."""
    if _is_cuda(values):
        import torch

        order = torch.empty_like(places)
        order[places] = torch.arange(len(places), device=places.device)
        return permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), order)
    starts, new = _by_place(_numpy(lengths), _numpy(places))
    if len(places) != len(lengths) or len(starts) and starts.min() < 0:
        raise ValueError(f"places must be 0 to {len(lengths) - 1}, each once, got {places}")
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
    counts = np.ascontiguousarray(_numpy(rows), dtype=np.int64)
    if len(lengths) != keys * counts.sum():
        raise ValueError(f"{len(lengths)} lengths for {keys} keys of {counts.sum()} rows")
    if _is_cuda(values):
        import torch

        order = torch.from_numpy(_block_order(counts, keys, from_ranks)).to(values.device)
        moved, _ = permute(values, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), order)
        return moved, lengths[order]
    source = _numpy(lengths)
    new_lengths = np.empty_like(source)
    starts, new = _blocks(source, counts, keys, from_ranks, new_lengths)
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
    """The ranges from ``starts`` on, one after the other, as long as ``offsets`` says."""
    if _is_tensor(values):
        values = values.detach().contiguous()
        out = values.new_empty(int(offsets[-1]), *values.shape[1:])
        import torch

        source, target = (x.reshape(-1).view(torch.uint8).numpy() for x in (values, out))
        size = out[:0].shape[1:].numel() * out.element_size()
    else:
        if values.dtype.hasobject:
            raise ValueError("jagged rows of Python objects cannot be moved as bytes; encode them first")
        values = np.ascontiguousarray(values)
        out = np.empty((int(offsets[-1]), *values.shape[1:]), values.dtype)
        source, target = values.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8)
        size = values.dtype.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
    for word in _WORDS:
        if size % word.itemsize == 0 and source.ctypes.data % word.itemsize == 0:
            _copy_ranges(source.view(word), starts, offsets, size // word.itemsize, target.view(word))
            break
    return out


_WORDS = tuple(np.dtype(name) for name in ("int64", "int32", "int16", "uint8"))


@numba.njit(cache=True, nogil=True)
def _copy_ranges(source: Any, starts: Any, offsets: Any, width: int, out: Any) -> None:
    for row in range(len(starts)):
        at, start = offsets[row] * width, starts[row] * width
        for i in range((offsets[row + 1] - offsets[row]) * width):
            out[at + i] = source[start + i]


@numba.njit(cache=True, nogil=True)
def _rows(offsets: Any, order: Any) -> Any:
    starts, new = np.empty(len(order), np.int64), np.empty(len(order) + 1, np.int64)
    new[0] = 0
    for i in range(len(order)):
        starts[i] = offsets[order[i]]
        new[i + 1] = new[i] + offsets[order[i] + 1] - starts[i]
    return starts, new


@numba.njit(cache=True, nogil=True)
def _by_destination(offsets: Any, ranks: Any, world_size: int) -> Any:
    """A stable counting sort of the rows by destination."""
    rows, counts = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    for i in range(len(ranks)):
        rows[ranks[i]] += 1
        counts[ranks[i]] += offsets[i + 1] - offsets[i]
    place = np.cumsum(rows) - rows
    order = np.empty(len(ranks), np.int64)
    for i in range(len(ranks)):
        order[place[ranks[i]]] = i
        place[ranks[i]] += 1
    starts, new = _rows(offsets, order)
    return order, starts, new, rows, counts


@numba.njit(cache=True, nogil=True)
def _by_place(lengths: Any, places: Any) -> Any:
    rows = len(lengths)
    starts, new = np.full(rows, -1), np.zeros(rows + 1, np.int64)
    at = 0
    for i in range(min(rows, len(places))):
        if not 0 <= places[i] < rows:
            return np.full(1, -1), new
        starts[places[i]] = at
        new[places[i] + 1] = lengths[i]
        at += lengths[i]
    for i in range(rows):
        new[i + 1] += new[i]
    return starts, new


@numba.njit(cache=True, nogil=True)
def _blocks(lengths: Any, rows: Any, keys: int, from_ranks: bool, new_lengths: Any) -> Any:
    """The start of each block (of one rank and one key) in the order of the result, and the blocks' new offsets."""
    ranks, total = len(rows), rows.sum()
    row_starts = np.cumsum(rows) - rows
    starts, sizes = np.empty((ranks, keys), np.int64), np.empty((ranks, keys), np.int64)
    at = 0
    for outer in range(ranks if from_ranks else keys):
        for inner in range(keys if from_ranks else ranks):
            r, k = (outer, inner) if from_ranks else (inner, outer)
            first = keys * row_starts[r] + k * rows[r] if from_ranks else k * total + row_starts[r]
            target = k * total + row_starts[r] if from_ranks else keys * row_starts[r] + k * rows[r]
            size = 0
            for i in range(rows[r]):
                size += lengths[first + i]
                new_lengths[target + i] = lengths[first + i]
            starts[r, k], sizes[r, k] = at, size
            at += size
    out, new = np.empty(ranks * keys, np.int64), np.empty(ranks * keys + 1, np.int64)
    new[0] = 0
    for block in range(ranks * keys):
        r, k = (block % ranks, block // ranks) if from_ranks else (block // keys, block % keys)
        out[block] = starts[r, k]
        new[block + 1] = new[block] + sizes[r, k]
    return out, new


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
