"""Requests as bytes: what ``exchange`` sends. One request is one row of bytes, whatever its columns.

A column holds, for each request, one value, one a candidate, or any number; a row lays a request's parts of all columns
one after the other, behind the counts from which the receiver knows their lengths. The ``Layout`` says the rest: it is
the same for all rows of a batch and is sent once. Every value comes back bit for bit, strings and nulls included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows, _is_tensor, offsets_of
from semel.comm import jagged

TEXT, JSON = "text", "json"
LENGTHS, ITEMS = "\0lengths", "\0items"
"""Behind a column's name: the lengths of its texts, and of its lists of each candidate."""
ONE = -1
"""The group of what every request has once."""


@dataclass(frozen=True)
class Field:
    """A column: of numpy type ``dtype`` and row shape ``tail``, as many values a request as its ``group`` counts.
    ``tensor``: its torch type, or "" for numpy."""

    name: str
    dtype: str
    tail: tuple[int, ...]
    group: int
    tensor: str = ""

    @property
    def size(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize * math.prod(self.tail)


@dataclass(frozen=True)
class Layout:
    """Of rows of ``kind`` "rows" or "batch": its fields in the order in which a row has them, widest alignment first,
    its counted groups, and for the columns that hold no fixed-size values how they are encoded."""

    kind: str
    fields: tuple[Field, ...]
    groups: tuple[str, ...]
    encoded: tuple[tuple[str, str], ...]

    def to_text(self) -> str:
        fields = [[f.name, f.dtype, list(f.tail), f.group, f.tensor] for f in self.fields]
        return json.dumps([self.kind, fields, self.groups, self.encoded])

    @classmethod
    def from_text(cls, text: str) -> Layout:
        kind, fields, groups, encoded = json.loads(text)
        return cls(kind, tuple(Field(name, dtype, tuple(tail), group, tensor)
                               for name, dtype, tail, group, tensor in fields),
                   tuple(groups), tuple((name, how) for name, how in encoded))

    def lengths(self, counts: np.ndarray) -> np.ndarray:
        """[R, groups] counts -> [fields + 1, R] bytes of each part of each row; the first part is the counts."""
        sizes, groups = self._parts
        once = np.ones((len(counts), 1), np.int64)  # the last column, which is group ONE
        return np.ascontiguousarray((np.concatenate([counts, once], 1)[:, groups] * sizes).T)

    @cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """[fields + 1] bytes of one value of each part, and its group."""
        return (np.array([8 * len(self.groups), *(field.size for field in self.fields)]),
                np.array([ONE, *(field.group for field in self.fields)]))


@dataclass(frozen=True)
class Packed:
    """R requests: ``values`` uint8, row r is ``values[offsets[r]:offsets[r + 1]]``."""

    layout: Layout
    values: np.ndarray
    offsets: np.ndarray


def pack(rows: RequestRows | RequestBatch) -> Packed:
    """Raises ValueError, naming the column, for values that are neither of a fixed size nor text, numbers, booleans or
    None."""
    writer = _Writer(len(rows) if isinstance(rows, RequestRows) else rows.requests)
    if isinstance(rows, RequestRows):
        _write_rows(writer, rows)
    else:
        _write_batch(writer, rows)
    return writer.packed("rows" if isinstance(rows, RequestRows) else "batch")


def unpack(layout: Layout, values: np.ndarray, offsets: np.ndarray) -> RequestRows | RequestBatch:
    """The inverse of ``pack``, for any rows of one layout put together."""
    reader = _Reader(layout, values, offsets)
    return _read_rows(reader) if layout.kind == "rows" else _read_batch(reader)


class _Writer:
    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.groups: dict[str, np.ndarray] = {}
        self.columns: list[tuple[str, np.ndarray, int, str]] = []
        self.encoded: list[tuple[str, str]] = []

    def group(self, name: str, offsets: Any) -> int:
        self.groups[name] = np.diff(_to_numpy(offsets))
        return len(self.groups) - 1

    def add(self, name: str, values: Any, group: int = ONE) -> None:
        array, tensor = _to_numpy(values), str(values.dtype).removeprefix("torch.") if _is_tensor(values) else ""
        if not array.dtype.hasobject:
            self.columns.append((name, array, group, tensor))
            return
        how, texts = _as_text(name, array)
        self.encoded.append((name, how))
        lengths, data = _utf8(texts)
        self.columns.append((name + LENGTHS, lengths, group, ""))
        ends = np.arange(self.requests + 1) if group == ONE else offsets_of([*self.groups.values()][group])
        by_request = offsets_of(lengths.clip(0))[ends]
        self.columns.append((name, data, self.group(name + LENGTHS, by_request), ""))

    def jagged(self, name: str, value: Jagged, group: int = ONE) -> None:
        """A value of each request, or of each candidate, that is itself a list."""
        lengths = np.diff(_to_numpy(value.offsets))
        if group != ONE:
            self.add(name + ITEMS, lengths, group)
        ends = np.arange(self.requests + 1) if group == ONE else offsets_of([*self.groups.values()][group])
        self.add(name, value.values, self.group(name, _to_numpy(value.offsets)[ends]))

    def packed(self, kind: str) -> Packed:
        columns = sorted(self.columns, key=lambda column: -column[1].dtype.alignment)  # so that none comes out crooked
        fields = tuple(Field(name, array.dtype.str, array.shape[1:], group, tensor)
                       for name, array, group, tensor in columns)
        layout = Layout(kind, fields, tuple(self.groups), tuple(self.encoded))
        counts = np.stack([*self.groups.values()], 1) if self.groups else np.empty((self.requests, 0), np.int64)
        lengths = layout.lengths(counts)
        by_column = np.concatenate([_bytes(counts), *(_bytes(array) for _, array, _, _ in columns)])
        ones = np.ones(self.requests, np.int64)
        values, _ = jagged.untranspose(by_column, lengths.reshape(-1), ones, len(fields) + 1)
        return Packed(layout, values, offsets_of(lengths.sum(0)))


class _Reader:
    def __init__(self, layout: Layout, values: np.ndarray, offsets: np.ndarray) -> None:
        self.layout, self.requests = layout, len(offsets) - 1
        size = 8 * len(layout.groups)
        heads, _ = jagged.permute(values[: offsets[-1]], *_heads(offsets, size)) if size else (values[:0], None)
        counts = heads.view(np.int64).reshape(self.requests, len(layout.groups))
        lengths = layout.lengths(counts)
        ones = np.ones(self.requests, np.int64)
        by_column, _ = jagged.transpose(values, lengths.T.reshape(-1), ones, len(layout.fields) + 1)
        ends = offsets_of(lengths.sum(1))
        self.offsets = [offsets_of(counts[:, group]) for group in range(len(layout.groups))]
        self.columns = {}
        for at, field in enumerate(layout.fields, 1):
            rows = self.requests if field.group == ONE else int(self.offsets[field.group][-1])
            part = by_column[ends[at] : ends[at + 1]].view(np.dtype(field.dtype))
            self.columns[field.name] = part.reshape(rows, *field.tail), field
        self.how = dict(layout.encoded)

    def names(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in (*self.columns,)
                if name.startswith(prefix) and not name.endswith((LENGTHS, ITEMS))]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def get(self, name: str) -> Any:
        array, field = self.columns[name]
        if name in self.how:
            return _from_text(self.how[name], self.columns[name + LENGTHS][0], array)
        if not field.tensor:
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor.view(getattr(torch, field.tensor)) if str(tensor.dtype) != f"torch.{field.tensor}" else tensor

    def group(self, name: str) -> np.ndarray:
        return self.offsets[self.layout.groups.index(name)]

    def jagged(self, name: str) -> Any:
        """The column, or the Jagged that it is."""
        if name + ITEMS in self.columns:
            return self._like(name, Jagged(self.get(name), offsets_of(self.columns[name + ITEMS][0])))
        if name in self.layout.groups:
            return self._like(name, Jagged(self.get(name), self.group(name)))
        return self.get(name)

    def _like(self, name: str, value: Jagged) -> Jagged:
        return value.torch() if self.columns[name][1].tensor else value


def _heads(offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets that cut each row behind its first ``size`` bytes, and the rows of that cut which are heads."""
    cuts = np.empty(2 * len(offsets) - 1, np.int64)
    cuts[::2] = offsets
    cuts[1::2] = offsets[:-1] + size
    return cuts, np.arange(0, 2 * len(offsets) - 2, 2)


def _write_rows(writer: _Writer, rows: RequestRows) -> None:
    candidates = writer.group("candidate", rows.candidates.offsets)
    writer.add("request_id", rows.request_id)
    for name in ("user_id", "as_of", "version"):
        writer.add(f"pointers.{name}", getattr(rows.pointers, name))
    writer.add("catalogue_version", rows.catalogue_version)
    for name, values in rows.context.items():
        writer.add(f"context.{name}", values)
    writer.add("candidates", rows.candidates.values, candidates)
    for kind in ("label", "label_mask"):
        for name, values in getattr(rows, kind).items():
            writer.add(f"{kind}.{name}", values, candidates)
    if rows.weight is not None:
        writer.add("weight", rows.weight, candidates)


def _read_rows(reader: _Reader) -> RequestRows:
    def of(prefix: str) -> dict[str, np.ndarray]:
        return {name: reader.get(prefix + name) for name in reader.names(prefix)}

    return RequestRows(
        reader.get("request_id"), _read_pointers(reader), reader.get("catalogue_version"), of("context."),
        Jagged(reader.get("candidates"), reader.group("candidate")),
        of("label."), of("label_mask."), reader.get("weight") if "weight" in reader else None)


def _read_pointers(reader: _Reader) -> Pointers:
    return Pointers(*(reader.get(f"pointers.{name}") for name in ("user_id", "as_of", "version")))


def _write_batch(writer: _Writer, batch: RequestBatch) -> None:
    candidates = writer.group("candidate", batch.candidate_offsets)
    writer.add("request_id", np.asarray(batch.request_id))
    for name, value in batch.request.items():
        if isinstance(value, JaggedTable):
            if value.dictionaries:
                raise ValueError(f"request[{name!r}] holds codes of dictionaries, which differ between readers; "
                                 "materialize it first (semel.examples.materialize)")
            events = writer.group(f"table.{name}", value.offsets)
            for column, values in value.columns.items():
                writer.add(f"table.{name}.column.{column}", values, events)
            for column, values in (value.validity or {}).items():
                writer.add(f"table.{name}.valid.{column}", values, events)
            if value.status is not None:
                writer.add(f"table.{name}.status", value.status)
        elif isinstance(value, Jagged):
            writer.jagged(f"request.{name}", value)
        else:
            writer.add(f"request.{name}", value)
    for name, value in batch.candidate.items():
        if isinstance(value, Jagged):
            writer.jagged(f"candidate.{name}", value, candidates)
        else:
            writer.add(f"candidate.{name}", value, candidates)
    for kind in ("label", "label_mask"):
        for name, value in getattr(batch, kind).items():
            writer.add(f"{kind}.{name}", value, candidates)
    if batch.weight is not None:
        writer.add("weight", batch.weight, candidates)
    if batch.pointers is not None:
        for name in ("user_id", "as_of", "version"):
            writer.add(f"pointers.{name}", getattr(batch.pointers, name))


def _read_batch(reader: _Reader) -> RequestBatch:
    import torch

    request: dict[str, Any] = {name: reader.jagged(f"request.{name}") for name in reader.names("request.")}
    for group in reader.layout.groups:
        if group.startswith("table.") and not group.endswith(LENGTHS):
            columns = {name: reader.get(f"{group}.column.{name}") for name in reader.names(f"{group}.column.")}
            valid = {name: reader.get(f"{group}.valid.{name}") for name in reader.names(f"{group}.valid.")}
            status = reader.get(f"{group}.status") if f"{group}.status" in reader else None
            offsets: Any = reader.group(group)
            if any(map(_is_tensor, columns.values())):
                offsets = torch.from_numpy(offsets)
            request[group.removeprefix("table.")] = JaggedTable(columns, offsets, valid or None, status=status)
    pointers = _read_pointers(reader) if "pointers.user_id" in reader else None
    return RequestBatch(
        reader.get("request_id"), request,
        {name: reader.jagged(f"candidate.{name}") for name in reader.names("candidate.")},
        torch.from_numpy(reader.group("candidate")),
        {name: reader.get(f"label.{name}") for name in reader.names("label.")},
        {name: reader.get(f"label_mask.{name}") for name in reader.names("label_mask.")},
        reader.get("weight") if "weight" in reader else None, pointers)


def _to_numpy(values: Any) -> np.ndarray:
    if not _is_tensor(values):
        return np.asarray(values)
    import torch

    values = values.detach().cpu()
    return values.view(torch.int16).numpy() if values.dtype == torch.bfloat16 else values.numpy()


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as_text(name: str, values: np.ndarray) -> tuple[str, Sequence[str | None]]:
    if values.ndim != 1:
        raise ValueError(f"column {name!r} holds Python objects in {values.ndim} dimensions; exchange takes one")
    if all(value is None or isinstance(value, str) for value in values):
        return TEXT, values  # type: ignore[return-value]
    for value in values:
        if value is not None and type(value) not in (str, int, float, bool):
            raise ValueError(f"column {name!r} holds a {type(value).__name__} ({value!r}), which cannot be exchanged; "
                             "give text, numbers, booleans or None")
    return JSON, [json.dumps(value) for value in values]


def _utf8(texts: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
    """[n] int32 lengths in bytes, -1 for None, and the bytes one after the other."""
    array = pa.array(texts, pa.large_string())
    _, offsets, data = array.buffers()
    if not len(array):
        return np.empty(0, np.int32), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64, len(array) + 1)
    lengths = np.diff(ends).astype(np.int32)
    if array.null_count:
        lengths[~np.asarray(array.is_valid())] = -1
    return lengths, np.frombuffer(data, np.uint8)[: ends[-1]] if data is not None else np.empty(0, np.uint8)


def _from_text(how: str, lengths: np.ndarray, data: np.ndarray) -> np.ndarray:
    offsets = offsets_of(lengths.clip(0))
    valid = pa.array(lengths >= 0).buffers()[1] if (lengths < 0).any() else None
    data = np.ascontiguousarray(data)
    texts = pa.LargeStringArray.from_buffers(len(lengths), pa.py_buffer(offsets), pa.py_buffer(data), valid)
    if how == TEXT:
        return texts.to_numpy(zero_copy_only=False)
    out = np.empty(len(lengths), object)
    decode: Callable[[str], Any] = json.loads
    out[:] = [decode(text) for text in texts.to_pylist()]
    return out
