"""The server process: from a run and a store to a listening socket, and to a clean end on SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from semel.serving.gate import check_binding

if TYPE_CHECKING:
    from semel.serving.predictor import Predictor

GRACE_SECONDS = 30


def run_server(run: str | Path, store: str | Path, host: str = "127.0.0.1", port: int = 8080, *,
               retrieve: str | Path | None = None, prerank: str | Path | None = None, token: str | None = None,
               max_candidates: int = 2000, queue: int = 64, workers: int = 1, threads: int = 1,
               share: bool = True, state_bytes: int = 256 << 20, body_limit: int = 1 << 20,
               memory: str | None = None, faiss: str | None = None, ready: Callable[[str], None] | None = None) -> None:
    """Serve ``run`` over ``store`` until SIGTERM or SIGINT, then finish what was accepted, write the exposures and
    return.

    ``retrieve``, ``prerank``: runs of the stages before ranking. ``port`` 0 takes a free one. ``threads``: of torch,
    for each of the ``workers`` that score. ``share``, ``state_bytes``, ``memory``, ``faiss``: as of
    ``Predictor.load``. ``ready`` gets the URL once requests are accepted. Raises ValueError (an address beyond loopback
    without a token, a store that does not fit the model), FileNotFoundError (no run, no store), OSError (the port is
    taken), StoreLocked (another writer).
    """
    check_binding(host, token)
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, got {port}")
    if threads < 1:
        raise ValueError(f"--threads must be at least 1, got {threads}")
    listener = _bind(host, port)
    with contextlib.closing(listener):
        def load() -> Predictor:
            from semel.serving.predictor import Predictor

            return Predictor.load(run, store, retrieve=retrieve, prerank=prerank, mode="a", memory=memory, faiss=faiss,
                                  max_candidates=max_candidates, share=share, state_bytes=state_bytes)

        _serve(load, listener, token, queue, workers, threads, body_limit, ready)


def _serve(load: Callable[[], Predictor], listener: socket.socket, token: str | None, queue: int, workers: int,
           threads: int, body_limit: int, ready: Callable[[str], None] | None) -> None:
    import torch
    import uvicorn

    from semel.serving.server import create_app

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
            if self.started and ready is not None:
                ready(_url(listener))

    _log_to_stderr()
    torch.set_num_threads(threads)
    with load() as predictor:
        predictor.warm_up()
        app = create_app(predictor, token=token, queue=queue, workers=workers, body_limit=body_limit)
        gc.collect()
        gc.freeze()  # the model and the store live as long as the process: collections need not visit them
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="on",
                                timeout_graceful_shutdown=GRACE_SECONDS, h11_max_incomplete_event_size=64 << 10)
        Server(config).run(sockets=[listener])


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
        listener.listen(1024)  # so that a second server on the port fails now, and not after loading its model
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} on {host} is in use; choose another with --port") from None
        raise OSError(f"cannot bind to port {port} on {host}: {error.strerror}") from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to_stderr() -> None:
    for name in ("semel.serving", "uvicorn.error"):
        logger = logging.getLogger(name)
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.WARNING)
            logger.propagate = False
