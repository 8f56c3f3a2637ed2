"""What an answer must not hold: checked, and turned into ids and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.serving.checks import check_id, show
from semel.serving.errors import InvalidRequest
from semel.serving.requests import Diversity, Filters

if TYPE_CHECKING:
    from semel.batch import Pointers
    from semel.history import HistoryStore

MOST_BLOCKED = 10_000


def check_filters(filters: Filters, string_items: bool, catalogue: HistoryStore | None) -> Filters:
    """``filters`` with ``blocked`` as an array of ids of the store's type. Raises InvalidRequest."""
    if not isinstance(filters.exclude_seen, (bool, np.bool_)):
        raise InvalidRequest("exclude_seen", f"must be true or false, got {show(filters.exclude_seen)}")
    return Filters(bool(filters.exclude_seen), _blocked(filters.blocked, string_items),
                   _diversity(filters.diversity, catalogue))


def _blocked(blocked: Any, string: bool) -> np.ndarray:
    if isinstance(blocked, (str, bytes)) or not isinstance(blocked, (Sequence, np.ndarray)):
        raise InvalidRequest("blocked", f"must be a list of item ids, got {show(blocked)}")
    if len(blocked) > MOST_BLOCKED:
        raise InvalidRequest("blocked", f"{len(blocked)} ids, at most {MOST_BLOCKED:,} can be blocked in one request")
    values = [check_id(value, f"blocked.{index}", string) for index, value in enumerate(blocked)]
    return np.array(values, dtype=object if string else np.int64)


def _diversity(diversity: Any, catalogue: HistoryStore | None) -> Diversity | None:
    if diversity is None:
        return None
    if isinstance(diversity, dict):
        try:
            diversity = Diversity(**diversity)
        except TypeError:
            raise InvalidRequest("diversity", f"must have a column and may have most, got {show(diversity)}") from None
    if not isinstance(diversity, Diversity):
        raise InvalidRequest("diversity", f"must name a column, got {show(diversity)}")
    most = diversity.most
    if isinstance(most, bool) or not isinstance(most, (int, np.integer)) or most < 1:
        raise InvalidRequest("diversity.most", f"must be an integer of at least 1, got {show(most)}")
    columns = {} if catalogue is None else catalogue.schema.columns
    if not isinstance(diversity.column, str) or diversity.column not in columns:
        raise InvalidRequest("diversity.column", f"{show(diversity.column)} is not a column of the catalogue; it has "
                                                 f"{', '.join(columns) or 'none, since there is no catalogue'}")
    import pyarrow as pa

    if pa.types.is_fixed_size_list(columns[diversity.column]):
        raise InvalidRequest("diversity.column", f"{show(diversity.column)} holds vectors, which are no categories")
    return Diversity(diversity.column, int(most))


def seen_items(store: HistoryStore, pointer: Pointers, item: str) -> np.ndarray:
    """The distinct items of one user's history: the whole of it, as the request sees it."""
    from semel.history import Projection

    return _distinct(store.read(pointer, Projection((item,))), item)


def column_values(catalogue: HistoryStore, ids: np.ndarray, column: str, as_of: int, version: int) -> np.ndarray:
    """[N] int64: equal where ``ids`` have the same value in ``column``, -1 where there is none."""
    from semel.batch import Pointers
    from semel.history import Projection

    found = catalogue.read(Pointers(ids, np.array(as_of), np.array(version)), Projection((column,), last=1))
    out = np.full(len(ids), -1, np.int64)
    valid = (found.validity or {}).get(column)
    values = np.unique(found.columns[column], return_inverse=True)[1]
    out[found.lengths > 0] = values if valid is None else np.where(valid, values, -1)
    return out


def _distinct(histories: Any, item: str) -> np.ndarray:
    column = histories.columns[item]
    valid = (histories.validity or {}).get(item)
    values = np.unique(column if valid is None else column[valid])
    dictionary = (histories.dictionaries or {}).get(item)
    return values if dictionary is None else np.asarray(dictionary, object)[values]
