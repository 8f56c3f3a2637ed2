"""``jagged`` as one would write it with slices and concatenations: one operation a row, a rank or a key."""

from __future__ import annotations

import torch
from torch import Tensor

from semel.comm.jagged import Dispatched


def _offsets(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def permute(values: Tensor, offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    at = offsets.tolist()
    rows = [values[at[row] : at[row + 1]] for row in order.tolist()]
    return torch.cat([values[:0], *rows]), _offsets((offsets[1:] - offsets[:-1])[order])


def dispatch(values: Tensor, offsets: Tensor, ranks: Tensor, world_size: int) -> Dispatched:
    lengths = offsets[1:] - offsets[:-1]
    orders = [torch.nonzero(ranks == rank).flatten() for rank in range(world_size)]
    parts = [permute(values, offsets, order)[0] for order in orders]
    order = torch.cat(orders)
    return Dispatched(torch.cat(parts), lengths[order], order, torch.tensor([len(o) for o in orders]),
                      torch.tensor([len(part) for part in parts]))


def combine(values: Tensor, lengths: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    rows = values.split(lengths.tolist())
    order = torch.argsort(places)
    return torch.cat([values[:0], *(rows[i] for i in order.tolist())]), _offsets(lengths[order])


def transpose(values: Tensor, lengths: Tensor, rows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    order = [rank * keys + key for key in range(keys) for rank in range(len(rows))]
    return _blocks(values, lengths, [n for n in rows.tolist() for _ in range(keys)], order)


def untranspose(values: Tensor, lengths: Tensor, rows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    order = [key * len(rows) + rank for rank in range(len(rows)) for key in range(keys)]
    return _blocks(values, lengths, [n for _ in range(keys) for n in rows.tolist()], order)


def _blocks(values: Tensor, lengths: Tensor, rows: list[int], order: list[int]) -> tuple[Tensor, Tensor]:
    sizes = _offsets(lengths)[_offsets(torch.tensor(rows))].diff()
    blocks, block_lengths = values.split(sizes.tolist()), lengths.split(rows)
    return torch.cat([blocks[i] for i in order]), torch.cat([block_lengths[i] for i in order])
