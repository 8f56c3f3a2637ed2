"""The HTTP clients: typed results, errors that carry the server's message, retries that cannot count twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from semel.serving import calls
from semel.serving.calls import Call, Health, Models, WriteResult
from semel.serving.requests import Diversity, StageSize
from semel.serving.results import Id, RankResult, RecommendResult

if TYPE_CHECKING:
    import numpy as np

Answer = TypeVar("Answer")
Diverse = Diversity | dict[str, Any] | None
_RETRY_CAP_SECONDS = 5.0


class ServerError(RuntimeError):
    """The server refused a request. ``status``: the HTTP code; ``field``: what is wrong (``candidates.3``), or None;
    ``message``: the server's own words."""

    def __init__(self, status: int, field: str | None, message: str):
        super().__init__(f"HTTP {status}: {field + ': ' if field else ''}{message}")
        self.status, self.field, self.message = status, field, message


class Client:
    """Talks to ``semel serve``. Thread-safe; a context manager.

    ``timeout``: seconds for one attempt. ``retries``: further attempts after a 503 (waiting as long as the server asks)
    or when no connection could be made. Events and outcomes without a key get one, so that an attempt whose answer was
    lost is not counted twice when it is made again. All methods raise ServerError, httpx.TransportError.
    """

    def __init__(self, base_url: str = "http://127.0.0.1:8080", token: str | None = None, timeout: float = 10.0,
                 retries: int = 3):
        self._http = httpx.Client(**_options(base_url, token, timeout, retries))
        self._retries = retries

    def retrieve(self, user_id: Id, limit: int | None = None, context: dict[str, Any] | None = None,
                 as_of: int | None = None, *, exclude_seen: bool = False, blocked: Sequence[Id] | np.ndarray = (),
                 diversity: Diverse = None, budget_ms: float | None = None) -> RankResult:
        """The ``limit`` best items of the whole catalogue for ``user_id``; arguments as of ``Predictor.retrieve``."""
        return self._send(calls.retrieve(user_id, {
            "limit": limit, "context": context, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity, "budget_ms": budget_ms}))

    def prerank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
                limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
                blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None) -> RankResult:
        """Score thousands of ``candidates`` by the lighter model, best first."""
        return self._send(calls.rank("prerank", user_id, candidates, {
            "context": context, "limit": limit, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity}))

    def rank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
             limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
             blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None) -> RankResult:
        """Score ``candidates`` for ``user_id``, best first; at most ``limit`` of them. ``as_of``: microseconds, now if
        None."""
        return self._send(calls.rank("rank", user_id, candidates, {
            "context": context, "limit": limit, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity}))

    def recommend(self, user_id: Id, limit: int | None = None, context: dict[str, Any] | None = None,
                  as_of: int | None = None, *, exclude_seen: bool = False, blocked: Sequence[Id] | np.ndarray = (),
                  diversity: Diverse = None, retrieve: StageSize | None = None, prerank: StageSize | None = None,
                  rank: StageSize | None = None) -> RecommendResult:
        """Retrieve, prerank and rank in one request; arguments as of ``Predictor.recommend``."""
        return self._send(calls.recommend(user_id, {
            "limit": limit, "context": context, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity, "retrieve": retrieve, "prerank": prerank, "rank": rank}))

    def events(self, events: Iterable[dict[str, Any]]) -> WriteResult:
        """Append events: ``{"user_id", "item_id", "event_time"?, columns of the store..., "event_key"?}``. They are
        durable, and seen by the next request, when this returns."""
        return self._send(calls.events(events))

    def items(self, items: Iterable[dict[str, Any]]) -> WriteResult:
        """Add or update items: ``{"item_id", columns of the catalogue...}``. The newest row of an item counts."""
        return self._send(calls.items(items))

    def outcomes(self, outcomes: Iterable[dict[str, Any]]) -> WriteResult:
        """Report outcomes: ``{"request_id", "item_id", "label": {task: value}, "outcome_key"?}``."""
        return self._send(calls.outcomes(outcomes))

    def models(self) -> Models:
        """Which versions serve each stage, which did before, which could."""
        return self._send(calls.models())

    def serve(self, version: str | None = None, *, run: str | None = None, stage: str = "rank") -> Models:
        """Have a stage served by a ``version`` ("latest": follow the run's newest again; "previous": roll back), or by
        another ``run`` beside the present one. No request is dropped; this returns when the next is scored by it."""
        return self._send(calls.serve(stage, version, run))

    def health(self) -> Health:
        """What ``/healthz`` says."""
        return self._send(calls.health())

    def ready(self) -> bool:
        """Whether the server takes traffic."""
        return self._http.get("/readyz").status_code == 200

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[Answer]) -> Answer:
        for attempt in _Attempts(call, self._retries):
            try:
                response = self._http.request(attempt.method, call.path, json=call.body)
            except httpx.TransportError as error:
                attempt.failed(error)
            else:
                if attempt.answered(response):
                    return call.read(response.json())
            time.sleep(attempt.wait)
        raise AssertionError("unreachable: the last attempt returns or raises")


class AsyncClient:
    """``Client`` for asyncio: the same methods, awaited. ``async with``, or ``await client.close()``."""

    def __init__(self, base_url: str = "http://127.0.0.1:8080", token: str | None = None, timeout: float = 10.0,
                 retries: int = 3):
        self._http = httpx.AsyncClient(**_options(base_url, token, timeout, retries))
        self._retries = retries

    async def retrieve(self, user_id: Id, limit: int | None = None, context: dict[str, Any] | None = None,
                       as_of: int | None = None, *, exclude_seen: bool = False,
                       blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None,
                       budget_ms: float | None = None) -> RankResult:
        """``Client.retrieve``."""
        return await self._send(calls.retrieve(user_id, {
            "limit": limit, "context": context, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity, "budget_ms": budget_ms}))

    async def prerank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
                      limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
                      blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None) -> RankResult:
        """``Client.prerank``."""
        return await self._send(calls.rank("prerank", user_id, candidates, {
            "context": context, "limit": limit, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity}))

    async def rank(self, user_id: Id, candidates: Sequence[Id] | np.ndarray, context: dict[str, Any] | None = None,
                   limit: int | None = None, as_of: int | None = None, *, exclude_seen: bool = False,
                   blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None) -> RankResult:
        """``Client.rank``."""
        return await self._send(calls.rank("rank", user_id, candidates, {
            "context": context, "limit": limit, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity}))

    async def recommend(self, user_id: Id, limit: int | None = None, context: dict[str, Any] | None = None,
                        as_of: int | None = None, *, exclude_seen: bool = False,
                        blocked: Sequence[Id] | np.ndarray = (), diversity: Diverse = None,
                        retrieve: StageSize | None = None, prerank: StageSize | None = None,
                        rank: StageSize | None = None) -> RecommendResult:
        """``Client.recommend``."""
        return await self._send(calls.recommend(user_id, {
            "limit": limit, "context": context, "as_of": as_of, "exclude_seen": exclude_seen, "blocked": blocked,
            "diversity": diversity, "retrieve": retrieve, "prerank": prerank, "rank": rank}))

    async def events(self, events: Iterable[dict[str, Any]]) -> WriteResult:
        """``Client.events``."""
        return await self._send(calls.events(events))

    async def items(self, items: Iterable[dict[str, Any]]) -> WriteResult:
        """``Client.items``."""
        return await self._send(calls.items(items))

    async def outcomes(self, outcomes: Iterable[dict[str, Any]]) -> WriteResult:
        """``Client.outcomes``."""
        return await self._send(calls.outcomes(outcomes))

    async def models(self) -> Models:
        """``Client.models``."""
        return await self._send(calls.models())

    async def serve(self, version: str | None = None, *, run: str | None = None, stage: str = "rank") -> Models:
        """``Client.serve``."""
        return await self._send(calls.serve(stage, version, run))

    async def health(self) -> Health:
        """``Client.health``."""
        return await self._send(calls.health())

    async def ready(self) -> bool:
        """``Client.ready``."""
        return (await self._http.get("/readyz")).status_code == 200

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _send(self, call: Call[Answer]) -> Answer:
        for attempt in _Attempts(call, self._retries):
            try:
                response = await self._http.request(attempt.method, call.path, json=call.body)
            except httpx.TransportError as error:
                attempt.failed(error)
            else:
                if attempt.answered(response):
                    return call.read(response.json())
            await asyncio.sleep(attempt.wait)
        raise AssertionError("unreachable: the last attempt returns or raises")


class _Attempts:
    """The attempts at one call: which failures are tried again, and after how long."""

    def __init__(self, call: Call[Any], retries: int):
        self.method = "GET" if call.body is None else "POST"
        self.wait = 0.0
        self._number, self._retries = -1, retries
        self._again = (httpx.TransportError,) if call.safe else (httpx.ConnectError, httpx.ConnectTimeout)

    def __iter__(self) -> Iterator[_Attempts]:
        for number in range(self._retries + 1):
            self._number, self.wait = number, min(0.1 * 2**number, _RETRY_CAP_SECONDS)
            yield self

    def failed(self, error: httpx.TransportError) -> None:
        """There was no answer. Raises it where that was the last attempt, or another would count twice."""
        if self._number == self._retries or not isinstance(error, self._again):
            raise type(error)(f"{error.request.url} does not answer: {str(error) or type(error).__name__}; is semel "
                              "serve running there?", request=error.request) from None

    def answered(self, response: httpx.Response) -> bool:
        """Whether it is the answer. Raises ServerError for a refusal that stays one."""
        if response.is_success:
            return True
        if response.status_code != 503 or self._number == self._retries:
            raise _error(response)
        self.wait = min(max(self.wait, _seconds(response.headers.get("retry-after", ""))), _RETRY_CAP_SECONDS)
        return False


def _options(base_url: str, token: str | None, timeout: float, retries: int) -> dict[str, Any]:
    if retries < 0:
        raise ValueError(f"retries must not be negative, got {retries}")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    # trust_env: a proxy for the internet must not see, or break, calls to a server of one's own.
    return {"base_url": base_url, "headers": headers, "timeout": timeout, "trust_env": False}


def _error(response: httpx.Response) -> ServerError:
    try:
        error = response.json()["error"]
        return ServerError(response.status_code, error["field"], error["message"])
    except (ValueError, KeyError, TypeError):
        return ServerError(response.status_code, None, response.text[:200] or response.reason_phrase)


def _seconds(header: str) -> float:
    return float(header) if header.isdigit() else 0.0
