"""What a request must satisfy beyond its JSON types; the same for HTTP and for calls in process."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from semel.features import Feature, FeatureSpec
from semel.serving.errors import InvalidRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)


def show(value: Any, limit: int = 60) -> str:
    """A value as it may stand in an error or a log line: JSON-quoted, so that no line can be forged, and short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def check_id(value: Any, field: str, string: bool) -> int | str:
    """A user or item id of the store's type: an int64 or a string of 1 to 1,024 bytes."""
    if string:
        if not isinstance(value, str):
            raise InvalidRequest(field, f"ids of this store are strings, got {show(value)}")
        if not 0 < _utf8_length(value, field) <= 1024:
            raise InvalidRequest(field, f"an id has 1 to 1,024 bytes, got {show(value)}")
        return str(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidRequest(field, f"ids of this store are integers, got {show(value)}")
    if not INT64_MIN <= value <= INT64_MAX:
        raise InvalidRequest(field, f"{show(int(value))} does not fit int64")
    return int(value)


def check_candidates(candidates: Any, string: bool, most: int) -> np.ndarray:
    """[C] item ids, int64 or object: distinct, at least one, at most ``most``. Raises InvalidRequest."""
    values = candidates.tolist() if isinstance(candidates, np.ndarray) else list(candidates)
    if not values:
        raise InvalidRequest("candidates", "there must be at least one candidate")
    if len(values) > most:
        raise InvalidRequest("candidates", f"{len(values)} candidates, at most {most} are scored in one request")
    kind = str if string else int
    plain = not string and set(map(type, values)) == {int} and min(values) >= INT64_MIN and max(values) <= INT64_MAX
    if not plain:  # find the one that is wrong, or make plain integers of numpy's
        values = [check_id(value, f"candidates.{index}", string) for index, value in enumerate(values)]
    if len(set(values)) < len(values):
        seen: set[Any] = set()
        for index, value in enumerate(values):
            if value in seen:
                raise InvalidRequest(f"candidates.{index}", f"item {show(value)} is given twice")
            seen.add(value)
    return np.array(values, dtype=object if kind is str else np.int64)


def check_context(features: FeatureSpec, context: Any) -> dict[str, Any]:
    """The request's context: the model's request features in their types, anything else as long as it is JSON."""
    if context is None:
        return {}
    if not isinstance(context, dict):
        raise InvalidRequest("context", f"must be an object, got {show(context)}")
    known = {feature.name: feature for feature in features.request}
    return {key: _context_value(known.get(key), value, f"context.{key}") for key, value in context.items()
            if isinstance(key, str) or _refuse_key(key)}


def _refuse_key(key: Any) -> bool:
    raise InvalidRequest("context", f"its keys must be strings, got {show(key)}")


def _context_value(feature: Feature | None, value: Any, field: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if feature is None:
        try:
            json.dumps(value, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(field, f"cannot be logged as JSON: {error}") from None
        return value
    from semel.examples.context import context_value

    if isinstance(value, str):
        _utf8_length(value, field)
    if feature.kind == "numeric" and isinstance(value, (int, float)) and not abs(value) <= FLOAT32_MAX:
        raise InvalidRequest(field, f"must be a finite number that fits float32, got {show(value)}")
    try:
        context_value(feature, value)
    except ValueError as error:
        raise InvalidRequest(field, str(error).removeprefix(field).strip()[:200]) from None
    return value


def check_limit(limit: Any) -> int | None:
    """How many results are wanted: None for all."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, np.integer)) or limit < 1:
        raise InvalidRequest("limit", f"must be an integer of at least 1, got {show(limit)}")
    return int(limit)


def check_as_of(as_of: Any, now: int) -> int:
    """The time as of which the history is read: ``now`` when not given, never later."""
    if as_of is None:
        return now
    if isinstance(as_of, bool) or not isinstance(as_of, (int, np.integer)) or as_of < 0:
        raise InvalidRequest("as_of", f"must be microseconds since 1970, got {show(as_of)}")
    if as_of > now:
        raise InvalidRequest("as_of", f"{as_of} lies {(as_of - now) / 1e6:.1f} s in the future; a request can only see "
                                      "what has happened (microseconds since 1970)")
    return int(as_of)


def _utf8_length(value: str, field: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, f"{show(value)} is not valid Unicode") from None
