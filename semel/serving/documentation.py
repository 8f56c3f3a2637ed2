"""The OpenAPI document: bodies are validated by ``schemas`` and not by FastAPI, so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from semel.serving.schemas import Body

_REF = "#/components/schemas/{model}"
_NUMBER, _INTEGER, _STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
_ID = {"anyOf": [_INTEGER, _STRING]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TIMINGS = {"type": "object", "additionalProperties": _NUMBER}
_COUNTS = {"type": "object", "additionalProperties": _INTEGER,
           "description": "items that came in, were scored, went out"}
_SCORED: dict[str, Any] = {
    "request_id": _STRING, "model_version": _STRING,
    "pointer": _object(user_id=_ID, as_of=_INTEGER, version=_INTEGER),
    "results": {"type": "array", "items": _object(item_id=_ID, score=_NUMBER), "description": "best first"},
    "timings_ms": _TIMINGS,
}
_STAGE = _object(stage=_STRING, model_version=_STRING, counts=_COUNTS, timings_ms=_TIMINGS, cut=_INTEGER)
_SERVED = _object(version=_STRING, run=_STRING, since=_INTEGER)
_MODELS = _object(
    stages={"type": "object", "additionalProperties": _object(
        current=_SERVED, before={"type": "array", "items": _SERVED}, pinned={"type": "boolean"})},
    available={"type": "array", "items": _object(version=_STRING, run=_STRING, kind=_STRING, saved_at=_INTEGER)})
_ANSWERS = {
    "models": _MODELS,
    **{name: _object(**_SCORED, counts=_COUNTS) for name in ("retrieve", "prerank", "rank")},
    "recommend": _object(**_SCORED, stages={"type": "array", "items": _STAGE}),
    "events": _object(version=_INTEGER, accepted=_INTEGER, duplicates=_INTEGER),
    "items": _object(version=_INTEGER, accepted=_INTEGER, duplicates=_INTEGER),
    "outcomes": _object(accepted=_INTEGER, duplicates=_INTEGER),
}
_ERROR = _object(error=_object(field={"anyOf": [_STRING, {"type": "null"}]}, message=_STRING))
_FAILURES = {"401": "The token is missing or wrong", "403": "The Host header names another machine",
             "408": "The body did not arrive in time",
             "413": "The body is too large", "422": "The request is wrong; `field` says where",
             "500": "The server or the model failed", "503": "Overloaded or unable to write; see Retry-After"}


def document(app: FastAPI, bodies: dict[str, Body]) -> None:
    """Make ``app.openapi()`` describe the bodies and answers of ``/v1/NAME`` for every name in ``bodies``."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        spec = generate()
        schemas = spec.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = _ERROR
        failures = {code: {"description": text, "content": _content({"$ref": _REF.format(model="Error")})}
                    for code, text in _FAILURES.items()}
        for name, answer in _ANSWERS.items():
            operation = spec["paths"][f"/v1/{name}"]["post"]
            operation["responses"] = {"200": {"description": "Done", "content": _content(answer)}, **failures}
            if name in bodies:
                body = bodies[name]
                schema = body.adapter.json_schema(ref_template=_REF)
                schemas.update(schema.pop("$defs", {}))
                schemas[body.name] = schema
                operation["requestBody"] = {"required": True,
                                            "content": _content({"$ref": _REF.format(model=body.name)})}
        spec["paths"]["/v1/models"]["get"]["responses"] = {
            "200": {"description": "Done", "content": _content(_MODELS)}, **{
                code: failure for code, failure in failures.items() if code in ("401", "403")}}
        return spec

    app.openapi = openapi  # type: ignore[method-assign]


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
