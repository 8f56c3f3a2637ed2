"""Request rows -> model input. The one function by which training, serving and replay follow a pointer.

One user's raw values mean one int64 everywhere (``semel.features.stable_id``), so that nothing in a model input depends
on the process, the generation or the dictionary it was read through.
"""

from __future__ import annotations

import dataclasses
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows, expand_rows, offsets_of
from semel.examples.checksum import history_checksum
from semel.examples.shared_reads import Histories, read_histories
from semel.features import MISSING, Feature, FeatureSpec, stable_id
from semel.history import HistoryStore, Projection

if TYPE_CHECKING:
    import torch

_RESERVED_REQUEST = ("user_id", "as_of", "history", "history_checksum")
_RESERVED_CANDIDATE = ("item_id",)


def materialize(
    rows: RequestRows, store: HistoryStore, catalogue: HistoryStore | None, features: FeatureSpec, *,
    projection: Projection | None = None, checksum: bool = False, histories: Histories | None = None,
) -> RequestBatch:
    """R request rows with C candidates -> a batch of torch tensors; the same rows give the same batch in any process.

    ``request``: ``user_id`` [R] and ``as_of`` [R] int64, ``history`` (JaggedTable: ``event_time`` and the history
    features, the last ``features.history_last`` events), each request feature, with ``checksum`` also
    ``history_checksum`` [R] (int64 with the bits of ``semel.examples.history_checksum``, over what was read).
    ``candidate``: ``item_id`` [C] and each candidate feature, read from ``catalogue`` as the request saw it. Categories
    are stable ids, ``MISSING`` where null or unknown; numbers float32, NaN where null; many-valued features Jagged.
    A user without events has an empty history. ``label``: all of ``features.tasks``, masked where a row has none.

    ``projection`` overrides which events are read (its ``last``, ``groups``, ``since``), never which columns.
    ``histories``: those of ``rows``, where ``read_ahead`` has read them already. Raises ValueError for features that
    the store or the catalogue lacks; what ``HistoryStore.read`` raises.
    """
    import torch

    if histories is None:
        histories = read_ahead(rows, store, features, projection=projection)
    ids = _ids_of(store)
    request: dict[str, Any] = {
        "user_id": _tensor(stable_id(rows.pointers.user_id), np.int64),
        "as_of": _tensor(rows.pointers.as_of, np.int64),
        "history": histories.spread(history_tensors(histories.events, features, ids)),
    }
    for feature in features.request:
        request[feature.name] = _raw_feature(feature, rows.context.get(feature.name), len(rows))
    if checksum:
        request["history_checksum"] = torch.from_numpy(history_checksum(histories.table(), ids.categorical)
                                                       .view(np.int64))
    candidate: dict[str, Any] = {"item_id": _tensor(stable_id(rows.candidates.values), np.int64),
                                 **_candidate_features(rows, catalogue, features)}
    count = len(rows.candidates.values)
    label, mask = {}, {}
    for task in features.tasks:
        found = rows.label.get(task.name)
        label[task.name] = torch.zeros(count) if found is None else _tensor(found, np.float32)
        mask[task.name] = torch.zeros(count, dtype=torch.bool) if found is None \
            else _tensor(rows.label_mask[task.name], np.bool_)
    return RequestBatch(
        rows.request_id, request, candidate, _tensor(rows.candidates.offsets, np.int64), label, mask,
        None if rows.weight is None else _tensor(rows.weight, np.float32), rows.pointers,
    )


def item_features(items: np.ndarray, as_of: int, catalogue: HistoryStore, features: FeatureSpec) -> dict[str, Any]:
    """What ``candidate`` of a batch holds of ``items`` [C] as of a moment (microseconds), with what is known now:
    ``item_id`` and each candidate feature. Raises ValueError for features that the catalogue lacks."""
    nobody = np.zeros(1, np.int64)
    rows = RequestRows(np.array([""], object), Pointers(nobody, np.array([as_of]), nobody),
                       np.array([catalogue.version]), {}, Jagged(items, offsets_of([len(items)])), {}, {})
    found = {"item_id": _tensor(stable_id(items), np.int64)}
    return found | _candidate_features(rows, catalogue, features) if features.candidate else found


def read_ahead(rows: RequestRows, store: HistoryStore, features: FeatureSpec, *,
               projection: Projection | None = None) -> Histories:
    """The first half of ``materialize``: read the histories of ``rows``, each user's events once where its requests
    can share them. Raises ValueError for features that the store lacks; what ``HistoryStore.read`` raises."""
    return read_histories(store, rows.pointers, _history_projection(store, features, projection))


def history_tensors(histories: JaggedTable, features: FeatureSpec, ids: StableIds | None = None) -> JaggedTable:
    """A store's histories as a model reads them: ``event_time`` int64, categories as stable ids, numbers float32;
    torch, no dictionaries. ``ids`` keeps the ids of a store's dictionaries between calls."""
    ids = ids or StableIds()
    columns = {"event_time": _tensor(histories.columns["event_time"], np.int64)}
    for feature in features.history:
        columns[feature.name] = _tensor(_column(histories, feature, ids))
    status = None if histories.status is None else _tensor(histories.status, np.uint8)
    return JaggedTable(columns, _tensor(histories.offsets, np.int64), status=status)


class StableIds:
    """Stable ids of a store's dictionaries, each string hashed once: a dictionary only ever grows at its end."""

    def __init__(self) -> None:
        self._single: dict[str, np.ndarray] = {}
        self._many: dict[str, Jagged] = {}

    def categorical(self, column: str, dictionary: np.ndarray) -> np.ndarray:
        """[len(dictionary)] int64."""
        known = self._single.get(column)
        if known is None or len(known) < len(dictionary):
            start = 0 if known is None else len(known)
            new = stable_id(np.asarray(dictionary[start:], dtype=object))
            known = new if known is None else np.concatenate([known, new])
            self._single[column] = known
        return known

    def multi(self, column: str, dictionary: np.ndarray) -> Jagged:
        """For each string of the dictionary the ids of its parts between ``|``."""
        known = self._many.get(column)
        if known is None or len(known) < len(dictionary):
            start = 0 if known is None else len(known)
            new = split_many(dictionary[start:])
            if known is not None:
                new = Jagged(np.concatenate([known.values, new.values]),
                             np.concatenate([known.offsets, new.offsets[1:] + known.offsets[-1]]))
            known = self._many[column] = new
        return known


def split_many(texts: Any) -> Jagged:
    """Strings of values joined by ``|`` (None: no value) -> stable ids of the values, Jagged."""
    parts = [text.split("|") if text else [] for text in texts]
    flat = np.array([part for row in parts for part in row], dtype=object)
    return Jagged(stable_id(flat), offsets_of([len(row) for row in parts]))


_OF_STORE: weakref.WeakKeyDictionary[HistoryStore, StableIds] = weakref.WeakKeyDictionary()


def _ids_of(store: HistoryStore) -> StableIds:
    ids = _OF_STORE.get(store)
    return _OF_STORE.setdefault(store, StableIds()) if ids is None else ids


@lru_cache(maxsize=64)
def _default_projection(features: FeatureSpec) -> Projection:
    multi = [feature.name for feature in features.history if feature.kind == "multi"]
    if multi:
        raise ValueError(f"history feature {multi[0]!r} is multi; events hold one value (categorical or numeric)")
    taken = [feature.name for feature in features.request if feature.name in _RESERVED_REQUEST]
    taken += [feature.name for feature in features.candidate if feature.name in _RESERVED_CANDIDATE]
    if taken:
        raise ValueError(f"feature {taken[0]!r}: every batch has this name already; leave it out of the FeatureSpec")
    names = dict.fromkeys(["event_time", *(feature.name for feature in features.history)])
    return Projection(columns=tuple(names), last=features.history_last)


def _history_projection(store: HistoryStore, features: FeatureSpec, given: Projection | None) -> Projection:
    projection = _default_projection(features)
    for name in projection.columns:
        if name != "event_time" and name not in store.schema.columns:
            raise ValueError(f"history feature {name!r} is not a column of the store at {store.path}; it has "
                             f"{', '.join(store.schema.columns)}")
    if given is None:
        return projection
    return dataclasses.replace(given, columns=projection.columns)


def _candidate_features(rows: RequestRows, catalogue: HistoryStore | None, features: FeatureSpec) -> dict[str, Any]:
    lengths = rows.candidates.lengths
    return catalogue_features(rows.candidates.values, np.repeat(rows.pointers.as_of, lengths),
                              np.repeat(rows.catalogue_version, lengths), catalogue, features)


def catalogue_features(items: np.ndarray, as_of: Any, version: Any, catalogue: HistoryStore | None,
                       features: FeatureSpec) -> dict[str, Any]:
    """The candidate features of ``items`` [C] (raw ids) as ``materialize`` gives them, read as of ``as_of`` and
    ``version``, each [C] or one for all. Raises ValueError for features that the catalogue lacks."""
    if not features.candidate:
        return {}
    if catalogue is None:
        raise ValueError(f"candidate feature {features.candidate[0].name!r} needs a catalogue, none was given")
    for feature in features.candidate:
        if feature.name not in catalogue.schema.columns:
            raise ValueError(f"candidate feature {feature.name!r} is not a column of the catalogue at "
                             f"{catalogue.path}; it has {', '.join(catalogue.schema.columns)}")
    columns = tuple(feature.name for feature in features.candidate)
    found = catalogue.read(Pointers(items, as_of, version), Projection(columns=columns, last=1))
    known = np.diff(found.offsets) > 0
    ids = _ids_of(catalogue)
    return {feature.name: _candidate_column(found, feature, ids, known) for feature in features.candidate}


def _candidate_column(found: JaggedTable, feature: Feature, ids: StableIds, known: np.ndarray) -> torch.Tensor | Jagged:
    if feature.kind == "multi":
        dictionary = (found.dictionaries or {}).get(feature.name)
        if dictionary is None:
            raise ValueError(f"candidate feature {feature.name!r} is multi; its column must hold strings joined by '|'")
        many = ids.multi(feature.name, dictionary)
        valid = (found.validity or {}).get(feature.name)
        present = known.copy()
        if valid is not None:
            present[known] = valid
        code = found.columns[feature.name] if valid is None else found.columns[feature.name][valid]
        index, _ = expand_rows(many.offsets, code.astype(np.int64))
        lengths = np.zeros(len(known), dtype=np.int64)
        lengths[present] = many.lengths[code]
        return Jagged(many.values[index], offsets_of(lengths)).torch()
    values = _column(found, feature, ids)
    if known.all():
        return _tensor(values)
    out = np.full((len(known), *values.shape[1:]), np.nan if feature.kind == "numeric" else MISSING, dtype=values.dtype)
    out[known] = values
    return _tensor(out)


def _column(table: JaggedTable, feature: Feature, ids: StableIds) -> np.ndarray:
    """One column of a store's rows: int64 stable ids or float32."""
    column = table.columns[feature.name]
    dictionary = (table.dictionaries or {}).get(feature.name)
    valid = (table.validity or {}).get(feature.name)
    if feature.kind == "numeric":
        if dictionary is not None:
            raise ValueError(f"feature {feature.name!r} is numeric, but its column holds strings")
        out = column.astype(np.float32, copy=valid is not None)
        if valid is not None:
            out[~valid] = np.nan
        return out
    if dictionary is not None:
        known = ids.categorical(feature.name, dictionary)
        out = known[np.clip(column, 0, len(known) - 1) if valid is not None else column] if len(known) \
            else np.full(len(column), MISSING, dtype=np.int64)
    else:
        out = stable_id(column)
    if valid is not None:
        out = np.where(valid, out, MISSING)
    return out


def _raw_feature(feature: Feature, values: np.ndarray | None, rows: int) -> torch.Tensor | Jagged:
    """A request feature from raw context values; absent altogether: null for all rows."""
    import torch

    if feature.kind == "multi":
        return split_many([None] * rows if values is None else values).torch()
    if feature.kind == "numeric":
        if values is None:
            return torch.full((rows,), float("nan"))
        try:
            return _tensor([np.nan if v is None else v for v in values] if values.dtype == object else values,
                           np.float32)
        except (TypeError, ValueError):
            raise ValueError(f"context.{feature.name} must hold numbers") from None
    if values is None:
        return torch.full((rows,), MISSING, dtype=torch.int64)
    return _tensor(stable_id(values), np.int64)


def _tensor(array: Any, dtype: Any = None) -> torch.Tensor:
    """A tensor that shares the array's memory where that may be written to."""
    import torch

    array = np.ascontiguousarray(array, dtype=dtype)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
