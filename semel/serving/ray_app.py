"""A Ray Serve application around the same ``Predictor`` (extra ``ray``): replicas that read, and one that writes.

    from ray import serve
    from semel.serving.ray_app import application

    serve.run(application("/site/run", "/site/store", replicas=4))

Every node must see the run and the store under the same paths. The store has one writer, as ever: a deployment of one
replica, which the others give their rows to. So what ``semel serve --workers`` does with processes of one machine, this
does with actors of a cluster; the HTTP surface is the same one. Times are those of each node's clock: an event without
an ``event_time`` is seen by the next request on another node if their clocks agree (NTP) to within the time between.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from semel.serving.options import ServerOptions
from semel.serving.remote import TIMEOUT


class Writer:
    """The deployment that has the store open for appending."""

    def __init__(self, options: dict[str, Any]) -> None:
        from contextlib import ExitStack

        from semel.serving.clock import Clock
        from semel.serving.desk import Desk
        from semel.serving.stores import opened_writers

        self._opened = ExitStack()
        writers = self._opened.enter_context(opened_writers(Path(options["store"]), Clock().now))
        self._desk = Desk(writers, lambda _: False)  # erasing needs every replica, and Serve hides them: stop it first

    async def take(self, text: dict[str, Any], body: bytes) -> dict[str, Any]:
        """As the writer process's socket: an object and rows, answered with an object."""
        from semel.history.server.messages import describe_error

        try:
            return await asyncio.to_thread(self._desk.answer, text, bytearray(body))
        except Exception as error:
            return describe_error(error)

    def __del__(self) -> None:
        self._opened.close()


def over_handle(handle: Any) -> Any:
    """As ``remote.over_socket``, to a handle of the ``Writer`` deployment."""
    from semel.history.server.asking import Unanswered
    from semel.history.server.messages import error_of

    def send(text: dict[str, Any], body: Any, again: bool) -> dict[str, Any]:
        try:
            answer = handle.take.remote(text, body.to_pybytes()).result(timeout_s=TIMEOUT)
        except Exception as error:  # what Ray makes of an actor that is gone, or late
            raise Unanswered(str(error), perhaps=True) from error
        if "error" in answer:
            raise error_of(answer)
        return answer

    return send


class Ranker:
    """A replica that answers: a predictor over the store, open for reading, behind the HTTP application."""

    def __init__(self, options: dict[str, Any], writer: Any) -> None:
        from semel.serving.predictor import Predictor
        from semel.serving.remote import RemoteExposures, RemoteWriters, WriterLink
        from semel.serving.server import create_app

        settings = ServerOptions(**options)
        link = WriterLink(over_handle(writer))
        self._predictor = Predictor.load(
            settings.run, settings.store, mode="r", max_candidates=settings.max_candidates, share=settings.share,
            state_bytes=settings.state_bytes, exposures=RemoteExposures(link))
        self._predictor.warm_up()
        writers = RemoteWriters(self._predictor.store, self._predictor.catalogue,
                                self._predictor.artifact.features.item, link, self._predictor.clock.now)
        self._app = create_app(self._predictor, token=settings.token, queue=settings.queue, scorers=settings.scorers,
                               body_limit=settings.body_limit, latency_target=settings.latency_target, writers=writers)

    async def __call__(self, request: Any) -> Any:
        """One HTTP request, which Serve's proxy hands on."""
        from starlette.responses import Response

        body = await request.body()
        sent: list[dict[str, Any]] = []
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return given.pop() if given else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app({**request.scope, "app": self._app}, receive, send)
        start, *parts = sent
        return Response(b"".join(part.get("body", b"") for part in parts), start["status"],
                        {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]})

    def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if self._predictor.exposure_failure is not None:
            raise RuntimeError(f"exposures cannot be written: {self._predictor.exposure_failure}")

    def __del__(self) -> None:
        predictor = getattr(self, "_predictor", None)
        if predictor is not None:
            predictor.close()


def application(run: str | Path, store: str | Path, *, replicas: int = 2, **options: Any) -> Any:
    """What ``ray.serve.run`` takes. ``replicas`` that score; ``options``: the fields of ``ServerOptions``. Set a
    ``token`` where others can reach Serve's proxy. Raises ValueError for options that are none, ImportError without the
    extra."""
    from ray import serve

    settings = ServerOptions(str(run), str(store), **options).to_json()
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    writer = serve.deployment(Writer, name="writer", num_replicas=1, max_ongoing_requests=256)
    ranker = serve.deployment(Ranker, name="ranker", num_replicas=replicas,
                              max_ongoing_requests=settings["queue"] + settings["scorers"] + 32)
    return ranker.bind(settings, writer.bind(settings))
