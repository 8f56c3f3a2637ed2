"""The shapes that flow through everything: jagged arrays, histories, requests and their candidates.

Axis names: ``R`` requests, ``C`` candidates of all requests together, ``P`` pointers, ``L`` history length.
Arrays are numpy or torch; a row of a jagged array is ``values[offsets[row]:offsets[row + 1]]``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

Array: TypeAlias = Any  # numpy.ndarray | torch.Tensor; one alias so that signatures read the same everywhere


def _is_tensor(array: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # another thread may be in the middle of importing it
    return tensor is not None and isinstance(array, tensor)


def _to_torch(array: Array) -> torch.Tensor:
    """The tensor that shares ``array``'s memory where its dtype and flags allow, else a copy."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    array = np.asarray(array)
    if array.dtype == object or array.dtype.kind in "US":
        raise TypeError("strings cannot become a tensor; map them to integers first (semel.features.stable_id)")
    if not array.flags.writeable:  # torch warns about read-only memory and would let a user write into a mapped file
        array = array.copy()
    return torch.from_numpy(np.ascontiguousarray(array))


def _to_numpy(array: Array) -> np.ndarray:
    return array.detach().cpu().numpy() if _is_tensor(array) else np.asarray(array)


@dataclass(frozen=True)
class Jagged:
    """Rows of different lengths. ``values``: [sum(lengths), ...]; ``offsets``: [rows + 1] int64 from 0."""

    values: Array
    offsets: Array

    def __post_init__(self) -> None:
        _check_offsets(self.offsets, len(self.values), "Jagged")

    @classmethod
    def from_rows(cls, rows: Sequence[Any], dtype: Any = None) -> Jagged:
        """From a list of one-dimensional rows (numpy)."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype or np.int64)
        return cls(values, offsets_of([len(a) for a in arrays]))

    @property
    def lengths(self) -> Array:
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a Jagged with {len(self)} rows")
        row %= len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    def slice(self, start: int, stop: int) -> Jagged:
        """Rows ``start`` to ``stop``, their values a view."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def torch(self) -> Jagged:
        return Jagged(_to_torch(self.values), _to_torch(self.offsets))

    def numpy(self) -> Jagged:
        return Jagged(_to_numpy(self.values), _to_numpy(self.offsets))


@dataclass(frozen=True)
class JaggedTable:
    """Histories: many columns, one set of offsets.

    ``columns[name]``: [sum(lengths), ...]. ``validity[name]``: bool of the same first axis, False where the value is
    null (absent when nothing is). ``dictionaries[name]``: the strings that the column's integer codes stand for.
    ``status``: [rows] uint8, why a row may differ from what a request saw (``semel.history.Status``), or None.
    """

    columns: dict[str, Array]
    offsets: Array
    validity: dict[str, Array] | None = None
    dictionaries: dict[str, np.ndarray] | None = None
    status: Array | None = None

    def __post_init__(self) -> None:
        checked = -1
        for name, column in self.columns.items():
            if len(column) != checked:
                _check_offsets(self.offsets, len(column), f"JaggedTable column {name!r}")
                checked = len(column)

    @property
    def lengths(self) -> Array:
        return self.offsets[1:] - self.offsets[:-1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Jagged:
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; this table has {', '.join(self.columns) or 'none'}")
        return Jagged(self.columns[name], self.offsets)

    def row(self, row: int) -> dict[str, Array]:
        """The columns of one history, as views."""
        return {name: self[name][row] for name in self.columns}

    def slice(self, start: int, stop: int) -> JaggedTable:
        """Rows ``start`` to ``stop``, their values views."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return dataclasses.replace(
            self,
            columns={name: column[first:last] for name, column in self.columns.items()},
            offsets=self.offsets[start : stop + 1] - first,
            validity=None if self.validity is None else {n: v[first:last] for n, v in self.validity.items()},
            status=None if self.status is None else self.status[start:stop],
        )

    def strings(self, name: str) -> np.ndarray:
        """A dictionary column's values as strings (object array), None where null."""
        codes = _to_numpy(self.columns[name])
        dictionary = (self.dictionaries or {})[name]
        valid = (self.validity or {}).get(name)
        out = np.empty(len(codes), dtype=object)
        if len(dictionary):
            out[:] = dictionary[np.clip(codes, 0, len(dictionary) - 1)]
        if valid is not None:
            out[~_to_numpy(valid)] = None
        return out

    def torch(self) -> JaggedTable:
        return self._map(_to_torch)

    def numpy(self) -> JaggedTable:
        return self._map(_to_numpy)

    def _map(self, function: Any) -> JaggedTable:
        return dataclasses.replace(
            self,
            columns={name: function(column) for name, column in self.columns.items()},
            offsets=function(self.offsets),
            validity=None if self.validity is None else {n: function(v) for n, v in self.validity.items()},
            status=None if self.status is None else function(self.status),
        )


@dataclass(frozen=True)
class Pointers:
    """The histories that requests saw: ``user_id`` [P] int64 or strings, ``as_of`` [P] and ``version`` [P] int64.

    A pointer sees its user's events with ``event_time < as_of`` (microseconds) and ``version <= version``.
    ``as_of`` and ``version`` may be scalars. Raises ValueError for unequal lengths or ids that are neither integers
    nor strings.
    """

    user_id: np.ndarray
    as_of: np.ndarray
    version: np.ndarray

    def __post_init__(self) -> None:
        users = ids_array(self.user_id, "user_id")
        object.__setattr__(self, "user_id", users)
        for name in ("as_of", "version"):
            value = np.asarray(getattr(self, name))
            if value.dtype.kind not in "iu" and value.size:
                raise ValueError(f"Pointers.{name} must be integers, got dtype {value.dtype}")
            if value.dtype.kind == "u" and value.size and int(value.max()) > np.iinfo(np.int64).max:
                raise ValueError(f"Pointers.{name}: {value.max()} does not fit int64")
            if value.ndim == 0:
                value = value.repeat(len(users))
            if value.shape != users.shape:
                raise ValueError(f"Pointers.{name} has shape {value.shape}, user_id has {users.shape}")
            object.__setattr__(self, name, value.astype(np.int64, copy=False))

    def __len__(self) -> int:
        return len(self.user_id)

    def __getitem__(self, rows: Any) -> Pointers:
        """Some of the pointers: a slice, an index array or a mask (an integer gives a single one)."""
        if isinstance(rows, (int, np.integer)):
            rows = slice(int(rows), int(rows) + 1 or None)
        return Pointers(self.user_id[rows], self.as_of[rows], self.version[rows])

    @property
    def nbytes(self) -> int:
        return self.user_id.nbytes + self.as_of.nbytes + self.version.nbytes


@dataclass(frozen=True)
class RequestRows:
    """Requests before materialization, with pointers in place of histories: what files keep and ranks exchange.

    ``request_id`` [R] strings; ``pointers`` [R]; ``catalogue_version`` [R] int64; ``context[name]`` [R] raw request
    features; ``candidates``: item ids [C] by request; ``label[task]`` [C] float32 with ``label_mask[task]`` [C] bool
    (an unshown candidate has no label, never a negative one); ``weight`` [C] float32 or None. All numpy.
    """

    request_id: np.ndarray
    pointers: Pointers
    catalogue_version: np.ndarray
    context: dict[str, np.ndarray]
    candidates: Jagged
    label: dict[str, np.ndarray]
    label_mask: dict[str, np.ndarray]
    weight: np.ndarray | None = None

    def __post_init__(self) -> None:
        rows = len(self.request_id)
        by_request: dict[str, Sized] = {"pointers": self.pointers, "candidates": self.candidates,
                                        "catalogue_version": self.catalogue_version, **self.context}
        for name, value in by_request.items():
            if len(value) != rows:
                raise ValueError(f"RequestRows.{name} has {len(value)} rows, request_id has {rows}")
        for name, labels in (*self.label.items(), *self.label_mask.items()):
            if len(labels) != len(self.candidates.values):
                count = len(self.candidates.values)
                raise ValueError(f"label {name!r} has {len(labels)} values for {count} candidates")

    def __len__(self) -> int:
        return len(self.request_id)

    def select(self, rows: np.ndarray) -> RequestRows:
        """The requests at ``rows`` (index array), in that order, with their candidates."""
        rows = np.asarray(rows, dtype=np.int64)
        index, offsets = expand_rows(self.candidates.offsets, rows)
        return RequestRows(
            self.request_id[rows], self.pointers[rows], self.catalogue_version[rows],
            {name: value[rows] for name, value in self.context.items()},
            Jagged(self.candidates.values[index], offsets),
            {name: value[index] for name, value in self.label.items()},
            {name: value[index] for name, value in self.label_mask.items()},
            None if self.weight is None else self.weight[index],
        )


@dataclass(frozen=True)
class RequestBatch:
    """Requests with their histories and candidates: what a model maps to logits ``[C]`` or ``[C, tasks]``.

    ``request[name]``: first axis R (tensor, Jagged or the JaggedTable ``history``); ``candidate[name]``: first axis C;
    ``candidate_offsets``: [R + 1] int64, candidates of request r are rows ``offsets[r]:offsets[r + 1]``; ``label`` and
    ``label_mask`` by task: [C]; ``weight``: [C] or None; ``pointers``: what the histories were read through.
    """

    request_id: Array
    request: dict[str, Any]
    candidate: dict[str, Any]
    candidate_offsets: Array
    label: dict[str, Array] = dataclasses.field(default_factory=dict)
    label_mask: dict[str, Array] = dataclasses.field(default_factory=dict)
    weight: Array | None = None
    pointers: Pointers | None = None

    @property
    def requests(self) -> int:
        return len(self.candidate_offsets) - 1

    @property
    def candidates(self) -> int:
        return int(self.candidate_offsets[-1])

    def candidate_to_request(self) -> torch.Tensor:
        """[C] int64: the request of each candidate, sorted."""
        import torch

        lengths = self.candidate_offsets[1:] - self.candidate_offsets[:-1]
        rows = torch.arange(self.requests, device=lengths.device)
        return torch.repeat_interleave(rows, lengths, output_size=self.candidates)

    def slice(self, start: int, stop: int) -> RequestBatch:
        """Requests ``start`` to ``stop`` with their candidates, all values views."""
        first, last = int(self.candidate_offsets[start]), int(self.candidate_offsets[stop])

        def rows(value: Any, a: int, b: int) -> Any:
            return value.slice(a, b) if isinstance(value, (Jagged, JaggedTable)) else value[a:b]

        return RequestBatch(
            self.request_id[start:stop],
            {name: rows(value, start, stop) for name, value in self.request.items()},
            {name: rows(value, first, last) for name, value in self.candidate.items()},
            self.candidate_offsets[start : stop + 1] - first,
            {name: value[first:last] for name, value in self.label.items()},
            {name: value[first:last] for name, value in self.label_mask.items()},
            None if self.weight is None else self.weight[first:last],
            None if self.pointers is None else self.pointers[start:stop],
        )

    def to(self, device: Any) -> RequestBatch:
        """The same batch with its tensors on ``device`` (ids and pointers stay on the host)."""

        def move(value: Any) -> Any:
            if _is_tensor(value):
                return value.to(device, non_blocking=True)
            if isinstance(value, Jagged):
                return Jagged(move(value.values), move(value.offsets))
            if isinstance(value, JaggedTable):
                return value._map(move)
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            return value

        fields = ("request", "candidate", "candidate_offsets", "label", "label_mask", "weight")
        return dataclasses.replace(self, **{name: move(getattr(self, name)) for name in fields})


def offsets_of(lengths: Any) -> np.ndarray:
    """[rows] lengths -> [rows + 1] int64 offsets that start at 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(np.asarray(lengths, dtype=np.int64), out=offsets[1:])
    return offsets


def expand_rows(offsets: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the values of ``rows`` of a jagged array, in that order, and the offsets of the result."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    new = offsets_of(lengths)
    return np.arange(new[-1]) + np.repeat(starts - new[:-1], lengths), new


def ids_array(ids: Any, name: str = "ids") -> np.ndarray:
    """User or item ids as int64 or as an object array of str; ValueError for anything else, null or NaN."""
    array = np.asarray(ids)
    if array.dtype.kind == "U" and not isinstance(ids, np.ndarray):  # which would cut zero bytes off at the end
        array = np.array(ids, object)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: {array.max()} does not fit int64")
    if array.dtype.kind in "iu" or not array.size:
        return array.astype(np.int64, copy=False) if array.dtype.kind != "O" else array
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype == object:
        if all(isinstance(value, str) for value in array):
            return array
        if all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in array):
            try:
                return array.astype(np.int64)
            except OverflowError:
                raise ValueError(f"{name}: {max(array, key=abs)} does not fit int64") from None
    raise ValueError(f"{name} must be integers or strings without nulls, got dtype {array.dtype}")


def _check_offsets(offsets: Array, values: int, where: str) -> None:
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ValueError(f"{where}: offsets must be a vector of rows + 1 numbers, got shape {tuple(offsets.shape)}")
    if _is_tensor(offsets) and offsets.device.type != "cpu":
        return  # reading them would stall the device; they were checked where they were built
    if int(offsets[0]) != 0 or int(offsets[-1]) != values:
        first, last = int(offsets[0]), int(offsets[-1])
        raise ValueError(f"{where}: offsets run from {first} to {last}, values have {values} rows")


def register_pytrees() -> None:
    """Let torch's tree utilities (export, compile, pin_memory) look inside the batch classes. Safe to call again."""
    from torch.utils import _pytree

    for cls in (Jagged, JaggedTable, RequestBatch):
        if cls not in _pytree.SUPPORTED_NODES:
            _register(_pytree, cls)


def _register(pytree: Any, cls: type[Any]) -> None:
    names = [field.name for field in dataclasses.fields(cls)]
    pytree.register_pytree_node(
        cls,
        lambda value: ([getattr(value, name) for name in names], None),
        lambda children, _: cls(*children),
        serialized_type_name=f"semel.batch.{cls.__name__}",
    )
