"""The HTTP client: typed results, errors that carry the server's message, retries that cannot count twice."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from semel.serving.results import Id, RankResult

_RETRY_CAP_SECONDS = 5.0


class ServerError(RuntimeError):
    """The server refused a request. ``status``: the HTTP code; ``field``: what is wrong (``candidates.3``), or None;
    ``message``: the server's own words."""

    def __init__(self, status: int, field: str | None, message: str):
        super().__init__(f"HTTP {status}: {field + ': ' if field else ''}{message}")
        self.status, self.field, self.message = status, field, message


@dataclass(frozen=True)
class WriteResult:
    """``accepted``, ``duplicates``: rows (labels for outcomes). ``version``: of the store, None for outcomes."""

    accepted: int
    duplicates: int
    version: int | None = None


class Client:
    """Talks to ``semel serve``. Thread-safe; a context manager.

    ``timeout``: seconds for one attempt. ``retries``: further attempts after a 503 (waiting as long as the server asks)
    or when no connection could be made. Events and outcomes without a key get one, so that an attempt whose answer was
    lost is not counted twice when it is made again.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8080", token: str | None = None, timeout: float = 10.0,
                 retries: int = 3):
        if retries < 0:
            raise ValueError(f"retries must not be negative, got {retries}")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # trust_env: a proxy for the internet must not see, or break, calls to a server of one's own.
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, trust_env=False)
        self._retries = retries

    def rank(self, user_id: Id, candidates: Sequence[Id], context: dict[str, Any] | None = None,
             limit: int | None = None, as_of: int | None = None) -> RankResult:
        """Score ``candidates`` for ``user_id``, best first; at most ``limit`` of them. ``as_of``: microseconds, now if
        None. Raises ServerError, httpx.TransportError."""
        tolist = getattr(candidates, "tolist", None)
        body: dict[str, Any] = {"user_id": _plain(user_id), "candidates": tolist() if tolist else list(candidates)}
        body |= {name: value for name, value in (("context", context), ("limit", limit), ("as_of", as_of))
                 if value is not None}
        return RankResult.from_json(self._post("/v1/rank", body))

    def events(self, events: Iterable[dict[str, Any]]) -> WriteResult:
        """Append events: ``{"user_id", "item_id", "event_time"?, columns of the store..., "event_key"?}``. They are
        durable, and seen by the next request, when this returns."""
        keyed = [event if "event_key" in event else {**event, "event_key": uuid.uuid4().hex} for event in events]
        return _written(self._post("/v1/events", {"events": keyed}, safe=True))

    def items(self, items: Iterable[dict[str, Any]]) -> WriteResult:
        """Add or update items: ``{"item_id", columns of the catalogue...}``. The newest row of an item counts."""
        return _written(self._post("/v1/items", {"items": list(items)}, safe=True))

    def outcomes(self, outcomes: Iterable[dict[str, Any]]) -> WriteResult:
        """Report outcomes: ``{"request_id", "item_id", "label": {task: value}, "outcome_key"?}``."""
        keyed = [row if "outcome_key" in row else {**row, "outcome_key": uuid.uuid4().hex} for row in outcomes]
        return _written(self._post("/v1/outcomes", {"outcomes": keyed}, safe=True))

    def health(self) -> dict[str, Any]:
        """What ``/healthz`` says: ``status``, ``version``, ``model_version``."""
        return self._send("GET", "/healthz", None, safe=True)

    def ready(self) -> bool:
        """Whether the server takes traffic."""
        return self._http.get("/readyz").status_code == 200

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, path: str, body: dict[str, Any], safe: bool = False) -> dict[str, Any]:
        return self._send("POST", path, body, safe)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, safe: bool) -> dict[str, Any]:
        """One call with its retries; ``safe``: an attempt that may have arrived can be made again."""
        again = (httpx.TransportError,) if safe else (httpx.ConnectError, httpx.ConnectTimeout)
        for attempt in range(self._retries + 1):
            wait = 0.1 * 2**attempt
            try:
                response = self._http.request(method, path, json=body)
            except again:
                if attempt == self._retries:
                    raise
            else:
                if response.is_success:
                    return response.json()
                error = _error(response)
                if response.status_code != 503 or attempt == self._retries:
                    raise error
                wait = max(wait, _seconds(response.headers.get("retry-after", "")))
            time.sleep(min(wait, _RETRY_CAP_SECONDS))
        raise AssertionError("unreachable: the last attempt returns or raises")


def _error(response: httpx.Response) -> ServerError:
    try:
        error = response.json()["error"]
        return ServerError(response.status_code, error["field"], error["message"])
    except (ValueError, KeyError, TypeError):
        return ServerError(response.status_code, None, response.text[:200] or response.reason_phrase)


def _seconds(header: str) -> float:
    return float(header) if header.isdigit() else 0.0


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)  # numpy scalars are not JSON
    return item() if item else value


def _written(answer: dict[str, Any]) -> WriteResult:
    return WriteResult(answer["accepted"], answer["duplicates"], answer.get("version"))
