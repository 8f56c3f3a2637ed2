"""The HTTP server: a thin layer of FastAPI around a ``Service``."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from semel import __version__
from semel.serving.bodies import BodyTooLarge, BodyTooSlow, read_body
from semel.serving.checks import show
from semel.serving.documentation import document
from semel.serving.errors import InvalidRequest, NonFiniteScore, Overloaded
from semel.serving.gate import Gate
from semel.serving.metrics import CONTENT_TYPE
from semel.serving.service import LATENCY_TARGET, Service

if TYPE_CHECKING:
    from semel.serving.predictor import Predictor
    from semel.serving.processes import Processes

log = logging.getLogger("semel.serving")
BODY_LIMIT = 1 << 20


def create_app(predictor: Predictor, *, token: str | None = None, queue: int = 64, scorers: int = 1,
               body_limit: int = BODY_LIMIT, latency_target: float = LATENCY_TARGET, writers: Any = None,
               processes: Processes | None = None) -> FastAPI:
    """An ASGI application around ``predictor``, which stays the caller's to close after the application's shutdown.

    ``token``: what clients must send; without one only requests to a loopback name are answered. ``scorers`` threads
    score, ``queue`` more requests may wait; beyond, and where an answer within ``latency_target`` seconds is not to be
    expected, there is a 503 at once. ``body_limit``: bytes (413 beyond). ``writers``: what takes events, items and
    outcomes; by default the predictor's own stores, which refuse them where they are open for reading. ``processes``:
    the siblings of a worker. ``app.state.service`` is the Service.
    """
    service = Service(predictor, queue=queue, scorers=scorers, latency_target=latency_target, writers=writers)
    metrics_text = service.metrics.text
    if processes is not None:
        starts = processes.starts
        service.metrics.watch("semel_process_starts", "How often this process was started", lambda: starts)
        processes.start(service.metrics.text, service.told)
        metrics_text = processes.metrics

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()
        if processes is not None:
            processes.close()

    app = FastAPI(title="Semel", version=__version__, lifespan=lifespan, redoc_url=None,
                  redirect_slashes=False)
    app.state.service = service
    app.add_middleware(Gate, token=token)
    app.add_exception_handler(HTTPException, _http_error)

    def refused(reason: str) -> None:
        service.metrics.refused.labels(reason).inc()

    async def answer(request: Request, work: Callable[[bytes], Awaitable[bytes]]) -> Response:
        endpoint = request.url.path.removeprefix("/v1/")
        started = time.perf_counter()
        response = await _answer(request, work, body_limit, refused)
        seconds = time.perf_counter() - started
        service.metrics.seconds.labels(endpoint).observe(seconds)
        service.metrics.responses.labels(endpoint, str(response.status_code)).inc()
        if log.isEnabledFor(logging.INFO):
            log.info({"event": "request", "path": request.url.path, "status": response.status_code,
                      "milliseconds": round(1e3 * seconds, 3)})
        return response

    def post(name: str, work: Callable[[bytes], Awaitable[bytes]], summary: str) -> None:
        @app.post(f"/v1/{name}", name=name, summary=summary, tags=["v1"])
        async def endpoint(request: Request) -> Response:
            return await answer(request, work)

    post("retrieve", partial(service.score, "retrieve"), "The best items of the whole catalogue for a user")
    post("prerank", partial(service.score, "prerank"), "Score thousands of candidates by the lighter model")
    post("rank", partial(service.score, "rank"), "Score candidates for a user, best first")
    post("recommend", partial(service.score, "recommend"), "Retrieve, prerank and rank")
    post("events", lambda body: service.append("events", body), "Append events; the next request sees them")
    post("items", lambda body: service.append("items", body), "Add or update items in the catalogue")
    post("outcomes", service.outcomes, "Report what users did with what they were shown")

    @app.get("/v1/models", summary="Which models serve, did, and could", tags=["operation"])
    async def models() -> Response:
        return Response(await service.served(), media_type="application/json")

    post("models", service.serve, "Serve another version or run, or go back")

    @app.get("/healthz", summary="The process answers", tags=["operation"])
    async def healthz() -> Response:
        which = {} if processes is None else {"worker": processes.number}
        return _json(200, {"status": "ok", "version": __version__, "model_version": predictor.model_version, **which})

    @app.get("/readyz", summary="The server can take traffic", tags=["operation"])
    async def readyz() -> Response:
        reason = service.not_ready()
        return _json(200, {"status": "ready"}) if reason is None else _error(503, None, reason, {"retry-after": "1"})

    @app.get("/metrics", summary="Prometheus metrics", tags=["operation"])
    def metrics() -> Response:
        return Response(metrics_text(), media_type=CONTENT_TYPE)

    document(app, service.bodies)
    return app


async def _answer(request: Request, work: Callable[[bytes], Awaitable[bytes]], body_limit: int,
                  refused: Callable[[str], None]) -> Response:
    """The response to one POST; every way it can go wrong has a status and a message."""
    from semel.history import StoreError

    path = request.url.path
    try:
        body = await read_body(request.scope, request.receive, body_limit)
        return Response(await work(body), media_type="application/json")
    except BodyTooLarge as error:
        return _error(413, "body", str(error), {"connection": "close"})
    except BodyTooSlow as error:
        return _error(408, "body", str(error), {"connection": "close"})
    except InvalidRequest as error:
        return _error(422, error.field, error.message)
    except Overloaded as error:
        refused("overload")
        return _error(503, None, str(error), {"retry-after": str(error.retry_after)})
    except ClientDisconnect:
        return Response(status_code=499)
    except NonFiniteScore as error:
        log.error({"event": "no score", "path": path, "status": 500, "error": str(error)})
        return _error(500, None, str(error))
    except (OSError, StoreError) as error:  # a full or vanished disk: nothing unacknowledged is promised, keep serving
        refused("store")
        log.error({"event": "store unusable", "path": path, "status": 503, "error": str(error)[:500]})
        return _error(503, None, f"the store cannot be used: {error}", {"retry-after": "5"})
    except Exception:
        log.exception({"event": "bug", "path": path, "status": 500})
        return _error(500, None, "an error inside the server; its log has the details")


def _json(status: int, content: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def _error(status: int, field: str | None, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json(status, {"error": {"field": field, "message": message}}, headers)


async def _http_error(request: Request, error: Any) -> Response:
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {show(request.url.path)}; see /docs"
    elif error.status_code == 405:
        message = f"{request.method} is not for {show(request.url.path)}; see /docs"
    return _error(error.status_code, "path" if error.status_code in (404, 405) else None, message,
                  dict(error.headers or {}))
