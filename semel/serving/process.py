"""The server process: from a run and a store to a listening socket, and to a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semel.history.server.listening import MessageServer
from semel.serving.logs import log_to_stderr
from semel.serving.options import ServerOptions
from semel.serving.runtime import Runtime

if TYPE_CHECKING:
    from fastapi import FastAPI

    from semel.serving.predictor import Predictor
    from semel.serving.processes import Processes

GRACE_SECONDS = 30
KEEP_ALIVE_SECONDS = 75
"""Longer than the proxies and balancers that keep connections (60 s): else one would write to what was just closed."""
BACKLOG = 1024
HEAD_BYTES = 64 << 10


def run_server(run: str | Path, store: str | Path, host: str = "127.0.0.1", port: int = 8080, *, workers: int = 1,
               ready: Callable[[str], None] | None = None, **options: Any) -> None:
    """Serve ``run`` over ``store`` until SIGTERM or SIGINT, then finish what was accepted, write the exposures and
    return.

    ``port`` 0 takes a free one. ``workers``: processes that answer; more than one share a writer process. ``options``:
    the fields of ``ServerOptions``. ``ready`` gets the URL once requests are accepted. Raises ValueError (an address
    beyond loopback without a token, a store that does not fit the model), FileNotFoundError (no run, no store), OSError
    (the port is taken), StoreLocked (another writer).
    """
    settings = ServerOptions(str(run), str(store), **options)
    settings.check(host, port, workers)
    with contextlib.closing(_bind(host, port)) as listener:
        def started() -> None:
            if ready is not None:
                ready(_url(listener))

        if workers > 1:
            from semel.serving.supervisor import supervise

            supervise(settings, workers, listener, started)
        else:
            serve_alone(settings, listener, started)


def serve_alone(options: ServerOptions, listener: socket.socket, started: Callable[[], None]) -> None:
    """One process that reads, scores and writes."""
    from semel.examples.logs import ExposureLog
    from semel.serving.desk import MAX_BYTES, Desk
    from semel.serving.writers import ExposureWriter, Writers

    log_to_stderr(options.log_level)
    folder = Path(options.store)
    exposures = ExposureWriter(ExposureLog(folder / "exposures"))
    with contextlib.ExitStack() as opened:
        predictor = opened.enter_context(options.predictor("a", exposures))
        writers = Writers(predictor.store, predictor.catalogue, predictor.artifact.features.item, exposures,
                          predictor.clock.now, options.compact_rows)
        app = _app(predictor, options, writers)
        runtime = Runtime.make()
        opened.callback(runtime.remove, folder)
        desk = Desk(writers, app.state.service.told)
        opened.enter_context(MessageServer(runtime.writer, desk.answer, max_bytes=MAX_BYTES))
        runtime.announce(folder)
        _serve(app, options, listener, started)


def serve_worker(options: ServerOptions, runtime: Runtime, number: int, starts: int, listener: socket.socket,
                 started: Callable[[], None]) -> None:
    """One of several processes that read and score; the writer process writes. ``starts``: how often this one has been
    started."""
    from semel.serving.processes import Processes
    from semel.serving.remote import RemoteExposures, RemoteWriters, WriterLink, over_socket
    from semel.serving.shared_clock import SharedClock

    log_to_stderr(options.log_level)
    link = WriterLink(over_socket(runtime.writer))
    with options.predictor("r", RemoteExposures(link)) as predictor:
        predictor.keep_time_by(SharedClock(runtime.clock, number + 1))
        writers = RemoteWriters(predictor.store, predictor.catalogue, predictor.artifact.features.item, link,
                                predictor.clock.now)
        _serve(_app(predictor, options, writers, Processes(runtime, number, starts)), options, listener, started)


def _app(predictor: Predictor, options: ServerOptions, writers: Any, processes: Processes | None = None) -> FastAPI:
    import torch

    from semel.serving.server import create_app

    torch.set_num_threads(options.threads)
    predictor.warm_up()
    return create_app(
        predictor, token=options.token, queue=options.queue, scorers=options.scorers, body_limit=options.body_limit,
        latency_target=options.latency_target, writers=writers, processes=processes)


def _serve(app: FastAPI, options: ServerOptions, listener: socket.socket, started: Callable[[], None]) -> None:
    import uvicorn

    from semel.serving.patience import PatientProtocol
    from semel.serving.tracing import traced

    class Server(uvicorn.Server):
        # uvicorn raises the signal again after it has shut down, and the process would die of it; ours ended as asked.
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            if threading.current_thread() is not threading.main_thread():  # Python takes signals there only
                yield
                return
            before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
            try:
                yield
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            listener.listen(BACKLOG)
            if self.started:
                started()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            late = asyncio.create_task(_end_late_ones(self.server_state.connections))
            try:
                await super().shutdown(sockets)
            finally:
                late.cancel()

    _many_sockets()
    gc.collect()
    gc.freeze()  # the model and the store live as long as the process: collections need not visit them
    # A backlog of 1 is how many connections asyncio takes at a time: a process that is busy leaves the next one to its
    # siblings, which wait at the same socket. (The socket's own backlog is set again afterwards.)
    served = app if options.otlp is None else traced(app, options.otlp)
    config = uvicorn.Config(served, log_config=None, access_log=False, server_header=False, lifespan="on", ws="none",
                            http=PatientProtocol, loop="asyncio", backlog=1, timeout_graceful_shutdown=GRACE_SECONDS,
                            timeout_keep_alive=KEEP_ALIVE_SECONDS,
                            h11_max_incomplete_event_size=HEAD_BYTES)
    Server(config).run(sockets=[listener])


async def _end_late_ones(connections: Collection[Any]) -> None:
    """uvicorn asks each connection once to end with its request. One that had been accepted and was not yet made then
    would go on as long as its client does."""
    while True:
        for connection in list(connections):
            if not connection.transport.is_closing():
                connection.shutdown()
        await asyncio.sleep(0.05)


def _many_sockets() -> None:
    """As many open files as the system lets this user have: an idle client must not keep others out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # so that a second server on the port fails now, and not after loading its model
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is in use; choose another with --port") from None
        raise OSError(f"cannot bind to port {port} on {host}: {error.strerror}") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
