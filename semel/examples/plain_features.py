"""A ``FeatureSpec`` for who has none: everything that a projection, a catalogue and request rows name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from semel.batch import RequestRows
from semel.features import Feature, FeatureSpec, Task
from semel.history import HistoryStore, Projection
from semel.history.schema import RESERVED, EventSchema


def plain_features(rows: RequestRows, projection: Projection | None, store: HistoryStore,
                   catalogue: HistoryStore | None = None) -> FeatureSpec:
    """Floats are numeric, all else is categorical: the projection's columns, each context column of ``rows`` (which may
    have no rows), each column of the catalogue; a binary task for each label. Raises ValueError where there is no
    projection, or it names no column of the store."""
    if projection is None:
        raise ValueError("RequestLoader needs a projection, which says what is read of a history, or features")
    names = [name for name in projection.columns if name not in RESERVED]
    unknown = [name for name in names if name not in store.schema.columns]
    if unknown or not names:
        raise ValueError(f"the projection names {unknown or 'no column of an event'}; the store at {store.path} has "
                         f"{', '.join(store.schema.columns)}")
    return FeatureSpec(
        _of_store(names, store.schema),
        tuple(Feature(name, "numeric" if np.asarray(values).dtype.kind == "f" else "categorical")
              for name, values in rows.context.items()),
        () if catalogue is None else _of_store(catalogue.schema.columns, catalogue.schema),
        tuple(Task(name) for name in rows.label),
        history_last=projection.last or 1,  # the projection decides
        item="item_id" if "item_id" in names else names[0])


def _of_store(names: Iterable[str], schema: EventSchema) -> tuple[Feature, ...]:
    return tuple(Feature(name, "numeric" if schema.layout[name].dtype.kind == "f" else "categorical")
                 for name in names)
