"""Lookups in many tables at once: a ranker with a hundred fields has a hundred tables, and asks each for a row.

Looking up one row is a few nanoseconds of work and microseconds of calling; for one request the calls cost as much as
scoring its candidates. ``group`` finds lookups whose results are put side by side, and makes them one call of
``lookup``, which goes through all tables in one loop: no copy of the tables, nothing to refresh when they change.
Where gradients are wanted, while compiling and away from the CPU the lookups are separate ones again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from semel.sharing.emission import aten

FEWEST = 4          # lookups that are worth one loop
Options = tuple[int, bool, bool]


def lookup(tables: Sequence[Tensor], sources: Sequence[Tensor], columns: Sequence[int],
           options: Sequence[Options]) -> Tensor:
    """Rows of ``tables`` (each [rows, width]) side by side: [n, all widths].

    ``sources``: the indices of each table, [n], or [n, columns] of which ``columns`` names one (-1: [n]); those in
    floating point are cut to integers. ``options``: padding index, scaling by frequency, sparse gradient of each table.

    Raises:
        IndexError: an index is no row of its table.
    """
    if (torch.is_grad_enabled() and any(table.requires_grad for table in tables)) or torch.compiler.is_compiling() \
            or not all(_plain(t) for t in (tables[0], sources[0])) or sources[0].dtype not in KINDS:
        return separate(tables, sources, columns, options)
    known = _table_fields(tables)
    if known is None:
        return separate(tables, sources, columns, options)
    from semel.sharing.lookup_kernel import gather

    fields, width = known
    first = sources[0]
    n, size = len(first), first.element_size()
    fields = fields.copy()
    if columns[0] >= 0 and all(s is first for s in sources):
        fields[4] = np.array(columns) * (first.stride(1) * size) + first.data_ptr()
        fields[5] = first.stride(0) * size
    else:
        if any(s.dtype != first.dtype for s in sources):
            return separate(tables, sources, columns, options)
        fields[4] = [s.data_ptr() + (c * s.stride(1) * size if c >= 0 else 0)
                     for s, c in zip(sources, columns, strict=True)]
        fields[5] = [s.stride(0) * size for s in sources]
    out = torch.empty(n, width, dtype=tables[0].dtype)
    wrong = gather(fields, KINDS[first.dtype], n, out.data_ptr())
    if wrong >= 0:
        raise IndexError(f"an index is no row of its table of {fields[2, wrong]} rows "
                         f"(table {wrong} of {len(tables)} that are looked up together)")
    return out


def _table_fields(tables: Sequence[Tensor]) -> tuple[np.ndarray, int] | None:
    """Where tables lie, for ``gather`` ([6, F], the last two rows open), and the sum of widths; None: not so."""
    key = (tuple(map(Tensor.data_ptr, tables)), tuple(map(Tensor.size, tables)), tuple(map(Tensor.stride, tables)),
           tables[0].dtype)
    if key not in _fields:
        if len(_fields) > 256:      # tables that moved
            _fields.clear()
        item = tables[0].element_size()
        strange = any(t.dtype != tables[0].dtype or (t.stride(1) != 1 and t.shape[1] != 1) for t in tables)
        widths = [t.shape[1] for t in tables]
        fields = np.zeros((6, len(tables)), np.int64)
        fields[:4] = key[0], [t.stride(0) * item for t in tables], [t.shape[0] for t in tables], np.array(widths) * item
        _fields[key] = None if strange else (fields, sum(widths))
    return _fields[key]


_fields: dict[Any, tuple[np.ndarray, int] | None] = {}
KINDS = {torch.int64: 0, torch.int32: 1, torch.float32: 2, torch.float64: 3}


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"


def separate(tables: Sequence[Tensor], sources: Sequence[Tensor], columns: Sequence[int],
             options: Sequence[Options]) -> Tensor:
    """``lookup`` as its formula: one after the other. Gradients flow to the tables."""
    found = []
    for table, source, column, (padding, scale, sparse) in zip(tables, sources, columns, options, strict=True):
        index = source if column < 0 else source.select(1, column)
        index = index.long() if index.dtype.is_floating_point else index
        found.append(functional.embedding(index, table, padding if padding >= 0 else None, None, 2.0, scale, sparse))
    return torch.cat(found, 1)


# ---------------------------------------------------------------------------------------------- the graph
def group(graph: fx.Graph, root: nn.Module) -> None:
    """Pieces of a ``cat`` behind the rows that are lookups, or columns of one input, become one call; in place."""
    made: dict[Any, fx.Node] = {}
    nodes: list[Any] = list(graph.nodes)
    for node in nodes:
        if node.target is not aten.cat.default or len(node.args) < 2 or node.args[1] != 1:
            continue
        pieces: list[Any] = []
        for kind, run in groupby(node.args[0], _kind):
            found = list(run)
            joined = None
            if len(found) >= FEWEST and kind is not None:
                with graph.inserting_before(node):
                    joined = _columns(graph, root, found) if kind == "column" else _lookups(graph, made, kind, found)
            pieces += found if joined is None else [joined]
        if len(pieces) == 1 and len(node.args[0]) > 1:
            node.replace_all_uses_with(pieces[0])
            graph.erase_node(node)
        else:
            node.args = (pieces, 1)
    graph.eliminate_dead_code()


def _kind(piece: Any) -> Any:
    """What pieces must have in common to be joined; None: neither a lookup nor a column."""
    inside, shape = _behind(piece)
    if inside.target is aten.embedding.default and inside.meta.get("index_axes") == 0 and \
            (shape is None or len(shape) in (2, 3)):
        if shape is None or len(shape) == 2:
            return ("lookup",)
        return ("lookup", *shape[1:]) if shape[1] == 1 else None
    return "column" if inside.target is aten.select.int and inside.args[1] == 1 and shape == (-1, 1) else None


def _behind(piece: Any) -> tuple[Any, tuple[int, ...] | None]:
    """The node whose elements a piece has, and the shape that they are given."""
    shape = None
    while piece.op == "call_function" and piece.target in (aten.reshape.default, aten.squeeze.dim):
        if piece.target is aten.reshape.default and shape is None:
            shape = tuple(piece.args[1])
        piece = piece.args[0]
    return piece, shape


def _index(node: Any) -> tuple[Any, int]:
    """Where an index [n] comes from: an input and its column, or -1."""
    inside = node
    if inside.target is aten._to_copy.default and inside.kwargs == {"dtype": torch.int64}:
        inside = inside.args[0]
    if inside.target is aten.select.int and inside.args[1] == 1:
        return inside.args[0], inside.args[2]
    return node, -1


def _lookups(graph: fx.Graph, made: dict[Any, fx.Node], kind: Any, pieces: Sequence[Any]) -> fx.Node | None:
    found = [_behind(piece)[0] for piece in pieces]
    tables = [node.args[0] for node in found]
    indices = [_index(node.args[1]) for node in found]
    if len({column < 0 for _, column in indices}) > 1:
        return None
    options = [tuple(_with_defaults(node.args[2:])) for node in found]
    key = (tuple(tables), tuple(indices), tuple(options))
    if key not in made:
        made[key] = graph.call_function(lookup, (tables, [s for s, _ in indices], [c for _, c in indices], options))
    joined = made[key]
    return joined if len(kind) == 1 else graph.call_function(aten.reshape.default, (joined, [-1, len(found), kind[2]]))


def _with_defaults(given: Sequence[Any]) -> Iterator[Any]:
    for i, default in enumerate((-1, False, False)):
        yield given[i] if i < len(given) else default


def _columns(graph: fx.Graph, root: nn.Module, pieces: Sequence[Any]) -> fx.Node | None:
    found = [_behind(piece)[0] for piece in pieces]
    if len({node.args[0] for node in found}) > 1:
        return None
    columns = [node.args[2] for node in found]
    if columns == list(range(columns[0], columns[0] + len(columns))):
        return graph.call_function(aten.slice.Tensor, (found[0].args[0], 1, columns[0], columns[-1] + 1))
    name = f"columns_{sum(1 for _ in root.named_buffers())}"
    root.register_buffer(name, torch.tensor(columns), persistent=False)
    return graph.call_function(aten.index_select.default, (found[0].args[0], 1, graph.get_attr(name)))
