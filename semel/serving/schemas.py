"""The JSON bodies of the API for one store: its id types and columns as pydantic validators.

TypedDicts and not models: column names are the data's own (``copy``, ``model_x``, ``_y``), an omitted column and a
null differ, and the validated rows are plain dicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Required

import pyarrow as pa
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from semel.serving.checks import FLOAT32_MAX, INT64_MAX, INT64_MIN, show
from semel.serving.errors import InvalidRequest
from semel.serving.filters import MOST_BLOCKED
from semel.serving.requests import MOST_RETRIEVED, PRERANKED, RECOMMENDED, RETRIEVED, STAGES

MAX_FUTURE_US = 24 * 3600 * 1_000_000
"""How far ahead of the server's clock an ``event_time`` may lie: clients' clocks are wrong, but not by more."""

_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_INT64 = Annotated[int, Field(strict=True, ge=INT64_MIN, le=INT64_MAX)]
_TIME = Annotated[int, Field(strict=True, ge=0, le=INT64_MAX, description="microseconds since 1970; now if omitted")]
_ID_TEXT = Annotated[str, Field(strict=True, min_length=1, max_length=1024)]
_KEY_TEXT = Annotated[str, Field(strict=True, min_length=1, max_length=256)]


def _record(name: str, fields: dict[str, Any], doc: str) -> Any:
    typed_dict: Any = TypedDict  # Any: the fields are known at run time only
    record = typed_dict(name, fields, total=False)
    record.__pydantic_config__ = _STRICT
    record.__doc__ = doc
    return record


def _column(kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return Annotated[bool, Field(strict=True)]
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        signed = pa.types.is_signed_integer(kind)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return Annotated[int, Field(strict=True, ge=low, le=high)]
    if pa.types.is_floating(kind):
        most = FLOAT32_MAX if kind.bit_width == 32 else 65504.0 if kind.bit_width == 16 else None
        low_f, high_f = (None, None) if most is None else (-most, most)
        return Annotated[float, Field(strict=True, ge=low_f, le=high_f, allow_inf_nan=False)]
    if pa.types.is_dictionary(kind):
        return _column(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Annotated[str, Field(strict=True)]
    if pa.types.is_timestamp(kind):
        return Annotated[_INT64, Field(description=f"{kind.unit} since 1970")]
    if pa.types.is_fixed_size_list(kind):
        values: Any = list[_column(kind.value_type)]  # type: ignore[misc]
        return Annotated[values, Field(min_length=kind.list_size, max_length=kind.list_size)]
    raise ValueError(f"columns of type {kind} cannot be sent as JSON")


def _list_of(item: Any, most: int, description: str | None = None) -> Any:
    return Annotated[list[item], Field(min_length=1, max_length=most, description=description)]


def is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def id_type(kind: pa.DataType) -> Any:
    return _ID_TEXT if is_string(kind) else _INT64


@dataclass(frozen=True)
class Body:
    """One request body: how its bytes become a dict, and its JSON schema for the documentation. ``known``: the fields
    that an error about an unknown one lists."""

    name: str
    adapter: TypeAdapter
    known: tuple[str, ...] = ()

    def parse(self, body: bytes) -> dict[str, Any]:
        """The validated object. Raises InvalidRequest that names the first field that is wrong."""
        try:
            return self.adapter.validate_json(body)
        except ValidationError as error:
            raise _invalid(error, self.known) from None


def rank_body(user: pa.DataType, item: pa.DataType, max_candidates: int, name: str = "RankRequest") -> Body:
    """``POST /v1/rank`` and ``/v1/prerank``."""
    fields = {
        **_asked(user, item),
        "candidates": Required[_list_of(id_type(item), max_candidates,
                                        "distinct item ids; unknown ones are scored too")],
        "limit": NotRequired[Annotated[int, Field(strict=True, ge=1)] | None],
    }
    record = _record(name, fields, "Candidates to score for one user.")
    return Body(name, TypeAdapter(record), (*fields, *_DIVERSITY))


def retrieve_body(user: pa.DataType, item: pa.DataType) -> Body:
    """``POST /v1/retrieve``."""
    fields = {**_asked(user, item), "limit": _count("how many items are wanted", RETRIEVED), "budget_ms": _BUDGET}
    record = _record("RetrieveRequest", fields, "The best items of the catalogue for one user.")
    return Body("RetrieveRequest", TypeAdapter(record), (*fields, *_DIVERSITY))


def recommend_body(user: pa.DataType, item: pa.DataType) -> Body:
    """``POST /v1/recommend``."""
    size = {"candidates": _count("how many the stage passes on", None), "budget_ms": _BUDGET}
    fields = {
        **_asked(user, item),
        "limit": _count("how many items are wanted", RECOMMENDED),
        "retrieve": NotRequired[_record("RetrieveSize", size, f"The first stage; {RETRIEVED} candidates.") | None],
        "prerank": NotRequired[_record("PrerankSize", size, f"The second stage; {PRERANKED} candidates. Only where the "
                                                            "server has a model for it.") | None],
        "rank": NotRequired[_record("RankSize", {"budget_ms": _BUDGET}, "The last stage; it gives ``limit``.") | None],
    }
    record = _record("RecommendRequest", fields, "Retrieve, prerank and rank in one request.")
    return Body("RecommendRequest", TypeAdapter(record), (*fields, *size, *_DIVERSITY))


_DIVERSITY = ("column", "most")
_BUDGET: Any = NotRequired[Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False,
                                                  description="milliseconds")] | None]


def _count(description: str, default: int | None) -> Any:
    says = description if default is None else f"{description}; {default} if omitted"
    return NotRequired[Annotated[int, Field(strict=True, ge=1, le=MOST_RETRIEVED, description=says)] | None]


def _asked(user: pa.DataType, item: pa.DataType) -> dict[str, Any]:
    """What every request for items may say."""
    diversity = _record("Diversity", {
        "column": Required[Annotated[str, Field(strict=True, min_length=1, max_length=256)]],
        "most": NotRequired[Annotated[int, Field(strict=True, ge=1, le=INT64_MAX)]],
    }, "At most `most` (1) items of one value of the catalogue's column.")
    return {
        "user_id": Required[id_type(user)],
        "context": NotRequired[Annotated[dict[str, Any] | None, Field(description="the model's request features")]],
        "as_of": NotRequired[Annotated[int, Field(strict=True, ge=0, le=INT64_MAX,
                                                  description="microseconds since 1970, not in the future: the history "
                                                              "is read as of then; now if omitted")] | None],
        "exclude_seen": NotRequired[Annotated[bool, Field(
            strict=True, description="leave out what is in the user's history")] | None],
        "blocked": NotRequired[Annotated[list[id_type(item)], Field(  # type: ignore[misc]
            max_length=MOST_BLOCKED, description="item ids to leave out")] | None],
        "diversity": NotRequired[diversity | None],
    }


def models_body() -> Body:
    """``POST /v1/models``."""
    fields = {
        "stage": NotRequired[Annotated[str, Field(strict=True, json_schema_extra={"enum": list(STAGES)})]],
        "version": NotRequired[Annotated[_KEY_TEXT, Field(description="an available one, `latest` or `previous`")]],
        "run": NotRequired[Annotated[_KEY_TEXT, Field(description="the name of a run beside the one that serves")]],
    }
    record = _record("ModelsRequest", fields, "What should serve a stage (`rank`): either a version or a run.")
    return Body("ModelsRequest", TypeAdapter(record), tuple(fields))


def events_body(key: str, key_type: pa.DataType, columns: Mapping[str, pa.DataType], required: tuple[str, ...],
                many: str, one: str, idempotent: bool, max_rows: int = 10_000) -> Body:
    """Rows for a store whose key column is ``key``: ``{many: [{key, event_time?, columns..., event_key?}]}``.

    ``required`` columns must be there; others may be omitted (null in the store), and an explicit null is refused.
    """
    fields: dict[str, Any] = {key: Required[id_type(key_type)], "event_time": NotRequired[_TIME]}
    for name, kind in columns.items():
        if name in fields:
            continue
        column = id_type(kind) if name in required else _column(kind)
        fields[name] = Required[column] if name in required else NotRequired[column]
    if idempotent and "event_key" not in fields:
        fields["event_key"] = NotRequired[Annotated[_KEY_TEXT, Field(
            description="makes the event idempotent: a second one of the same user and key is a duplicate")]]
    record = _record(one, fields, f"One row of {many}.")
    name = many.capitalize() + "Request"
    body = _record(name, {many: Required[_list_of(record, max_rows)]}, f"Rows to append: {many}.")
    return Body(name, TypeAdapter(body), tuple(fields))


def outcomes_body(item: pa.DataType, binary: dict[str, bool], max_rows: int = 10_000) -> Body:
    """``POST /v1/outcomes``; labels only for tasks that the model has (``binary`` by name: 0 or 1, else a number), so
    that a typo is not a lost label."""
    number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
    flag = Annotated[number, AfterValidator(_zero_or_one), Field(json_schema_extra={"enum": [0, 1]})]
    label = _record("Label", {name: NotRequired[flag if is_flag else number] for name, is_flag in binary.items()},
                    "A number by task.")
    outcome = _record("Outcome", {
        "request_id": Required[_KEY_TEXT],
        "item_id": Required[id_type(item)],
        "label": Required[Annotated[label, AfterValidator(_not_empty)]],
        "outcome_key": NotRequired[Annotated[_KEY_TEXT, Field(
            description="makes the outcome idempotent: a second one with this key is a duplicate")]],
    }, "What the user did with one candidate of one request.")
    body = _record("OutcomesRequest", {"outcomes": Required[_list_of(outcome, max_rows)]}, "Outcomes to log.")
    return Body("OutcomesRequest", TypeAdapter(body), ("request_id", "item_id", "label", "outcome_key", *binary))


def _zero_or_one(value: float) -> float:
    if value not in (0.0, 1.0):
        raise PydanticCustomError("zero_or_one", "must be 0 or 1")
    return value


def _not_empty(label: dict[str, float]) -> dict[str, float]:
    if not label:
        raise PydanticCustomError("empty", "must have a value for at least one task")
    return label


def rows_table(rows: list[dict[str, Any]], key: str, key_type: pa.DataType, columns: Mapping[str, pa.DataType],
               now: int, where: str) -> pa.Table:
    """Validated rows as the table a store appends: the key, ``event_time`` (``now`` where omitted), every column.

    Raises InvalidRequest for an ``event_time`` more than a day ahead of ``now``.
    """
    times = [row.get("event_time", now) for row in rows]
    for index, time in enumerate(times):
        if time > now + MAX_FUTURE_US:
            raise InvalidRequest(f"{where}.{index}.event_time",
                                 f"{time} lies more than a day in the future (microseconds since 1970 are meant)")
    arrays = {key: pa.array([row[key] for row in rows], type=key_type), "event_time": pa.array(times, type=pa.int64())}
    for name, kind in columns.items():
        if name not in arrays:
            arrays[name] = pa.array([row.get(name) for row in rows], type=kind)
    return pa.table(arrays)


_MESSAGES = {
    "missing": "is required", "int_type": "must be an integer", "float_type": "must be a number",
    "string_type": "must be a string", "bool_type": "must be true or false", "list_type": "must be a list",
    "dict_type": "must be an object", "finite_number": "must be a finite number",
    "greater_than": "must be above {gt}", "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} values, it has {actual_length}",
    "too_long": "must have at most {max_length} values, it has {actual_length}",
    "extra_forbidden": "is not a field here", "json_invalid": "not valid JSON: {error}",
}
_SAY_NO_VALUE = ("missing", "json_invalid", "too_short", "too_long", "extra_forbidden")


def _invalid(error: ValidationError, known: tuple[str, ...]) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "body"
    kind = first["type"]
    message = _MESSAGES[kind].format(**first.get("ctx", {})) if kind in _MESSAGES else first["msg"]
    if kind == "extra_forbidden" and known:
        message += f"; there are {', '.join(known)}"
    if kind not in _SAY_NO_VALUE:
        message += f", got {show(first['input'])}"
    return InvalidRequest(show(field, 200)[1:-1], message)
