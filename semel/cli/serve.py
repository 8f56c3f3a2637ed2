"""``semel serve``: answer requests over HTTP with a trained run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def serve(
    run: Annotated[Path, typer.Argument(help="The folder of the run.")],
    store: Annotated[Path, typer.Option(help="The folder of the store.")] = Path("store"),
    retrieve: Annotated[Path | None, typer.Option(help="A run that retrieves; without, RUN ranks all items.")] = None,
    faiss: Annotated[str | None, typer.Option(help="Retrieve by a FAISS index of this kind (HNSW32), not by a scan of "
                                              "all items; needs the extra faiss.")] = None,
    prerank: Annotated[Path | None, typer.Option(help="A run that scores thousands of candidates before RUN.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback --token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    token: Annotated[str | None, typer.Option(help="What clients must send as a bearer token.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="A file with the token: other users cannot read it off the "
                                                    "list of processes.")] = None,
    max_candidates: Annotated[int, typer.Option(min=1, help="Most candidates of a request.")] = 2000,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; more are answered 503.")] = 64,
    latency_target: Annotated[float, typer.Option(help="Milliseconds in which an answer must be likely; what would "
                                                  "take longer is answered 503 at once.")] = 1000.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer; several share one that writes.")] = 1,
    scorers: Annotated[int, typer.Option(min=1, help="Requests that one process scores at the same time.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads of each scorer.")] = 1,
    share: Annotated[bool, typer.Option("--share/--no-share", help="Compute the model's request side once per request; "
                                        "without, once per candidate, to compare.")] = True,
    state_cache: Annotated[int, typer.Option(min=0, help="MiB of request states that are kept; 0 keeps none.")] = 256,
    memory: Annotated[str | None, typer.Option(help="Where training publishes item rows (a folder or a URL).",
                                               show_default="RUN/memory")] = None,
    compact_rows: Annotated[int, typer.Option(min=0, help="Events in a store's log after which it is compacted beside "
                                              "the requests; 0: never.")] = 50_000,
    log_level: Annotated[str, typer.Option(help="warning, or info: a JSON line for each request.")] = "warning",
    otlp: Annotated[str | None, typer.Option(help="URL of an OpenTelemetry collector to send spans to (semel[otel]), "
                                             "such as http://127.0.0.1:4318.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it listens as one JSON line.")] = False,
) -> None:
    """Answer requests over HTTP until SIGTERM or Ctrl-C, then finish what was accepted."""
    from semel.cli import output
    from semel.serving import run_server

    if token_file is not None:
        if token is not None:
            raise ValueError("give --token or --token-file, not both")
        token = token_file.read_text("ascii").strip()

    def ready(url: str) -> None:
        if as_json:
            print(json.dumps({"url": url}), flush=True)
        else:
            beside = (("retrieves", retrieve), ("preranks", prerank))
            stages = "".join(f", {verb} by {other}" for verb, other in beside if other is not None)
            output.results().print(f"[bold]{url}[/bold]  serves {run}{stages}; {url}/docs describes it; Ctrl-C ends it",
                                   soft_wrap=True)

    output.remark(f"loading {run}")
    run_server(run, store, host, port, workers=workers, ready=ready, retrieve=retrieve, prerank=prerank, memory=memory,
               faiss=faiss, token=token, max_candidates=max_candidates, queue=queue,
               latency_target=latency_target / 1e3, scorers=scorers, threads=threads, share=share,
               state_bytes=state_cache << 20, compact_rows=compact_rows, log_level=log_level, otlp=otlp)
